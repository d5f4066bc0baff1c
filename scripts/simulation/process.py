"""Process: the host of a simulated process, in which the real code of tpudist runs.

It answers what tpudist asks of its host. The model leaves out three things: computation takes no
time, `stack_of` knows no stack, and each process is alone on its host, so no other process finds
its state in `/proc`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from simulation.connections import Selector, SimulatedSocket, address_of
from simulation.scheduler import Killed, Task, Waker, current_task
from tpudist.processes import host
from tpudist.processes.host import ExceptionHook

if TYPE_CHECKING:
    from simulation.service import Client
    from simulation.simulation import Simulation


class Process(host.Host):
    """One process.

    Args:
        simulation: The run.
        index: Number of the process and of its host.
        count: Number of processes that it expects.

    Attributes:
        sockets: Open sockets.
        client: Client of the coordination service, once JAX has connected.
        printed: Lines of its error output.
        logged: Warnings.
        defects: Exceptions of its threads that nobody handled.
        exit_code: None while it runs.
        ended_s: When it ended.
        progress: Number of steps that its program has run.
        has_finished: Whether its program has done all its work.
    """

    def __init__(self, simulation: Simulation, index: int, count: int):
        self.simulation, self.index, self.count = simulation, index, count
        self.memory = {}  # type: ignore[misc]
        self.sockets: set[SimulatedSocket] = set()
        self.client: Client | None = None
        self.printed: list[str] = []
        self.logged: list[str] = []
        self.defects: list[str] = []
        self.exit_code: int | None = None
        self.ended_s, self.progress, self.has_finished = 0.0, 0, False
        self.clock_offset_s = 0.0
        self.tasks: list[Task] = []
        self._program: Task | None = None
        self._pending: type[BaseException] | None = None
        self._exit_calls: list[Callable[[], None]] = []
        self._hook: ExceptionHook = self._print_exception
        self._frozen: list[Callable[[], None]] | None = None

    # The life of the process.

    def run(self, program: Callable[[Process], None]) -> None:
        """Starts the program."""

        def run() -> None:
            code = 0
            try:
                program(self)
            except Exception as error:
                code = 1
                self._hook(type(error), error, error.__traceback__)
            for call in reversed(self._exit_calls):
                call()
            if self.client is not None:
                self.simulation.disconnect_jax(self)
            self.exit(code)

        self._program = self._start(run)

    def exit(self, code: int) -> NoReturn:
        """Ends the process, as one of its tasks."""
        self.end(code)
        raise Killed

    def end(self, code: int) -> None:
        """Ends the process, its threads and its connections."""
        if self.exit_code is not None:
            return
        self.exit_code, self.ended_s = code, self.simulation.scheduler.now_s
        for task in self.tasks:
            task.kill()
        for connection in list(self.sockets):
            connection.close()
        self.simulation.on_end(self)

    def freeze(self) -> None:
        """Stops all Python threads."""
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        """Lets them continue."""
        frozen, self._frozen = self._frozen or [], None
        for resume in frozen:
            self.simulation.scheduler.after(0.0, resume)

    @property
    def is_frozen(self) -> bool:
        """Whether its threads are stopped."""
        return self._frozen is not None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this machine that its threads have used."""
        return sum(x.cpu_ns for x in self.tasks) / 1e9

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the task is resumed; returns False after the timeout."""
        task = current_task()
        woken = task.wait(timeout_s)
        if task is self._program and self._pending is not None:
            pending, self._pending = self._pending, None
            raise pending()
        return woken

    def signal_at(self, when_s: float, handle: Callable[[], None]) -> None:
        """Calls a signal handler at a time, unless the process has ended."""

        def wait_and_handle() -> None:
            self.wait(when_s - self.simulation.scheduler.now_s)
            handle()

        if when_s > self.simulation.scheduler.now_s:
            self._start(wait_and_handle)

    def _start(self, run: Callable[[], None]) -> Task:
        def run_here() -> None:
            host.replace(self)
            try:
                run()
            except Exception:
                self.defects.append(traceback.format_exc())

        task = Task(self.simulation.scheduler, run_here, self._defer)
        self.tasks.append(task)
        return task

    def _defer(self, resume: Callable[[], None]) -> bool:
        if self._frozen is None:
            return False
        self._frozen.append(resume)
        return True

    # What tpudist asks.

    def monotonic(self) -> float:
        """Returns virtual time."""
        return 1000.0 + self.simulation.scheduler.now_s + self.clock_offset_s

    def sleep(self, seconds: float) -> None:
        """Waits."""
        self.wait(seconds)

    def event(self) -> Event:
        """Returns an event."""
        return Event(self)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a lock."""
        return Lock(self)

    def start_thread(self, run: Callable[..., None], *args: object, name: str) -> Thread:
        """Starts a thread."""
        return Thread(self._start(lambda: run(*args)))

    def is_current(self, thread: object) -> bool:
        """Whether a thread calls this."""
        return isinstance(thread, Thread) and thread.task is current_task()

    def process_index(self) -> int:
        """Returns its number."""
        return self.index

    def process_count(self) -> int:
        """Returns the number of processes."""
        return self.count

    def coordination_client(self) -> Any:
        """Returns the client."""
        return self.client

    def coordinator_host(self) -> str:
        """Returns the address of process 0."""
        return address_of(0)

    def name(self) -> str:
        """Returns the name of the host, which is different for each process."""
        return f"host{self.index}"

    def pid(self) -> int:
        """Returns a number."""
        return 1000 + self.index

    def namespace(self) -> str:
        """Returns a text that no other process has, so nobody looks for its state in /proc."""
        return f"simulated{self.index}"

    def connect(self, address: str, port: int, timeout_s: float) -> SimulatedSocket:
        """Returns a connection."""
        return self.simulation.sockets.connect(self, address, port, timeout_s)

    def listen(self, address: str, port: int, family: int) -> SimulatedSocket:
        """Returns a socket that listens."""
        return self.simulation.sockets.listen(self, address, port)

    def selector(self) -> Selector:
        """Returns a selector."""
        return Selector(self)

    def at_exit(self, call: Callable[[], None]) -> None:
        """Registers a call for the end of the program."""
        self._exit_calls.append(call)

    def cancel_at_exit(self, call: Callable[[], None]) -> None:
        """Cancels it."""
        self._exit_calls = [x for x in self._exit_calls if x != call]

    def exception_hook(self) -> ExceptionHook:
        """Returns the hook."""
        return self._hook

    def set_exception_hook(self, hook: ExceptionHook) -> None:
        """Replaces the hook."""
        self._hook = hook

    def stack_of(self, thread: threading.Thread) -> None:
        """Returns that the stack is unknown."""

    def raise_in(self, thread: threading.Thread, error: type[BaseException]) -> None:
        """Raises in the program when it next runs Python, so not in a collective."""
        self._pending = error

    def print_error(self, text: str) -> None:
        """Keeps a line."""
        self.printed.append(text.rstrip())

    def print_all_stacks(self) -> None:
        """Prints nothing: the stacks of this machine are those of the simulator."""

    def _print_exception(
        self, kind: type[BaseException], error: BaseException, where: object
    ) -> None:
        self.printed.append(f"{kind.__name__}: {error}")


class Thread:
    """A thread that tpudist has started."""

    def __init__(self, task: Task):
        self.task = task

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
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


class KeepLogs(logging.Handler):
    """Gives each simulated process its warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        here = host.this_host()
        if isinstance(here, Process):
            here.logged.append(record.getMessage())


@contextlib.contextmanager
def keep_logs() -> Iterator[None]:
    """Keeps warnings in the `with` block, and prints none of simulated processes."""
    logger, handler = logging.getLogger("tpudist"), KeepLogs(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
