"""Threads, conditions and time, as small interfaces that an engine can replace.

Code that uses only these can be replayed: `seeded_concurrency` implements them so that a seed
chooses which thread continues.
"""

import abc
import collections
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

_MAX_WAIT_S = threading.TIMEOUT_MAX  # of one wait for a lock


class Condition(contextlib.AbstractContextManager["Condition"], Protocol):
    """A lock, and a way to wait until what it guards has changed. Reentrant.

    Like `threading.Condition`; call its methods only while you hold it.
    """

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until a predicate holds, at most `timeout_s`; returns whether it does."""
        ...

    def notify_all(self) -> None:
        """Wakes all waiting threads, which check their predicates again."""
        ...

    def notify_one(self) -> None:
        """Wakes the thread that has waited longest, if its predicate holds.

        For threads with the same predicate: each handles one change. A second call wakes
        another thread, also if the first one has not run yet.
        """
        ...

    def branch(self) -> "Condition":
        """Returns a condition with the same lock. Its waiting threads are woken separately."""
        ...


class Thread(Protocol):
    """A started thread."""

    @property
    def name(self) -> str:
        """Name of the thread."""
        ...

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the thread, at most `timeout_s`; returns whether it has ended."""
        ...


class Concurrency(Protocol):
    """Provides threads, conditions and time."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a daemon thread: Python does not wait for it at exit."""
        ...

    def condition(self) -> Condition:
        """Returns a new condition."""
        ...

    def now_s(self) -> float:
        """Returns monotonic time in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Pauses this thread."""
        ...


class SystemConcurrency:
    """Threads and time of the operating system."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a daemon thread."""
        return _SystemThread(name, run)

    def condition(self) -> Condition:
        """Returns a new condition."""
        return MonitorCondition(_SystemLock())

    def now_s(self) -> float:
        """Returns monotonic time in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pauses this thread."""
        time.sleep(seconds)


class _SystemThread:
    def __init__(self, name: str, run: Callable[[], None]):
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._thread.name

    def join(self, timeout_s: float | None = None) -> bool:
        if self._thread is not threading.current_thread():  # a thread cannot wait for itself
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


class MonitorLock(abc.ABC):
    """A reentrant lock for `MonitorCondition`, with the clock and the waits of its threads.

    A condition shares it with its branches. A notification takes effect when its thread leaves the
    lock, because the thread may change more before that.

    Attributes:
        depth: Number of times that the owner has entered the lock.
        notified: Groups of waiting threads; at least one of each must wake when the owner leaves.
    """

    # A finalizer may enter the lock between any two lines, in the thread that owns it. It wakes
    # others itself only at depth 0, where nothing is half done; otherwise the owner does it later.

    def __init__(self):
        self.depth = 0
        self.notified: list[WaitingThreads] = []

    def wake_notified(self) -> None:
        """Wakes threads; the owner calls it at depth 0."""
        while self.notified:
            self.depth = 1
            if self.notified:  # a finalizer may have done it
                self.notified.pop().wake_ready()
            self.depth = 0

    @abc.abstractmethod
    def enter(self) -> None:
        """Waits for the lock."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Leaves the lock once."""

    @abc.abstractmethod
    def leave_completely(self) -> Any:
        """Leaves the lock as often as it was entered; returns what `return_to` needs."""

    @abc.abstractmethod
    def return_to(self, entered: Any) -> None:
        """Enters the lock as often as it was left."""

    @abc.abstractmethod
    def make_turn(self) -> Any:
        """Returns a `Turn` for the present thread, for one wait."""

    @abc.abstractmethod
    def wait(self, turn: Any, timeout_s: float | None) -> None:
        """Waits for the turn."""

    @abc.abstractmethod
    def now_s(self) -> float:
        """Returns monotonic time in seconds."""


class Turn(Protocol):
    """The turn of a waiting thread; a `threading.Lock` is one."""

    def release(self) -> None:
        """Wakes the thread, or keeps it from waiting."""
        ...


