"""Generations: successive JAX runtimes in one process, each connected to other processes.

Without a supervisor, a process has one generation for its whole life. With one, the program runs in
a thread. If that thread waits for a process that died, it is left behind, and a new thread runs the
program in the next generation. `cache`, `Numbers` and `at_end` forget state at the end of a
generation.
"""

import atexit
import ctypes
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar, cast

from tpudist.xla import internals

P = ParamSpec("P")
R = TypeVar("R")

SUPERVISOR = "TPUDIST_SUPERVISOR"
"""Environment variable `host port secret index`, which a supervisor sets for its processes."""
COMPILE_CACHE = "TPUDIST_COMPILE_CACHE"
"""Environment variable: folder where processes of a host keep compiled programs for later ones."""
FOLDER = "TPUDIST_FOLDER"
"""Environment variable: working directory in which the supervisor started the program."""

_at_end: list[Callable[[], None]] = []
_program_thread: threading.Thread = threading.main_thread()
_report: Callable[[int, str], None] | None = None


class GenerationEnded(BaseException):
    """The generation ended, so this thread of the program is no longer needed."""


class Numbers:
    """0, 1, 2, ... in each generation, for names that all processes create in the same order."""

    def __init__(self):
        self._numbers = itertools.count()
        at_end(self._restart)

    def __next__(self) -> int:
        return next(self._numbers)

    def _restart(self) -> None:
        self._numbers = itertools.count()


def cache(function: Callable[P, R]) -> Callable[P, R]:
    """Like `functools.cache`, but forgets everything when the generation ends."""
    cached = functools.cache(function)
    at_end(cached.cache_clear)
    return cast(Callable[P, R], cached)  # typeshed gives it parameters of any hashable type


def at_end(call: Callable[[], None]) -> None:
    """Registers `call()` for the end of each generation."""
    _at_end.append(call)


def program_thread() -> threading.Thread:
    """Returns the thread that runs the program: the main thread, unless there is a supervisor."""
    return _program_thread


def is_supervised() -> bool:
    """Whether a supervisor manages this process and the others of its generation."""
    return _report is not None


def report_lost(process: int, why: str) -> bool:
    """Reports to the supervisor that a process is lost; returns False without a supervisor."""
    if _report is None:
        return False
    _report(process, why)
    return True


def supervise(report_lost: Callable[[int, str], None]) -> None:
    """Declares that a supervisor manages this process.

    Args:
        report_lost: Called with the number of a process and a reason; the supervisor then ends
            that process.
    """
    global _report
    _report = report_lost


def connect(address: str, num_processes: int, process_id: int) -> Callable[[], None]:
    """Connects to the processes of the next generation; blocks until all have connected.

    There is no timeout. Call it in any thread, while this process still belongs to another
    generation or to none.

    Args:
        address: `host:port` of the coordination service of the generation.
        num_processes: Number of its processes.
        process_id: Number of this process in it.

    Returns:
        A function that makes this process a member. Call it after `leave`.

    Raises:
        jax.errors.JaxRuntimeError: If no service listens at `address`.
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
        left_behind: Threads that still wait for other processes in C++. Nobody joins them.
    """
    for call in _at_end:
        call()
    for thread in left_behind:
        forget(thread)
    # A runtime in which a thread still waits must not be destroyed: its destructor would wait for
    # that thread, so for a process that is dead.
    internals.leave_runtime(keep=bool(left_behind))


def forget(thread: threading.Thread) -> None:
    """Gives up a thread that may wait in C++ forever."""
    _left_behind.append(thread)


# Threads that were left behind wait in C++ for processes that now exit, too. Their wait would fail,
# and they would return to a Python that is shutting down. Python up to 3.13 ends such a
# thread with pthread_exit, which unwinds C++ frames that do not allow it: the process would abort.
# So each of them gets a signal whose handler is libc's `pause`, which never returns.
@atexit.register
def _park_threads() -> None:
    waiting = [x for x in _left_behind if x.is_alive()]
    if waiting and hasattr(signal, "pthread_kill"):  # Windows has no such function
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(_PARK, ctypes.cast(libc.pause, ctypes.c_void_p))
        for thread in waiting:
            signal.pthread_kill(thread.ident or 0, _PARK)


_left_behind: list[threading.Thread] = []
# A real-time signal, because neither Python nor libc gives these a meaning. macOS has no SIGRTMAX.
_PARK = getattr(signal, "SIGRTMAX", 64) - 3


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises `error` in a thread at its next line of Python; a wait in C++ is not interrupted."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))
