"""Dispatcher: gives closures to workers, and puts others in the place of those that are lost."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.remote_value import PerWorkerValue, map_nest
from tpudist.coordinator.worker import Completion, Surroundings
from tpudist.engine.concurrency import Thread
from tpudist.engine.engine import Actor, ActorDied, Engine, ResultTimeout
from tpudist.errors import CancelledError
from tpudist.ps import servers

MAX_RETRIES = 10
"""How many workers, or servers, may be lost with one closure: then it is what ends them."""
START_S = 300.0
"""How long a new worker has to be there, and to make what it keeps, if closures have a limit."""
END_S = 30.0
"""How long the end of a run waits for what workers are doing."""
_log = logging.getLogger("tpudist")


class Dispatcher:
    """A thread for each worker, which has it run one closure after the other.

    Attributes:
        unused: Keys of what workers need not keep any more, added by whoever finds out: also by the
            garbage collector, which must not wait for a lock.
    """

    def __init__(
        self,
        engine: Engine,
        queue: ClosureQueue,
        make_worker: Callable[[int], Sequence[Any]],
        *,
        timeout_s: float | None = None,
        on_lost: Callable[[ActorDied], None] | None = None,
        describe_run: Callable[[], Surroundings] = Surroundings,
        on_finished: Callable[[Closure, Completion], None] = lambda closure, completion: None,
    ):
        """No worker yet.

        Args:
            engine: Where workers live.
            queue: Of the closures.
            make_worker: The factory and its arguments, as `Engine.spawn` takes them, of the worker
                with a number.
            timeout_s: After which a worker is given up that has not finished a closure; the time
                that a new one takes to be there does not count.
            on_lost: Called when a closure could not run because another actor than its worker has
                died; when it returns the closure is run again. By default that is the closure's
                error.
            describe_run: What closures are told of the run when they begin.
            on_finished: Called before a closure counts as finished.
        """
        self._engine, self._queue = engine, queue
        self._make_worker, self._timeout_s = make_worker, timeout_s
        self._on_lost, self._on_finished = on_lost, on_finished
        self._describe_run = describe_run
        self._positions: dict[int, dict[int, Any]] = {}  # of iterators, by worker and key
        self._changed = queue.changed
        self._actors: dict[int, Actor] = {}
        self._threads: dict[int, Thread] = {}
        self._running: dict[Actor, Closure] = {}
        self._wanted: set[int] = set()
        self._kept: dict[int, tuple[Callable[..., Any], Sequence[Any]]] = {}
        self._made: dict[Actor, set[int]] = {}
        self._num_replaced: collections.Counter[int] = collections.Counter()
        self._starting: set[int] = set()  # workers of which another one is being made
        self._indices = itertools.count()
        self.unused: collections.deque[int] = collections.deque()

    @property
    def workers(self) -> list[int]:
        """The numbers of the workers that take closures."""
        with self._changed:
            return sorted(self._wanted)

    @property
    def restarts(self) -> dict[int, int]:
        """How many workers were lost in the place of each one, for those that take closures."""
        with self._changed:
            return {index: self._num_replaced[index] for index in sorted(self._wanted)}

    @property
    def starting(self) -> set[int]:
        """The numbers of lost workers in whose place another one is being made."""
        with self._changed:
            return set(self._starting)

    def add_worker(self) -> int:
        """Has one more worker take closures; its number."""
        with self._changed:
            index = next(self._indices)
            self._wanted.add(index)
        name = f"tpudist closures of worker {index}"
        self._threads[index] = self._engine.concurrency.start(name, lambda: self._serve(index))
        return index

    def remove_worker(self, index: int, timeout_s: float = END_S) -> None:
        """Has a worker take no more closures, and ends it after the one that it runs.

        Raises:
            ValueError: There is no such worker, or it is the last one.
        """
        with self._changed:
            if index not in self._wanted or len(self._wanted) == 1:
                raise ValueError(
                    f"Cannot remove worker {index} from {sorted(self._wanted)}. It must be one of "
                    f"these workers, and at least one other worker must remain."
                )
            self._wanted.discard(index)
            self._changed.notify_all()
        self._threads[index].join(timeout_s)
        self._queue.clear(index)

    def keep(self, key: int, fn: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Has each worker make something before it runs what comes next; see `worker.Kept`.

        A worker in the place of a lost one makes it anew.
        """
        with self._changed:
            self._kept[key] = fn, args

    def forget(self, key: int) -> None:
        """Has no worker keep something any more, once what was scheduled before has run."""
        with self._changed:
            self._kept.pop(key, None)

    def close(self) -> None:
        """Ends all workers, after what they are running."""
        self._queue.stop()
        for actor, closure in list(self._running.items()):
            if closure.is_claimed:
                self._engine.kill(actor, f"another worker finished {closure}")
        limit_s = self._engine.concurrency.now_s() + END_S
        for index, thread in self._threads.items():
            left_s = max(limit_s - self._engine.concurrency.now_s(), 0.0)
            if not thread.join(left_s):
                with self._changed:
                    actor = self._actors.get(index)
                if actor is not None:
                    _log.warning("%s does not finish its closure and is killed.", actor)
                    self._engine.kill(actor, "its run has ended")
                thread.join(1.0)

    # The thread of a worker.

    def _serve(self, index: int) -> None:
        def is_wanted() -> bool:
            return index in self._wanted

        while self._run_next(index, is_wanted):
            pass
        with self._changed:
            actor = self._actors.pop(index, None)
            self._positions.pop(index, None)
            if actor is not None:
                self._made.pop(actor, None)
        if actor is not None:
            self._engine.kill(actor, "it is no longer needed")

    def _run_next(self, index: int, is_wanted: Callable[[], bool]) -> bool:
        """Runs a closure and holds it no longer: it may hold what ends this thread when it goes."""
        closure = self._queue.get(index, is_wanted=is_wanted)
        if closure is not None:
            self._run(index, closure)
        return closure is not None

    def _run(self, index: int, closure: Closure) -> None:
        try:
            actor = self._actor_of(index)
        except Exception as error:  # there can be none
            self._queue.fail(closure, index, error)
            return
        try:
            args, kwargs = map_nest(
                lambda x: _choose_value(x, index), (closure.args, closure.kwargs)
            )
            self._make_what_is_kept(index, actor, closure)
            fn = closure.fn if closure.stored is None else closure.stored.kept
            run = closure.number, self._describe_run(), fn, args, kwargs
            call = self._engine.call(actor, "run", *run)
            self._running[actor] = closure
            try:
                completion: Completion = self._engine.result(call, self._timeout_s)
            finally:
                del self._running[actor]
            self._positions.setdefault(index, {}).update(completion.positions)
            if not self._queue.claim(closure, index):
                return
            try:
                self._on_finished(closure, completion)
            except BaseException:
                self._queue.disclaim(closure)
                raise
        except ActorDied as died:
            self._on_died(index, actor, closure, died)
        except ResultTimeout as timeout:
            why = f"it did not finish {closure} in time: {timeout}"
            self._engine.kill(actor, why)
            self._replace(index, closure, f"{actor} was given up: {why}", "too late")
        except Exception as error:  # the function's own
            _add_note(error, closure, actor)
            if closure.held:  # what it took is taken, though it says not where the iterators are
                with contextlib.suppress(Exception):  # of the worker's death the next one hears
                    call = self._engine.call(actor, "positions")
                    positions = self._engine.result(call, self._timeout_s)
                    self._positions.setdefault(index, {}).update(positions)
            self._queue.fail(closure, index, error)
        else:
            self._queue.finish(closure, index, completion.value)

    def _actor_of(self, index: int) -> Actor:
        with self._changed:
            actor = self._actors.get(index)
        if actor is None:
            actor = self._engine.spawn("worker", index, *self._make_worker(index))
            with self._changed:
                self._actors[index] = actor
        return actor

    def _make_what_is_kept(self, index: int, actor: Actor, closure: Closure | None = None) -> None:
        with self._changed:
            while self.unused:
                self._kept.pop(self.unused.popleft(), None)
            kept, is_new = dict(self._kept), actor not in self._made
            made = self._made.setdefault(actor, set())
        stored = None if closure is None else closure.stored
        if stored is not None:  # it may have been forgotten in the meantime
            kept[stored.kept.key] = stored.make, (stored.data,)
        limit_s = None if self._timeout_s is None else max(self._timeout_s, START_S)
        if is_new and limit_s is not None:
            self._engine.result(self._engine.call(actor, "positions"), limit_s)
        positions = self._positions.setdefault(index, {})
        for key in positions.keys() - kept.keys():
            del positions[key]
        for key in sorted(made - kept.keys()):
            self._engine.call(actor, "forget", key)
            made.discard(key)
        for key in sorted(kept.keys() - made):
            fn, args = kept[key]
            call = self._engine.call(actor, "keep", key, fn, args, positions.get(key))
            self._engine.result(call, limit_s)
            made.add(key)

    def _on_died(self, index: int, actor: Actor, closure: Closure, died: ActorDied) -> None:
        if died.actor == actor:
            self._replace(index, closure, str(died))
        elif self._on_lost is None:
            _add_note(died, closure, actor)
            self._queue.fail(closure, index, died)
        else:
            try:
                self._on_lost(died)
            except Exception as error:
                self._queue.fail(closure, index, error)
            else:
                lost = died.actor.role
                cause = "server died" if lost == servers.ROLE else f"{lost} died"
                self._put_back(closure, index, lost, str(died), cause)

    def _replace(self, index: int, closure: Closure, why: str, cause: str = "worker died") -> None:
        """Makes another worker in the place of a lost one."""
        with self._changed:
            actor = self._actors.pop(index, None)
            if actor is not None:
                self._made.pop(actor, None)
            self._num_replaced[index] += 1
            self._starting.add(index)
        self._put_back(closure, index, "worker", why, cause)
        with self._changed:
            is_needed = index in self._wanted and not self._queue.is_stopped
        # It may take long to be made, and others may wait for something to run meanwhile: it is
        # ready before it takes a closure.
        if is_needed:
            with contextlib.suppress(Exception):  # raised again for the closure that needs it
                self._make_what_is_kept(index, self._actor_of(index))
        with self._changed:
            self._starting.discard(index)

    def _put_back(self, closure: Closure, worker: int, lost: str, why: str, cause: str) -> None:
        """Has a closure run again, but for one that seems to be what ends workers or servers."""
        closure.num_lost[lost] += 1
        if closure.num_lost[lost] > MAX_RETRIES:
            causes = "\n".join([*closure.retries, why])
            self._queue.fail(
                closure,
                worker,
                CancelledError(
                    f"{closure} was started {len(closure.retries) + 1} times, and a {lost} was "
                    f"lost {MAX_RETRIES + 1} times meanwhile: the closure seems to be the "
                    f"cause.\n{causes}"
                ),
            )
            return
        self._queue.put_back(closure, worker, why, cause)


def _choose_value(x: Any, worker: int) -> Any:
    return x.of_worker(worker) if isinstance(x, PerWorkerValue) else x


def _add_note(error: BaseException, closure: Closure, actor: Actor) -> None:
    """Says where an error comes from, once."""
    told = f"Raised in {closure}, on {actor}"
    if not any(note.startswith(told) for note in getattr(error, "__notes__", ())):
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        error.add_note(f"{told}.\n{where}".rstrip())
