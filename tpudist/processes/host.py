"""The host of a process, and what JAX knows of it: time, threads, connections, and its end.

`this_host()` returns the one of the operating system. `scripts/simulation` replaces it, so that the
same code runs as thousands of processes on virtual time. So what runs before and next to the steps
waits and communicates only through a `Host`, and keeps what a process remembers in `memory`.
"""

import atexit
import contextlib
import contextvars
import ctypes
import faulthandler
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Protocol

_PROC = Path("/proc")
ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Event(Protocol):
    """The methods of `threading.Event` that this package calls."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...

    def set(self) -> None:
        """Sets it, which ends all waits."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, at most `timeout` seconds; returns whether it is."""
        ...


class Thread(Protocol):
    """The methods of `threading.Thread` that this package calls."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


class Host:
    """The operating system and the JAX runtime of this process.

    Attributes:
        memory: Caches and counters of this process, by the object that uses them.
    """

    memory: ClassVar[dict[object, Any]] = {}

    # Time and threads.

    def monotonic(self) -> float:
        """Returns seconds that only grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pauses this thread."""
        time.sleep(seconds)

    def event(self) -> Event:
        """Returns an event that is not set."""
        return threading.Event()

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a lock that nobody has."""
        return threading.Lock()

    def start_thread(self, run: Callable[..., None], *args: object, name: str) -> Thread:
        """Starts a daemon thread that calls `run(*args)`."""
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def is_current(self, thread: Thread) -> bool:
        """Whether `thread` is the thread that calls this."""
        return thread is threading.current_thread()

    # The process, as JAX knows it. A supervisor calls none of these methods, and importing JAX
    # would delay the start of its processes by half a second.

    def process_index(self) -> int:
        """Returns the number of this process."""
        import jax

        return jax.process_index()

    def process_count(self) -> int:
        """Returns the number of processes of the run."""
        import jax

        return jax.process_count()

    def coordination_client(self) -> Any:
        """Returns the client of JAX's coordination service; None in one process."""
        from tpudist.xla import internals

        return internals.coordination_client()

    def coordinator_host(self) -> str:
        """Returns the host of the coordination service."""
        from tpudist.xla import internals

        return internals.coordinator_host()

    # The network.

    def name(self) -> str:
        """Returns the name of this host."""
        return socket.gethostname()

    def namespace(self) -> str:
        """Returns a text that is equal in two processes if a pid means the same in both."""
        try:
            # The inode of a namespace is unique on one host until it restarts, so the boot id is
            # part.
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
        except OSError:
            # Without /proc, as on macOS, no other process counts as one of this host. So nobody is
            # ended by its pid, which might mean another process.
            return f"unknown/{this_host().pid()}"

    def pid(self) -> int:
        """Returns the number that this host gave the process."""
        return os.getpid()

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Returns a connection over TCP."""
        return socket.create_connection((host, port), timeout_s)

    def listen(self, host: str, port: int, family: int) -> socket.socket:
        """Returns a socket that listens over TCP."""
        return socket.create_server((host, port), family=family, backlog=1024)

    def selector(self) -> selectors.BaseSelector:
        """Returns a selector of sockets."""
        return selectors.DefaultSelector()

    # The end of the process.

    def at_exit(self, call: Callable[[], None]) -> None:
        """Registers a call for the normal end of the process."""
        atexit.register(call)

    def cancel_at_exit(self, call: Callable[[], None]) -> None:
        """Cancels a call that `at_exit` has registered."""
        atexit.unregister(call)

    def exception_hook(self) -> ExceptionHook:
        """Returns the function that receives the exception that ends the program."""
        return sys.excepthook

    def set_exception_hook(self, hook: ExceptionHook) -> None:
        """Replaces that function."""
        sys.excepthook = hook

    def stack_of(self, thread: threading.Thread) -> Any:
        """Returns the innermost Python frame of a thread, or None."""
        return sys._current_frames().get(thread.ident or 0)

    def raise_in(self, thread: threading.Thread, error: type[BaseException]) -> None:
        """Raises `error` in a thread at its next line of Python."""
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))

    def print_error(self, text: str) -> None:
        """Writes to the error output; raises if it is closed."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def print_all_stacks(self) -> None:
        """Writes the stacks of all threads to the error output; raises if it is closed."""
        faulthandler.dump_traceback(2, all_threads=True)  # a descriptor: `sys.stderr` may be none

    def exit(self, code: int) -> NoReturn:
        """Ends the process at once."""
        os._exit(code)


_system = Host()
_current: contextvars.ContextVar[Host] = contextvars.ContextVar("tpudist host", default=_system)

this_host: Callable[[], Host] = _current.get
"""Returns the host of this process, as the code of this thread sees it."""


def replace(other: Host) -> None:
    """Replaces the host of this context, as a simulated process does in each of its threads."""
    _current.set(other)
