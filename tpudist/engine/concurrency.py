"""Threads, conditions and time, as small interfaces that an engine can replace.

Code that uses only these can be replayed: `seeded_concurrency` implements them so that a seed
chooses which thread continues.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol


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
        return _SystemCondition()

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


class _SystemCondition(Condition):
    """A condition that wakes only threads whose predicate holds.

    Most notifications concern one of many waiting threads. The notifying thread therefore evaluates
    all predicates itself, when it leaves the condition: that takes a microsecond for each, while
    waking a thread costs two switches and the time until it gets Python's lock.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}
        # Number of times that the owner has entered, and whether it must wake others when it
        # leaves. A finalizer may enter between any two lines here, in the thread that owns the
        # lock: it finds a depth of 0 only where nothing is half done, and then wakes others itself.
        self._depth = 0
        self._is_notified = False

    def __enter__(self) -> Condition:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._is_notified:
            self._wake_ready()
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if predicate():
            return True
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        turn = threading.Condition(self._lock)
        depth = self._depth
        self._waiting[turn] = predicate
        try:
            left_s = timeout_s
            while left_s is None or left_s > 0:
                self._depth = 0
                if self._is_notified:
                    self._wake_ready()
                turn.wait(left_s)
                self._depth = depth
                if predicate():
                    return True
                left_s = None if end_s is None else end_s - time.monotonic()
            return False
        finally:
            self._depth = depth
            del self._waiting[turn]

    def notify_all(self) -> None:
        # Not now: the caller may change more before it leaves.
        self._is_notified = True

    def _wake_ready(self) -> None:
        self._is_notified = False
        for turn, predicate in list(self._waiting.items()):
            if _may_hold(predicate):
                turn.notify()


def _may_hold(predicate: Callable[[], bool]) -> bool:
    try:
        return predicate()
    except Exception:  # raised again in the thread that waits for it
        return True
