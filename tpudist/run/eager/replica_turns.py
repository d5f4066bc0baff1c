"""Runs replicas in turns: each has a thread, and one of them runs at a time.

A replica runs up to a meeting (a collective, a merge call, the end of the function), and then the
next one runs. When all have arrived, replica 0 does the work of the meeting, with the contributions
of all, and continues. So there is one thread to debug, and one reader of the standard input.
Replica 0 runs in the caller's thread, where debuggers work.

The protocol: `_running` is the replica whose turn it is. Only that replica changes the shared
fields, so they need no lock. It hands over with `_resume`, which releases the semaphore of the next
one, and waits for its own in `_wait`. Turns go round in the order of replicas, so at each meeting
replica 0 is resumed when all others have arrived.
"""

import contextvars
import ctypes
import dataclasses
import linecache
import threading
from collections.abc import Callable
from typing import Any

from tpudist.xla import user_code

# Seconds for which the main thread waits without handling signals; see `Turns._wait`. A person who
# presses Ctrl-C does not notice 0.2 s, and five wake-ups per second cost nothing.
_SECONDS_BETWEEN_SIGNALS = 0.2
_END = "the end of the function"


class Released(BaseException):
    """Ends a replica when another one has failed.

    Not an `Exception`, so that no handler of the user takes it for a failure of its own.
    """


@dataclasses.dataclass
class _Arrival:
    """The arrival of a replica at a meeting, at a line of the user if known; see `Turns.meet`."""

    purpose: str
    contribution: Any
    act: Callable[[list[Any]], list[Any]]
    line: str

    def __str__(self) -> str:
        return f"has come to {self.purpose}" + (f" at {self.line}" if self.line else "")


class Turns:
    """One call of the function `name` on replicas that take turns."""

    def __init__(self, num_replicas: int, name: str):
        self._count, self._name = num_replicas, name
        self._arrivals: dict[int, _Arrival] = {}
        self._results: list[Any] = []
        self._semaphores = [threading.Semaphore(0) for _ in range(num_replicas)]
        self._threads: dict[int, threading.Thread] = {}
        self._running = 0
        # The replica that failed, and its error; None for the replica if a meeting failed.
        self._failure: tuple[int | None, BaseException] | None = None
        # Whether Ctrl-C was passed on to a replica's thread, and whether a second one has come, so
        # that nobody waits for the threads.
        self._is_interrupted = self._is_abandoned = False
        self._body: Callable[[int], Any] = lambda replica: None
        self._context = contextvars.copy_context()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Calls `body(replica)` for all replicas; returns their results.

        Raises:
            RuntimeError: If replicas arrive at different meetings.
            BaseException: If the function of a replica raises; a note names the replica.
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

    def meet(
        self,
        replica: int,
        purpose: str,
        contribution: Any,
        act: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Waits for all replicas; returns the result of the meeting for this one.

        Args:
            purpose: Description of the meeting; all replicas must pass the same.
            act: Called once, in the caller's thread, with the contributions in the order of
                replicas; returns the results in the same order.
        """
        self._check_running()
        line = _find_users_line() if purpose != _END else ""
        self._arrivals[replica] = _Arrival(purpose, contribution, act, line)
        if replica and purpose == _END:
            return None  # its thread ends; `_run_in_thread` hands over
        if self._count > 1:
            self._resume((replica + 1) % self._count)
            self._wait(replica)
            self._check_running()
        if replica == 0:
            self._close([self._arrivals[i] for i in range(self._count)])
        return self._results[replica]

    def run_outside(self, act: Callable[[], Any]) -> Any:
        """Calls `act()` with the context variables of the caller of `run`."""
        return self._context.run(act)

    def _close(self, arrivals: list[_Arrival]) -> None:
        """Does the work of a meeting."""
        for replica, arrival in enumerate(arrivals):
            if arrival.purpose != arrivals[0].purpose:
                text = _describe_arrivals(self._name, replica, arrivals)
                self._failure = None, RuntimeError(text)
                raise Released
        self._arrivals = {}
        try:
            self._results = arrivals[0].act([x.contribution for x in arrivals])
        except BaseException as error:
            self._failure = None, error
            raise

    def _check_running(self) -> None:
        if self._failure is not None:
            raise Released

    def _resume(self, replica: int) -> None:
        self._running = replica
        if replica == 0 or replica in self._threads:
            self._semaphores[replica].release()
            return
        # At its first turn. The copied context starts it in the caller's scope.
        thread = self._threads[replica] = threading.Thread(
            target=self._context.copy().run,
            args=(self._run_in_thread, replica),
            name=f"replica {replica} of {self._name}",
            daemon=True,
        )
        thread.start()

    def _wait(self, replica: int) -> None:
        while self._running != replica:
            try:
                # Python handles signals only while the main thread runs, and the system may deliver
                # them to another thread. So replica 0, in the main thread, wakes up now and then.
                timeout = None if replica else _SECONDS_BETWEEN_SIGNALS
                self._semaphores[replica].acquire(timeout=timeout)
            except KeyboardInterrupt:
                # It arrives in the main thread, and is meant for the replica that runs.
                thread = self._threads.get(self._running)
                if replica or thread is None or self._is_interrupted:
                    self._is_abandoned = not replica
                    raise
                self._is_interrupted = True
                _interrupt(thread)

    def _run_in_thread(self, replica: int) -> None:
        try:
            self.meet(replica, _END, self._body(replica), list)
        except Released:
            return  # `_release` waits for the end of this thread
        except BaseException as error:
            if self._failure is not None:
                return
            self._failure = replica, error
        failed = self._failure is not None
        self._resume(0 if failed else (replica + 1) % self._count)

    def _release(self) -> None:
        """Ends the other replicas one by one, so that their `finally` blocks take turns, too."""
        for replica, thread in self._threads.items():
            self._running = replica
            self._semaphores[replica].release()
            if not self._is_abandoned:
                thread.join()


def _describe_arrivals(name: str, replica: int, arrivals: list[_Arrival]) -> str:
    return (
        f"The replicas of '{name}' diverged: replica 0 {arrivals[0]}, and replica {replica} "
        f"{arrivals[replica]}. All replicas must communicate in the same order, with values of the "
        "same shapes. If a branch depends on a value that differs between replicas, communicate "
        "outside of it."
    )


def _interrupt(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in another thread, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )


def _find_users_line() -> str:
    """Returns the innermost line of the user, as `file:line (code)`; empty if there is none."""
    line = user_code.line_of_call()
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if line else ""
    return f"{line} ({code})" if code else line
