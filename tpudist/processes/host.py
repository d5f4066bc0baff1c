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
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
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

    def start(self) -> None:
        """Starts it."""
        ...

    def is_alive(self) -> bool:
        """Whether it has started and has not ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


class Queue(Protocol):
    """The methods of `queue.SimpleQueue` that this package calls."""

    def put(self, item: Any) -> None:
        """Adds an item."""
        ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Waits for an item; raises `queue.Empty` after the timeout."""
        ...


class Condition(contextlib.AbstractContextManager[Any], Protocol):
    """The methods of `threading.Condition` that this package calls."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notification; returns False after the timeout."""
        ...

    def notify_all(self) -> None:
        """Wakes all that wait."""
        ...


class Host:
    """The operating system and the JAX runtime of this process.

    Attributes:
        memory: Caches and counters of this process, by the object that uses them.
        environ: Environment variables.
    """

    memory: ClassVar[dict[object, Any]] = {}
    environ: MutableMapping[str, str] = os.environ

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

    def condition(self) -> Condition:
        """Returns a condition with a lock of its own."""
        return threading.Condition()

    def queue(self) -> Queue:
        """Returns an empty queue."""
        return queue.SimpleQueue()

    def thread(self, run: Callable[..., None], *args: object, name: str) -> Thread:
        """Returns a daemon thread that will call `run(*args)`."""
        return threading.Thread(target=run, args=args, name=name, daemon=True)

    def start_thread(self, run: Callable[..., None], *args: object, name: str) -> Thread:
        """Starts a daemon thread that calls `run(*args)`."""
        thread = self.thread(run, *args, name=name)
        thread.start()
        return thread

    def main_thread(self) -> Thread:
        """Returns the thread in which Python has started."""
        return threading.main_thread()

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

    def initialize_jax(
        self, address: str, num_processes: int, process_id: int, **arguments: Any
    ) -> None:
        """Connects the processes of a run by `jax.distributed.initialize`."""
        import jax

        jax.distributed.initialize(
            address,
            num_processes=num_processes,
            process_id=process_id,
            # JAX listens on every interface by default, without authentication.
            coordinator_bind_address=address,
            **arguments,
        )

    def start_coordination_service(self, address: str, num_processes: int) -> object:
        """Starts a coordination service, which ends with the returned object."""
        from tpudist.xla import internals

        return internals.start_coordination_service(address, num_processes)

    def connect_coordination_service(
        self, address: str, num_processes: int, process_id: int
    ) -> Callable[[], None]:
        """Connects to a service of a supervisor; see `internals`."""
        from tpudist.xla import internals

        return internals.connect_coordination_service(address, num_processes, process_id)

    def leave_runtime(self, keep: bool) -> None:
        """Leaves the group of processes; see `internals`."""
        from tpudist.xla import internals

        internals.leave_runtime(keep)

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

    def state_of(self, pid: int) -> str:
        """Returns the letter by which proc(5) describes the state of a process of this host.

        Raises:
            OSError: If there is no such process, or it cannot be inspected.
        """
        # "4711 (name) S 1 ...": the name may contain spaces and parentheses.
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]

    def kill(self, pid: int) -> None:
        """Kills a process of this host, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def set_signal_handler(self, number: int, handler: Any) -> Any:
        """Sets the handler of a signal; returns the one before, as `signal.signal` does."""
        return signal.signal(number, handler)

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

    def stack_of(self, thread: Thread) -> Any:
        """Returns the innermost Python frame of a thread, or None."""
        assert isinstance(thread, threading.Thread)
        return sys._current_frames().get(thread.ident or 0)

    def raise_in(self, thread: Thread, error: type[BaseException]) -> None:
        """Raises `error` in a thread at its next line of Python."""
        assert isinstance(thread, threading.Thread)
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
