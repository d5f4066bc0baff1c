"""Dispatcher: gives closures to workers, and replaces workers that are lost."""

# One thread per worker takes a closure from the queue, calls the worker, and reports the outcome:
#
#     result            `claim`, record it (`on_finished`), then `finish`
#     function raised   `fail`: the error reaches the user
#     worker lost       a new actor with the same index; `put_back`
#     other actor lost  `on_lost` replaces the server; `put_back`
#     timeout           the worker is killed, and counts as lost
#
# A closure may therefore run several times. Its updates still take effect once: they carry the
# closure's number, and a server applies a number once (`ps/shard.py`). A worker that was given up
# may still send updates: they carry the same number, so each server applies the first to arrive.
#
# Lock order: `_changed` is the queue's condition and the only lock here. Never wait for an actor
# while holding it: an actor may need minutes, and every other thread needs the condition.

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
from tpudist.coordinator.worker import Completion, RunStatus
from tpudist.coordinator.worker_resources import WorkerResources
from tpudist.engine.concurrency import Thread
from tpudist.engine.engine import Actor, ActorDied, Engine, ResultTimeout
from tpudist.errors import CancelledError
from tpudist.ps import servers

MAX_RETRIES = 10
"""Number of workers, or of servers, that may be lost with one closure. Beyond it the closure itself
seems to end them, for example by exhausting the memory, and fails."""
END_S = 30.0
"""Seconds for which the end of a run waits for running closures."""
KILLED_S = 1.0
"""Seconds in which the thread of a killed worker notices that."""
NUM_FRAMES = 3
"""Number of frames of a worker that a note of an error shows: the innermost ones."""
_log = logging.getLogger("tpudist")