class WaitingThreads:
    """The threads that wait for a condition.

    Args:
        lock: Lock of the condition.
    """

    def __init__(self, lock: MonitorLock):
        self._lock = lock
        # In the order in which they began to wait. A thread that was woken is removed at once, so
        # that `notify_one` does not choose it again before it runs.
        self._predicates: dict[Turn, Callable[[], bool]] = {}
        # For each notification since threads were woken, how many of them it wakes. A finalizer may
        # notify between any two lines, so a notification is added, and taken, by a single call.
        self._counts: collections.deque[float] = collections.deque()

    def add(self, turn: Turn, predicate: Callable[[], bool]) -> None:
        """Adds the present thread, which will wait for its turn until the predicate holds."""
        self._predicates[turn] = predicate

    def remove(self, turn: Turn) -> None:
        """Removes the present thread, if it was not woken."""
        self._predicates.pop(turn, None)

    def notify_all(self) -> None:
        """See `Condition`."""
        self._notify(math.inf)

    def notify_one(self) -> None:
        """See `Condition`."""
        self._notify(1)

    def _notify(self, count: float) -> None:
        # The order matters: the lock must know of this group after the last notification.
        self._counts.append(count)
        self._lock.notified.append(self)

    def wake_ready(self) -> None:
        """Wakes the notified threads whose predicates hold."""
        count = 0.0
        while self._counts:
            count += self._counts.popleft()
        most = int(min(count, len(self._predicates)))
        for turn, predicate in list(itertools.islice(self._predicates.items(), most)):
            if _may_hold(predicate):
                del self._predicates[turn]
                turn.release()


def _may_hold(predicate: Callable[[], bool]) -> bool:
    try:
        return predicate()
    except Exception:  # raised again in the thread that waits for it
        return True


class MonitorCondition(Condition):
    """A condition that wakes only threads whose predicate holds.

    Most notifications concern one of several waiting threads. The notifying thread therefore
    evaluates all predicates itself, when it leaves the condition: that takes a microsecond for
    each, while waking a thread costs two switches and the time until it gets Python's lock. If the
    number of waiting threads grows with the number of actors, use `notify_one`, or a branch for
    each thread.

    Args:
        lock: Lock that the branches of the condition share.
    """

    def __init__(self, lock: MonitorLock):
        self._lock, self._waiting = lock, WaitingThreads(lock)

    def __enter__(self) -> Condition:
        self._lock.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.leave()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `Condition`."""
        if predicate():
            return True
        lock = self._lock
        end_s = None if timeout_s is None else lock.now_s() + timeout_s
        left_s = timeout_s
        while left_s is None or left_s > 0:
            # A new turn each time. The last one may have been given after its wait had ended by the
            # timeout; a lock that is released twice is an error.
            turn = lock.make_turn()
            self._waiting.add(turn, predicate)
            try:
                entered = lock.leave_completely()
                try:
                    lock.wait(turn, left_s)
                finally:
                    lock.return_to(entered)
            finally:
                self._waiting.remove(turn)
            if predicate():
                return True
            left_s = None if end_s is None else end_s - lock.now_s()
        return False

    def notify_all(self) -> None:
        """See `Condition`."""
        self._waiting.notify_all()

    def notify_one(self) -> None:
        """See `Condition`."""
        self._waiting.notify_one()

    def branch(self) -> Condition:
        """See `Condition`."""
        return MonitorCondition(self._lock)


class _SystemLock(MonitorLock):
    def __init__(self):
        super().__init__()
        self._rlock: Any = threading.RLock()

    def enter(self) -> None:
        self._rlock.acquire()
        self.depth += 1

    def leave(self) -> None:
        # A KeyboardInterrupt may end a wait between two lines, before the lock is taken back.
        if not self._rlock._is_owned():
            return
        self.depth -= 1
        if not self.depth and self.notified:
            self.wake_notified()
        self._rlock.release()

    def leave_completely(self) -> tuple[int, Any]:
        depth, self.depth = self.depth, 0
        if self.notified:
            self.wake_notified()
        return depth, self._rlock._release_save()

    def return_to(self, entered: tuple[int, Any]) -> None:
        # Not `acquire`, which a signal interrupts: the caller would be without the lock that it is
        # about to leave. `threading.Condition` uses these methods, too.
        depth, state = entered
        self._rlock._acquire_restore(state)
        self.depth = depth

    def make_turn(self) -> threading.Lock:
        turn = threading.Lock()
        turn.acquire()
        return turn

    def wait(self, turn: threading.Lock, timeout_s: float | None) -> None:
        turn.acquire(timeout=-1 if timeout_s is None else min(timeout_s, _MAX_WAIT_S))

    def now_s(self) -> float:
        return time.monotonic()
