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
import sys
import threading
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from tpudist.processes.host import Thread, this_host

P = ParamSpec("P")
R = TypeVar("R")

_at_end: list[Callable[[], object]] = []
_left_behind: list[Thread] = []


class GenerationEnded(BaseException):
    """The generation ended, so this thread of the program is no longer needed."""


class Numbers:
    """0, 1, 2, ... in each generation, for names that all processes create in the same order."""

    def __init__(self):
        at_end(lambda: this_host().memory.pop(self, None))

    def __next__(self) -> int:
        return next(this_host().memory.setdefault(self, itertools.count()))


def cache(function: Callable[P, R]) -> Callable[P, R]:
    """Like `functools.cache`, but forgets everything when the generation ends."""

    @functools.wraps(function)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> R:
        memory = this_host().memory
        results = memory.get(look_up)
        if results is None:
            results = memory.setdefault(look_up, functools.cache(function))
        return results(*args, **kwargs)

    at_end(lambda: this_host().memory.pop(look_up, None))
    return look_up


def at_end(call: Callable[[], object]) -> None:
    """Registers `call()` for the end of each generation.

    Only for the life of the process, as at the top level of a module: nothing is unregistered.
    """
    _at_end.append(call)


def program_thread() -> Thread:
    """Returns the thread that runs the program: the main thread, unless there is a supervisor."""
    return this_host().memory.get(program_thread) or this_host().main_thread()


def loss_reporter() -> Callable[[int, str], None] | None:
    """Returns what `run_program` received for this generation; None without a supervisor."""
    return this_host().memory.get(loss_reporter)


def connect(address: str, num_processes: int, process_id: int) -> Callable[[], None]:
    """Connects to the processes of the next generation; blocks until all have connected.

    There is no timeout. Call it in any thread, while this process still belongs to another
    generation or to none.

    Args:
        address: `host:port` of the coordination service of the generation.
        num_processes: Number of its processes.
        process_id: Number of this process in it.

    Returns:
        A function that makes this process a member. Call it after `leave`. There are two steps
        because connecting may wait forever for a process that dies meanwhile.

    Raises:
        jax.errors.JaxRuntimeError: If no service listens at `address`.
    """
    return this_host().connect_coordination_service(address, num_processes, process_id)


def run_program(thread: Thread, report_lost: Callable[[int, str], None]) -> None:
    """Starts the thread that runs the program in this generation, under a supervisor.

    Args:
        thread: Thread that runs the program.
        report_lost: Called with the number of a process of this generation and a reason; the
            supervisor then ends that process.
    """
    memory = this_host().memory
    memory[program_thread], memory[loss_reporter] = thread, report_lost
    thread.start()


def leave(left_behind: Collection[Thread]) -> None:
    """Ends the generation.

    Args:
        left_behind: Threads that still wait for other processes in C++. Nobody joins them.
    """
    # First what uses the runtime, such as the watch: it would report the end of the service.
    for call in _at_end:
        call()
    for thread in left_behind:
        forget(thread)
    # A runtime in which a thread still waits must not be destroyed: its destructor would wait for
    # that thread, so for a process that is dead.
    this_host().leave_runtime(keep=bool(left_behind))


def forget(thread: Thread) -> None:
    """Gives up a thread that may wait in C++ forever."""
    _left_behind.append(thread)


# Threads that were left behind wait in C++ for processes that now exit, too. Their wait would fail,
# and they would return to a Python that is shutting down. Python up to 3.13 ends such a
# thread with pthread_exit, which unwinds C++ frames that do not allow it: the process would abort.
# So each of them gets a signal whose handler is libc's `pause`, which never returns.
@atexit.register
def _park_threads() -> None:
    waiting = [x for x in _left_behind if isinstance(x, threading.Thread) and x.is_alive()]
    if not waiting or sys.platform == "win32":  # without signals for single threads
        return
    # Python and libc give no meaning to a real-time signal. macOS has none; the program, which may
    # have used SIGUSR2, has ended.
    number = signal.SIGRTMAX - 3 if sys.platform == "linux" else signal.SIGUSR2
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in waiting:
        signal.pthread_kill(thread.ident or 0, number)


def raise_in(thread: Thread, error: type[BaseException]) -> None:
    """Raises `error` in a thread at its next line of Python; a wait in C++ is not interrupted."""
    this_host().raise_in(thread, error)
