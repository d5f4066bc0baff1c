"""Threads that run functions, and never keep the program from ending.

The threads of `concurrent.futures` do: Python waits for their functions at exit, and one may wait
for a server, for minutes.
"""

import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Future: TypeAlias = "concurrent.futures.Future[Any]"
_Queue: TypeAlias = "queue.SimpleQueue[tuple[_Future, Callable[[], Any]] | None]"


class DaemonThreads:
    """Up to `num_threads` threads, which start with the first functions.

    With the last reference to this object, functions that wait are cancelled, and the threads end.
    """

    def __init__(self, num_threads: int, name: str):
        self._num_threads, self._name = num_threads, name
        self._threads: list[threading.Thread] = []
        self._queue: _Queue = queue.SimpleQueue()
        weakref.finalize(self, _end, self._queue, self._threads).atexit = False

    def __reduce__(self) -> "tuple[type[DaemonThreads], tuple[int, str]]":
        """Copies without threads and functions: a dataset that has this object can be sent."""
        return DaemonThreads, (self._num_threads, self._name)

    def submit(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> "concurrent.futures.Future[_T]":
        """Runs a function in one of the threads, and returns its future result."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._queue.put((future, lambda: function(*args, **kwargs)))
        if len(self._threads) < self._num_threads:
            # A thread must have no reference to this object, or it would never be collected.
            thread = threading.Thread(
                target=_run, args=(self._queue,), name=self._name, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return future


def _run(work: _Queue) -> None:
    while (item := work.get()) is not None:
        future, function = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        del item, future, function  # which may have large arrays


def _end(work: _Queue, threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while (item := work.get_nowait()) is not None:
            item[0].cancel()
    for _ in threads:
        work.put(None)
