"""ThreadEngine: runs each actor as a thread of this process.

Values are shared, not copied: an actor must copy what it receives or returns before it changes it.
A thread cannot be killed, so a killed actor is fenced off: its calls are rejected, its results are
ignored, and its thread ends when it next calls the engine.
"""

import collections
import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tpudist.engine.concurrency import Concurrency, Condition, SystemConcurrency, Thread
from tpudist.engine.engine import Actor, ActorDied, ActorKilled, ResultTimeout, Serializer
from tpudist.engine.seeded_concurrency import SeededConcurrency

END_S = 5.0
"""Seconds for which `shutdown` waits for running actors."""
_log = logging.getLogger("tpudist")


class _Here(threading.local):
    actor: "_ThreadActor | None" = None  # the actor of this thread, if any


_here = _Here()


class ThreadEngine:
    """Runs actors as threads of this process.

    Args:
        seed: Seed of the order of all events, in which one thread runs at a time; None lets the
            operating system decide.

    Attributes:
        concurrency: Provides the threads. Users of the engine take their threads from it too, so
            that those are replayed.
        serializer: None, because actors share values.
        actors_may_hang: False: a thread exists as long as the program.
    """

    actors_may_hang = False

    def __init__(self, seed: int | None = None):
        self.serializer: Serializer | None = None
        self.concurrency: Concurrency = (
            SystemConcurrency() if seed is None else SeededConcurrency(seed)
        )
        # Lock order: never hold `_lock` together with a thread actor's `changed`, and never two of
        # those. Only the actor's thread waits for `changed` itself.
        self._lock = self.concurrency.condition()
        self._actors: dict[Actor, _ThreadActor] = {}
        self._counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._is_over = False

    def start(self) -> None:
        """Does nothing."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Starts a thread."""
        self._check_not_killed()
        with self._lock:
            if self._is_over:
                raise RuntimeError("The engine was shut down. Create another engine.")
            actor = Actor(role, index, self._counts[role, index])
            self._counts[role, index] += 1
            thread_actor = _ThreadActor(actor, self.concurrency)
            self._actors[actor] = thread_actor
        thread_actor.thread = self.concurrency.start(
            f"tpudist {actor}", lambda: thread_actor.run(factory, args)
        )
        return actor

    def call(self, actor: Actor, method: str, *args: object) -> "_Future":
        """Adds a call to the actor's queue."""
        self._check_not_killed()
        thread_actor = self._find(actor)
        args = tuple(x.value if isinstance(x, _Ref) else x for x in args)
        return thread_actor.add(method, args)

    def result(self, future: "_Future", timeout_s: float | None = None) -> Any:
        """Waits until the thread has called the method."""
        self._check_not_killed()
        is_over = future.wait(_here.actor, timeout_s)
        self._check_not_killed()
        if not is_over:
            raise ResultTimeout(
                f"{future.method} of {future.actor} has no result after {timeout_s:g} s."
            )
        if future.error is not None:
            raise future.error.with_traceback(future.traceback)
        return future.value

    def ping(self, actor: Actor) -> "_Future":
        """Reports at once whether an actor is alive."""
        return self._find(actor).ping()

    def put(self, value: object) -> "_Ref":
        """Returns a reference to the value itself."""
        return _Ref(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Fences an actor off."""
        thread_actor = self._find(actor)
        thread_actor.end(why)
        thread_actor.end_wait()

    def shutdown(self) -> None:
        """Ends all threads that return to the engine, and logs the names of the others."""
        with self._lock:
            self._is_over = True
            thread_actors, self._actors = list(self._actors.values()), {}
        for thread_actor in thread_actors:
            thread_actor.end("the engine was shut down")
        limit_s = self.concurrency.now_s() + END_S
        for thread_actor in thread_actors:
            left_s = max(limit_s - self.concurrency.now_s(), 0.0)
            if thread_actor.thread is not None and not thread_actor.thread.join(left_s):
                _log.warning(
                    "%s still runs %s, and a thread cannot be killed. Its results no longer have "
                    "an effect, but it runs until this process ends.",
                    thread_actor.actor,
                    thread_actor.running or "its factory",
                )

    def _find(self, actor: Actor) -> "_ThreadActor":
        thread_actor = self._actors.get(actor)  # without the lock: reading an entry is one step
        if thread_actor is None:  # after `shutdown`: one without a thread, which is dead
            thread_actor = _ThreadActor(actor, self.concurrency)
            thread_actor.end("the engine was shut down")
        return thread_actor

    def _check_not_killed(self) -> None:
        if _is_killed(_here.actor):
            raise ActorKilled


@dataclasses.dataclass(frozen=True)
class _Ref:
    value: object


class _Future:
    """A call, and its result. `changed` of the called actor guards it."""

    def __init__(self, called: "_ThreadActor", method: str, args: tuple[object, ...]):
        self.actor, self.method, self.args = called.actor, method, args
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self._changed = called.changed
        # For threads that wait for this result. Many threads may wait for results of one actor, and
        # each of them concerns only one.
        self._finished: Condition | None = None

    def finish(self, value: object, error: BaseException | None) -> None:
        self.value, self.error, self.args = value, error, ()
        self.traceback = None if error is None else error.__traceback__
        self.is_done = True
        if self._finished is not None:
            self._finished.notify_all()

    def wait(self, waiting: "_ThreadActor | None", timeout_s: float | None) -> bool:
        """Waits for the result; returns whether it has come, or the waiting actor was killed."""
        with self._changed:
            if self.is_done:
                return True
            if self._finished is None:
                self._finished = self._changed.branch()
            if waiting is None:
                return self._finished.wait_for(lambda: self.is_done, timeout_s)
            # `kill` first sets `is_killed`, and then reads `waits_for`: either it finds this
            # condition, or the predicate finds that the actor was killed.
            waiting.waits_for = self._finished
            try:
                return self._finished.wait_for(lambda: self.is_done or waiting.is_killed, timeout_s)
            finally:
                waiting.waits_for = None


class _ThreadActor:
    """An actor: its thread, its queue of calls, and whether it is alive."""

    def __init__(self, actor: Actor, concurrency: Concurrency):
        self.actor = actor
        self.changed = concurrency.condition()
        self.thread: Thread | None = None
        self.running = ""
        self.is_killed = False
        self.waits_for: Condition | None = None  # of the result for which its thread waits
        self._why, self._was_created = "", True
        self._queue: collections.deque[_Future] = collections.deque()

    def add(self, method: str, args: tuple[object, ...]) -> _Future:
        future = _Future(self, method, args)
        with self.changed:
            if self.is_killed:
                future.finish(None, ActorDied(self.actor, self._why, self._was_created))
            else:
                self._queue.append(future)
                self.changed.notify_all()
        return future

    def ping(self) -> _Future:
        future = _Future(self, "ping", ())
        with self.changed:
            died = ActorDied(self.actor, self._why, self._was_created) if self.is_killed else None
            future.finish(None, died)
        return future

    def end(self, why: str, was_created: bool = True) -> None:
        with self.changed:
            if self.is_killed:
                return
            self.is_killed, self._why, self._was_created = True, why, was_created
            while self._queue:
                self._queue.popleft().finish(None, ActorDied(self.actor, why, was_created))
            self.changed.notify_all()

    def end_wait(self) -> None:
        """Wakes its thread after `end`, if the thread waits for a result of another actor."""
        waits_for = self.waits_for
        if waits_for is not None:
            with waits_for:
                waits_for.notify_all()

    def run(self, factory: Callable[..., Any], args: tuple[object, ...]) -> None:
        """Creates the actor, and answers its calls."""
        _here.actor = self
        if self.is_killed:  # without the lock: `_next` looks again
            return
        try:
            instance = factory(*args)
        except ActorKilled:
            return
        except BaseException:  # all its calls report the error
            self.end(f"it could not be created.\n{traceback.format_exc()}", was_created=False)
            return
        while self._answer_next(instance):
            pass

    def _answer_next(self, instance: object) -> bool:
        """Answers the next call; returns False when the actor was killed."""
        # A function of its own, so that this thread keeps no call while it waits: a call may be the
        # last reference to an object whose end stops this thread.
        future = self._next()
        if future is None:
            return False
        value, error = None, None
        try:
            # The interface calls methods of users' objects by name.
            value = getattr(instance, future.method)(*future.args)
        except ActorKilled:
            pass
        except BaseException as raised:  # `result` raises it for the caller
            error = raised
        with self.changed:
            if not future.is_done:
                future.finish(value, error)
            if self._queue and self._queue[0] is future:
                self._queue.popleft()
            self.running = ""
        del error  # its traceback refers to this frame
        return True

    def _next(self) -> _Future | None:
        with self.changed:
            self.changed.wait_for(lambda: bool(self._queue) or self.is_killed)
            if self.is_killed:
                return None
            self.running = self._queue[0].method
            return self._queue[0]  # it stays in the queue, so that `end` finishes it


def _is_killed(thread_actor: _ThreadActor | None) -> bool:
    return thread_actor is not None and thread_actor.is_killed
