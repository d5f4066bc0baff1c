"""Threads, conditions and time: those of the system, behind the few words that an engine needs.

What is written with them alone can be replayed: `seeded_concurrency` has the same words, and a seed
decides who goes on where several could.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Condition(contextlib.AbstractContextManager["Condition"], Protocol):
    """A lock, and waiting until somebody says that what it guards has changed.

    As `threading.Condition`; all of its methods are for who has entered it.
    """

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until a predicate holds; whether it does, after at most `timeout_s`."""
        ...

    def notify_all(self) -> None:
        """Has all that wait look again."""
        ...


class Thread(Protocol):
    """A thread that was started."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; whether it has ended, after at most `timeout_s`."""
        ...


class Concurrency(Protocol):
    """What gives threads, conditions and time."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a thread, for which Python does not wait when it ends."""
        ...

    def condition(self) -> Condition:
        """A new one."""
        ...

    def now_s(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets others go on for a while."""
        ...


class SystemConcurrency:
    """The threads and the time of the system."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a thread."""
        return _SystemThread(name, run)

    def condition(self) -> Condition:
        """A new one."""
        return _SystemCondition()

    def now_s(self) -> float:
        """Seconds that do not go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


class _SystemThread:
    def __init__(self, name: str, run: Callable[[], None]):
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._thread.name

    def join(self, timeout_s: float | None = None) -> bool:
        if self._thread is not threading.current_thread():
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
