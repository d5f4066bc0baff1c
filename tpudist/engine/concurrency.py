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
    def __init__(self):
        self._condition = threading.Condition()

    def __enter__(self) -> Condition:
        self._condition.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        return self._condition.wait_for(predicate, timeout_s)

    def notify_all(self) -> None:
        self._condition.notify_all()
