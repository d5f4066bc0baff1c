"""Generations: one runtime of JAX after another in the same process, each with other processes.

A process belongs to one for its whole life, unless a supervisor looks after it: then the program
runs in a thread, which is left behind when a process has died that it waits for, and a new one is
started in the next generation. What belongs to a generation is forgotten at its end.
"""

import atexit
import ctypes
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from tpudist.xla import internals

T = TypeVar("T", bound=Callable[..., Any])

SUPERVISOR = "TPUDIST_SUPERVISOR"
"""A variable: `host port secret index`, as a supervisor tells the processes that it starts."""
COMPILE_CACHE = "TPUDIST_COMPILE_CACHE"
"""A variable: a folder where the processes of a host keep what they compile, for the next one."""
FOLDER = "TPUDIST_FOLDER"
"""A variable: where the supervisor has started the program."""

_at_end: list[Callable[[], None]] = []
_program_thread: threading.Thread = threading.main_thread()
_report: Callable[[int, str], None] | None = None


class GenerationEnded(BaseException):
    """The processes of the run have changed, so this thread of the program is not needed."""


class Numbers:
    """0, 1, 2, ... in each generation: for names that all its processes make in the same order."""

    def __init__(self):
        """Begins with 0."""
        self._numbers = itertools.count()
        at_end(self._begin)

    def __next__(self) -> int:
        """The next number."""
        return next(self._numbers)

    def _begin(self) -> None:
        self._numbers = itertools.count()


def cache(function: T) -> T:
    """As `functools.cache`, until the generation ends."""
    instead = functools.cache(function)
    at_end(instead.cache_clear)
    return functools.wraps(function)(instead)  # type: ignore[return-value]


def at_end(call: Callable[[], None]) -> None:
    """Has `call()` called at the end of each generation."""
    _at_end.append(call)


def program_thread() -> threading.Thread:
    """The thread that runs the program: the main one, but where a supervisor looks after it."""
    return _program_thread


def is_supervised() -> bool:
    """Whether a supervisor looks after this process and the others of its generation."""
    return _report is not None


def report_lost(process: int, why: str) -> bool:
    """Tells the supervisor that the others wait for a process in vain; whether there is one."""
    if _report is None:
        return False
    _report(process, why)
    return True


def supervise(report_lost: Callable[[int, str], None]) -> None:
    """A supervisor looks after this process from now on, and ends processes that it is told of."""
    global _report
    _report = report_lost


def connect(address: str, num_processes: int, process_id: int) -> Callable[[], None]:
    """Connects to the processes of the next generation; returns when all have, be it never.

    In any thread, while this process belongs to another generation still, or to none.

    Args:
        address: Of their coordination service.
        num_processes: How many there are.
        process_id: Which of them this is.

    Returns:
        To be called for this process to belong to them, after `leave`.

    Raises:
        jax.errors.JaxRuntimeError: There is no service.
    """
    return internals.connect_coordination_service(address, num_processes, process_id)


def run_program(thread: threading.Thread) -> None:
    """Starts the thread that runs the program in this generation."""
    global _program_thread
    _program_thread = thread
    thread.start()


def leave(left_behind: Collection[threading.Thread]) -> None:
    """Ends the generation.

    Args:
        left_behind: Threads that still wait for others, in C++, and are never waited for.
    """
    for call in _at_end:
        call()
    for thread in left_behind:
        forget(thread)
    internals.leave_runtime(keep=bool(left_behind))


def forget(thread: threading.Thread) -> None:
    """Nobody waits for a thread any more, which may wait in C++ for what does not come."""
    _left_behind.append(thread)


@atexit.register
def _park_threads() -> None:
    """Lets threads that were left behind never return from C++ while Python ends: it would abort.

    They wait for processes that end now too, would return to Python with an error, and be ended
    by it in the midst of C++.
    """
    waiting = [x for x in _left_behind if x.is_alive()]
    if waiting and hasattr(signal, "pthread_kill"):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(_PARK, ctypes.cast(libc.pause, ctypes.c_void_p))
        for thread in waiting:
            signal.pthread_kill(thread.ident or 0, _PARK)


_left_behind: list[threading.Thread] = []
_PARK = getattr(signal, "SIGRTMAX", 64) - 3


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises in a thread, at its next line of Python; what waits in C++ goes on to wait."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))
