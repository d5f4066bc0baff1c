"""Replicas that take turns: each in a thread of its own, of which one runs at a time.

A replica runs up to where it meets the others (a collective, a merge call, the end of the function)
and hands on to the next one. When all have come, the first does what the meeting is for, with what
all have brought, and goes on. So a debugger has one thing to look at, and the standard input one
reader. The first replica runs in the caller's thread, where debuggers are at home.
"""

import contextvars
import ctypes
import dataclasses
import linecache
import threading
from collections.abc import Callable
from typing import Any

from tpudist.xla.hlo import source_lines

_SECONDS_BETWEEN_SIGNALS = 0.2
_END = "the end of the function"


class Released(BaseException):
    """Ends a replica when another one has failed.

    Not an `Exception`, so that no handler of the user's takes it for a failure of its own.
    """


@dataclasses.dataclass
class _Visit:
    """That a replica has come to a meeting: see `Turns.meet`.

    Attributes:
        what: What the meeting is for.
        brought: What the replica brings.
        act: What the meeting does.
        line: Where in the user's code it is.
    """

    what: str
    brought: Any
    act: Callable[[list[Any]], list[Any]]
    line: str

    def __str__(self) -> str:
        return f"has come to {self.what}" + (f" at {self.line}" if self.line else "")


class Turns:
    """One call of a function on replicas that take turns."""

    def __init__(self, num_replicas: int, name: str):
        """For so many replicas; `name` is the function's."""
        self._count, self._name = num_replicas, name
        self._visits: dict[int, _Visit] = {}
        self._results: list[Any] = []
        self._signals = [threading.Semaphore(0) for _ in range(num_replicas)]
        self._threads: dict[int, threading.Thread] = {}
        self._running = 0
        # Which replica failed, and how; no replica, if they parted.
        self._failure: tuple[int | None, BaseException] | None = None
        self._is_interrupted = self._is_abandoned = False
        self._body: Callable[[int], Any] = lambda replica: None
        self._context = contextvars.copy_context()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Calls `body(replica)` for all replicas: what each of them returned.

        Raises:
            RuntimeError: Replicas came to different meetings.
            BaseException: What the function of a replica raised; a note says which replica it was.
        """
        self._body = body
        try:
            self.meet(0, _END, body(0), list)
        except BaseException as error:
            self._failure = self._failure or (0, error)
            self._release()
            replica, failed = self._failure
            if replica is not None and self._count > 1:
                failed.add_note(
                    f"Replica {replica} of {self._count} raised this error; the replicas run "
                    f"'{self._name}' eagerly, one after the other."
                )
            if failed is error:
                raise
            raise failed from None
        for thread in self._threads.values():
            thread.join()
        return self._results

    def meet(self, me: int, what: str, brought: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        """Waits for all replicas: what this one takes away.

        Args:
            me: The replica.
            what: What they meet for, in words; the same for all.
            brought: What this replica brings.
            act: Called once, in the caller's thread, with what all have brought, in the order of
                replicas; it gives what each of them takes away.
        """
        self._check_running()
        self._visits[me] = _Visit(what, brought, act, _find_users_line() if what != _END else "")
        if me and what == _END:
            return None
        if self._count > 1:
            self._resume((me + 1) % self._count)
            self._wait(me)
            self._check_running()
        if me == 0:
            self._close([self._visits[i] for i in range(self._count)])
        return self._results[me]

    def run_outside(self, act: Callable[[], Any]) -> Any:
        """Calls `act()` in the contexts in which the replicas were called."""
        return self._context.run(act)

    def _close(self, visits: list[_Visit]) -> None:
        """Does what all have come for."""
        for replica, visit in enumerate(visits):
            if visit.what != visits[0].what:
                self._failure = None, RuntimeError(_describe_visits(self._name, replica, visits))
                raise Released
        self._visits = {}
        try:
            self._results = visits[0].act([x.brought for x in visits])
        except BaseException as error:
            self._failure = None, error
            raise

    def _check_running(self) -> None:
        if self._failure is not None:
            raise Released

    def _resume(self, replica: int) -> None:
        self._running = replica
        if replica == 0 or replica in self._threads:
            self._signals[replica].release()
            return
        thread = self._threads[replica] = threading.Thread(
            target=self._context.copy().run,
            args=(self._run_in_thread, replica),
            name=f"replica {replica} of {self._name}",
            daemon=True,
        )
        thread.start()

    def _wait(self, me: int) -> None:
        while self._running != me:
            try:
                # Python handles signals when the main thread runs, to which they may not come.
                self._signals[me].acquire(timeout=None if me else _SECONDS_BETWEEN_SIGNALS)
            except KeyboardInterrupt:
                # It comes to the main thread, and is meant for the replica that runs.
                thread = self._threads.get(self._running)
                if me or thread is None or self._is_interrupted:
                    self._is_abandoned = not me
                    raise
                self._is_interrupted = True
                _interrupt(thread)

    def _run_in_thread(self, replica: int) -> None:
        try:
            self.meet(replica, _END, self._body(replica), list)
        except Released:
            return  # whoever releases waits for the end of the thread
        except BaseException as error:
            if self._failure is not None:
                return
            self._failure = replica, error
        failed = self._failure is not None
        self._resume(0 if failed else (replica + 1) % self._count)

    def _release(self) -> None:
        """Ends the other replicas, one after the other: their `finally` blocks take turns too."""
        for replica, thread in self._threads.items():
            self._running = replica
            self._signals[replica].release()
            if not self._is_abandoned:
                thread.join()


def _describe_visits(name: str, replica: int, visits: list[_Visit]) -> str:
    return (
        f"The replicas of '{name}' diverged: replica 0 {visits[0]}, and replica {replica} "
        f"{visits[replica]}. All replicas must communicate in the same order, with values of the "
        "same shapes. If a branch depends on a value that differs between replicas, communicate "
        "outside of it."
    )


def _interrupt(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in another thread, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )


def _find_users_line() -> str:
    """The innermost line that is the user's, as `file:line (code)`; empty if there is none."""
    line = source_lines.line_of_call()
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if line else ""
    return f"{line} ({code})" if code else line
