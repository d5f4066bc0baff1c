"""The engine in one process: each actor is a thread.

Values are shared, not copied: an actor that keeps what it was given, or gives what it keeps, must
copy it if it changes it later. A thread cannot be killed, so a killed actor is fenced off: its
calls are refused, its results are not looked at, and its thread ends when it comes back.
"""

import collections
import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tpudist.engine.concurrency import Concurrency, SystemConcurrency, Thread
from tpudist.engine.engine import Actor, ActorDied, ActorKilled, ResultTimeout, Serializer
from tpudist.engine.seeded_concurrency import SeededConcurrency

END_S = 5.0
"""How long `shutdown` waits for what actors are doing."""
_log = logging.getLogger("tpudist")
_here = threading.local()  # `record`: the actor whose thread this is


class ThreadEngine:
    """Runs actors as threads of this process.

    Attributes:
        concurrency: Of the threads; who uses the engine has its own threads from there, so that
            those are replayed, too.
        serializer: None: actors share values.
        actors_may_hang: False: a thread is there as long as the program is.
    """

    actors_may_hang = False

    def __init__(self, seed: int | None = None):
        """No actor yet.

        Args:
            seed: Has the order of all events be that of this seed, whatever the machine does: one
                thread runs at a time, and a generator chooses which.
        """
        self.serializer: Serializer | None = None
        self.concurrency: Concurrency = (
            SystemConcurrency() if seed is None else SeededConcurrency(seed)
        )
        self._lock = self.concurrency.condition()
        self._records: dict[Actor, _Record] = {}
        self._counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._is_over = False

    def start(self) -> None:
        """Nothing is to be done."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: Any) -> Actor:
        """Starts a thread."""
        self._refuse_killed()
        with self._lock:
            if self._is_over:
                raise RuntimeError("The engine was shut down. Create another engine.")
            actor = Actor(role, index, self._counts[role, index])
            self._counts[role, index] += 1
            record = _Record(actor, self.concurrency)
            self._records[actor] = record
        record.thread = self.concurrency.start(
            f"tpudist {actor}", lambda: record.run(factory, args)
        )
        return actor

    def call(self, actor: Actor, method: str, *args: Any) -> "_Future":
        """Puts a message into the actor's queue."""
        self._refuse_killed()
        record = self._record_of(actor)
        args = tuple(x.value if isinstance(x, _Ref) else x for x in args)
        return record.add(method, args)

    def result(self, future: "_Future", timeout_s: float | None = None) -> Any:
        """Waits for the thread to have called the method."""
        self._refuse_killed()
        record = self._record_of(future.actor)
        mine = getattr(_here, "record", None)
        with record.changed:
            came = record.changed.wait_for(lambda: future.is_done or _is_killed(mine), timeout_s)
            self._refuse_killed()
            if not came:
                raise ResultTimeout(
                    f"{future.method} of {future.actor} has no result after {timeout_s:g} s."
                )
        if future.error is not None:
            raise future.error.with_traceback(future.traceback)
        return future.value

    def ping(self, actor: Actor) -> "_Future":
        """Says at once whether an actor is alive."""
        return self._record_of(actor).ping()

    def put(self, value: Any) -> "_Ref":
        """The value itself."""
        return _Ref(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Fences an actor off."""
        self._record_of(actor).end(why)
        with self._lock:  # one that waits for the result of another one is to see it
            records = list(self._records.values())
        for record in records:
            record.wake()

    def shutdown(self) -> None:
        """Ends all threads that come back to the engine; names those that do not."""
        with self._lock:
            self._is_over = True
            records, self._records = list(self._records.values()), {}
        for record in records:
            record.end("the engine was shut down")
        for record in records:
            record.wake()
        limit_s = self.concurrency.now_s() + END_S
        for record in records:
            left_s = max(limit_s - self.concurrency.now_s(), 0.0)
            if record.thread is not None and not record.thread.join(left_s):
                _log.warning(
                    "%s still runs %s, and a thread cannot be killed. Its results no longer have "
                    "an effect, but it runs until this process ends.",
                    record.actor,
                    record.running or "its factory",
                )

    def _record_of(self, actor: Actor) -> "_Record":
        with self._lock:
            record = self._records.get(actor)
        if record is None:  # after `shutdown`
            record = _Record(actor, self.concurrency)
            record.end("the engine was shut down")
        return record

    def _refuse_killed(self) -> None:
        if _is_killed(getattr(_here, "record", None)):
            raise ActorKilled


@dataclasses.dataclass(frozen=True)
class _Ref:
    value: Any


class _Future:
    def __init__(self, actor: Actor, method: str, args: tuple):
        self.actor, self.method, self.args = actor, method, args
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None

    def finish(self, value: Any, error: BaseException | None) -> None:
        self.value, self.error, self.args = value, error, ()
        self.traceback = None if error is None else error.__traceback__
        self.is_done = True


class _Record:
    """An actor: its thread, what it is to do, and whether it is alive."""

    def __init__(self, actor: Actor, concurrency: Concurrency):
        self.actor = actor
        self.changed = concurrency.condition()
        self.thread: Thread | None = None
        self.running = ""
        self.is_killed = False
        self._why, self._was_made = "", True
        self._queue: collections.deque[_Future] = collections.deque()

    def add(self, method: str, args: tuple) -> _Future:
        future = _Future(self.actor, method, args)
        with self.changed:
            if self.is_killed:
                future.finish(None, ActorDied(self.actor, self._why, self._was_made))
            else:
                self._queue.append(future)
                self.changed.notify_all()
        return future

    def ping(self) -> _Future:
        future = _Future(self.actor, "ping", ())
        with self.changed:
            died = ActorDied(self.actor, self._why, self._was_made) if self.is_killed else None
            future.finish(None, died)
        return future

    def end(self, why: str, was_made: bool = True) -> None:
        with self.changed:
            if self.is_killed:
                return
            self.is_killed, self._why, self._was_made = True, why, was_made
            while self._queue:
                self._queue.popleft().finish(None, ActorDied(self.actor, why, was_made))
            self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def run(self, factory: Callable[..., Any], args: tuple) -> None:
        """The life of the thread."""
        _here.record = self
        if self.is_killed:
            return
        try:
            made = factory(*args)
        except ActorKilled:
            return
        except BaseException:  # reported by all that it is called for
            self.end(f"it could not be created.\n{traceback.format_exc()}", was_made=False)
            return
        while self._answer_next(made):
            pass

    def _answer_next(self, made: Any) -> bool:
        """Does what comes next, and holds nothing of it: it may hold what ends this thread."""
        future = self._next()
        if future is None:
            return False
        value, error = None, None
        try:
            value = getattr(made, future.method)(*future.args)
        except ActorKilled:
            pass
        except BaseException as raised:  # the caller's
            error = raised
        with self.changed:
            if not future.is_done:
                future.finish(value, error)
            if self._queue and self._queue[0] is future:
                self._queue.popleft()
            self.running = ""
            self.changed.notify_all()
        del error  # which holds this frame
        return True

    def _next(self) -> _Future | None:
        with self.changed:
            self.changed.wait_for(lambda: bool(self._queue) or self.is_killed)
            if self.is_killed:
                return None
            self.running = self._queue[0].method
            return self._queue[0]  # it stays there, so that `end` finishes it


def _is_killed(record: _Record | None) -> bool:
    return record is not None and record.is_killed