class Dispatcher:
    """Runs one thread per worker, which gives the worker one closure after the other.

    Args:
        engine: Runs the workers.
        queue: The closures.
        make_worker: Called with the number of a worker; returns its factory and the factory's
            arguments, as for `Engine.spawn`.
        timeout_s: Maximum seconds for a closure, without the start of a new worker. A worker that
            takes longer is killed.
        on_lost: Called when a closure ended because another actor, such as a server, died. The
            closure runs again when it returns. By default the death is the closure's error.
        describe_run: Called when a closure starts; returns the state of the run.
        on_finished: Called before a closure counts as finished.

    Attributes:
        resources: Objects that each worker creates before it runs the next closure.
    """

    def __init__(
        self,
        engine: Engine,
        queue: ClosureQueue,
        make_worker: Callable[[int], Sequence[Any]],
        *,
        timeout_s: float | None = None,
        on_lost: Callable[[ActorDied], None] | None = None,
        describe_run: Callable[[], RunStatus] = RunStatus,
        on_finished: Callable[[Closure, Completion], None] = lambda closure, completion: None,
    ):
        self._engine, self._queue = engine, queue
        self._make_worker, self._timeout_s = make_worker, timeout_s
        self._on_lost, self._on_finished = on_lost, on_finished
        self._describe_run = describe_run
        self._changed = queue.changed
        self.resources = WorkerResources(engine, queue.changed, timeout_s)
        # `_changed` guards the attributes below, except `_running`: each thread changes one entry.
        self._running: dict[Actor, Closure] = {}
        self._actors: dict[int, Actor] = {}
        self._threads: dict[int, Thread] = {}
        self._active: set[int] = set()  # workers that were added and not removed
        self._num_replaced: collections.Counter[int] = collections.Counter()
        self._starting: set[int] = set()  # lost workers whose successors start
        self._indices = itertools.count()

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers."""
        with self._changed:
            return sorted(self._active)

    @property
    def restarts(self) -> dict[int, int]:
        """Number of lost actors of each worker."""
        with self._changed:
            return {index: self._num_replaced[index] for index in sorted(self._active)}

    @property
    def starting(self) -> set[int]:
        """Numbers of lost workers whose successors start."""
        with self._changed:
            return set(self._starting)

    def add_worker(self) -> int:
        """Adds a worker; returns its number."""
        with self._changed:
            index = next(self._indices)
            # In one step, so that `remove_worker` finds the thread of each active worker.
            name = f"tpudist closures of worker {index}"
            self._threads[index] = self._engine.concurrency.start(name, lambda: self._serve(index))
            self._active.add(index)
        return index

    def remove_worker(self, index: int, timeout_s: float = END_S) -> None:
        """Removes a worker after its current closure, for which it waits at most `timeout_s`.

        Raises:
            ValueError: If the worker does not exist, or is the only one.
        """
        with self._changed:
            if index not in self._active or len(self._active) == 1:
                raise ValueError(
                    f"Cannot remove worker {index} from {sorted(self._active)}. It must be one of "
                    f"these workers, and at least one other worker must remain."
                )
            self._active.discard(index)
            self._queue.idle_workers.wake_all()
        self._threads[index].join(timeout_s)

    def close(self) -> None:
        """Ends all workers after their current closures, or kills them after `END_S`."""
        self._queue.stop()
        with self._changed:
            threads = dict(self._threads)
        for actor, closure in list(self._running.items()):
            if closure.is_claimed:  # Another worker has the result; nobody needs this one.
                self._engine.kill(actor, f"another worker finished {closure}")
        limit_s = self._engine.concurrency.now_s() + END_S
        for index, thread in threads.items():
            left_s = max(limit_s - self._engine.concurrency.now_s(), 0.0)
            if not thread.join(left_s):
                with self._changed:
                    actor = self._actors.get(index)
                if actor is not None:
                    _log.warning("%s does not finish its closure and is killed.", actor)
                    self._engine.kill(actor, "its run has ended")
                thread.join(KILLED_S)

    # The thread of a worker.

    def _serve(self, index: int) -> None:
        def is_active() -> bool:
            return index in self._active

        while self._run_next(index, is_active):
            pass
        with self._changed:
            actor = self._actors.pop(index, None)
            self.resources.forget_worker(index)
            if actor is not None:
                self.resources.forget_actor(actor)
        if actor is not None:
            self._engine.kill(actor, "it is no longer needed")

    def _run_next(self, index: int, is_active: Callable[[], bool]) -> bool:
        # A function of its own, so that no local of `_serve` keeps the closure while the thread
        # waits for the next one. The closure may be the last reference to the coordinator, whose
        # end stops this thread.
        closure = self._queue.get(index, is_wanted=is_active)
        if closure is not None:
            self._run(index, closure)
        return closure is not None

    def _run(self, index: int, closure: Closure) -> None:
        try:
            actor = self._actor_of(index)
        except Exception as error:  # The engine cannot start one.
            self._queue.fail(closure, index, error)
            return
        try:
            completion = self._call_worker(index, actor, closure)
            if not self._queue.claim(closure, index):
                return
            # The claim comes first: only one of two results may be recorded. If recording fails,
            # the closure is open again, so that another worker may complete it.
            try:
                self._on_finished(closure, completion)
            except BaseException:
                self._queue.disclaim(closure)
                raise
        except ActorDied as died:
            self._on_died(index, actor, closure, died)
        except ResultTimeout as timeout:
            # Kill before the closure is put back: the engine discards all later calls of a killed
            # actor, so its successor does not race with it.
            why = f"it did not finish {closure} in time: {timeout}"
            self._engine.kill(actor, why)
            self._replace(index, closure, f"{actor} was given up: {why}", "too late")
        except Exception as error:
            # The function raised it, or a resource of the worker; or an argument cannot be sent, or
            # the result cannot be recorded.
            _add_note(error, closure, actor)
            if closure.per_worker_values:
                # It consumed elements, but no `Completion` says how many.
                self.resources.fetch_positions(index, actor)
            self._queue.fail(closure, index, error)
        else:
            self._queue.finish(closure, index, completion.value)

    def _call_worker(self, index: int, actor: Actor, closure: Closure) -> Completion:
        args, kwargs = map_nest(lambda x: _choose_value(x, index), (closure.args, closure.kwargs))
        self.resources.sync(index, actor, closure.stored)
        fn = closure.fn if closure.stored is None else closure.stored.ref
        status = self._describe_run()
        call = self._engine.call(actor, "run", closure.number, status, fn, args, kwargs)
        self._running[actor] = closure
        try:
            completion: Completion = self._engine.result(call, self._timeout_s)
        finally:
            del self._running[actor]
        self.resources.record_positions(index, completion.positions)
        return completion

    def _actor_of(self, index: int) -> Actor:
        # Only the thread of the worker calls this, so no other thread spawns the same worker.
        with self._changed:
            actor = self._actors.get(index)
        if actor is None:
            actor = self._engine.spawn("worker", index, *self._make_worker(index))
            with self._changed:
                self._actors[index] = actor
        return actor

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
        """Starts a new actor for a lost worker, and puts its closure back."""
        with self._changed:
            actor = self._actors.pop(index, None)
            if actor is not None:
                self.resources.forget_actor(actor)
            self._num_replaced[index] += 1
            self._starting.add(index)
        # Before the new actor starts, which may need minutes: another worker may take the closure
        # at once.
        self._put_back(closure, index, "worker", why, cause)
        with self._changed:
            is_needed = index in self._active and not self._queue.is_stopped
        if is_needed:
            # An error appears again when the actor is used.
            with contextlib.suppress(Exception):
                self.resources.sync(index, self._actor_of(index))
        with self._changed:
            self._starting.discard(index)

    def _put_back(self, closure: Closure, worker: int, lost: str, why: str, cause: str) -> None:
        """Puts a closure back, or fails it after `MAX_RETRIES` losses of one role."""
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
    """Adds the closure and the worker to an error, once."""
    source = f"Raised in {closure}, on {actor}"
    # Python creates `__notes__` with the first note.
    if not any(note.startswith(source) for note in getattr(error, "__notes__", ())):
        frames = "".join(traceback.format_tb(error.__traceback__)[-NUM_FRAMES:])
        error.add_note(f"{source}.\n{frames}".rstrip())
