"""Threads, locks and queues of a simulated process, as far as tpudist uses them."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.scheduler import Task, Waker, current_task

if TYPE_CHECKING:
    from simulation.process import Process


class Thread:
    """A thread of a process.

    Args:
        start: Called to start it; returns its task.
    """

    def __init__(self, start: Callable[[], Task]):
        self._start = start
        self.task: Task | None = None

    def start(self) -> None:
        """Starts it."""
        self.task = self._start()

    def is_alive(self) -> bool:
        """Whether it has started and has not ended."""
        return self.task is not None and not self.task.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        assert self.task is not None
        current_task().join(self.task, timeout)


class Event:
    """An event of a process."""

    def __init__(self, process: Process):
        self._process, self._is_set = process, False
        self._waiting: list[Waker] = []

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Sets it."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set."""
        if not self._is_set:
            wake = current_task().waker()
            self._waiting.append(wake)
            try:
                self._process.wait(timeout)
            finally:
                if wake in self._waiting:
                    self._waiting.remove(wake)
        return self._is_set


class Lock(contextlib.AbstractContextManager):
    """A lock of a process."""

    def __init__(self, process: Process):
        self._process, self._is_taken = process, False
        self._waiting: list[Waker] = []

    def __enter__(self) -> None:
        while self._is_taken:
            self._waiting.append(current_task().waker())
            self._process.wait()
        self._is_taken = True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(0.0)


class Condition(Lock):
    """A condition of a process, with a lock of its own."""

    def __init__(self, process: Process):
        super().__init__(process)
        self._notified: list[Waker] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notification, without the lock."""
        wake = current_task().waker()
        self._notified.append(wake)
        self.__exit__()
        try:
            return self._process.wait(timeout)
        finally:
            if wake in self._notified:
                self._notified.remove(wake)
            self.__enter__()

    def notify_all(self) -> None:
        """Wakes all that wait."""
        notified, self._notified = self._notified, []
        for wake in notified:
            wake(0.0)


class Queue:
    """A queue of a process, from which one task reads."""

    def __init__(self, process: Process):
        self._process = process
        self._items: collections.deque[Any] = collections.deque()
        self._waiting: list[Waker] = []

    def put(self, item: Any) -> None:
        """Adds an item."""
        self._items.append(item)
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(0.0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Waits for an item."""
        while not self._items:
            if not block:
                raise queue.Empty
            self._waiting.append(current_task().waker())
            if not self._process.wait(timeout):
                raise queue.Empty
        return self._items.popleft()
