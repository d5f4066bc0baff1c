"""Process: the host of a simulated process, in which the real code of tpudist runs.

It answers what tpudist asks of its host. The model leaves out two things: computation takes no
time, and `stack_of` knows no stack.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from simulation.connections import Selector, SimulatedSocket, address_of
from simulation.runtime import Runtime
from simulation.scheduler import Killed, Task, current_task
from simulation.threads import Condition, Event, Lock, Queue, Thread
from tpudist.processes import host
from tpudist.processes.host import ExceptionHook

if TYPE_CHECKING:
    from simulation.service import Client
    from simulation.simulation import Simulation


class Process(host.Host):
    """One process.

    Args:
        simulation: The run.
        index: Number of the process.
        count: Number of processes that it expects.
        place: Number of its host.
        parent: Process that has started it, and with which it ends.

    Attributes:
        sockets: Open sockets.
        runtime: JAX's runtime, once it has connected.
        client: Client of the coordination service of that.
        rank: Number of the process in the runtime.
        printed: Lines of its error output.
        logged: Warnings.
        defects: Exceptions of its threads that nobody handled.
        exit_code: Exit code; None while it runs.
        ended_s: Time of its end.
        progress: Number of steps that its program has run.
        has_finished: Whether its program has done all its work.
        result: Result of its program, if it has one.
        is_stopped: Whether a signal has stopped it.
        ended: Called when it has ended.
    """

    def __init__(
        self,
        simulation: Simulation,
        index: int,
        count: int,
        place: int,
        parent: Process | None = None,
    ):
        self.simulation, self.index, self.count, self.place = simulation, index, count, place
        self.memory = {}  # type: ignore[misc]
        self.environ: MutableMapping[str, str] = {}
        self.sockets: set[SimulatedSocket] = set()
        self.runtime: Runtime | None = None
        self.client: Client | None = None
        self.rank, self.is_stopped = index, False
        self.children: list[Process] = []
        self.ended: Callable[[], None] = lambda: None
        if parent is not None:
            parent.children.append(self)
        self._pid = simulation.add(self)
        self.printed: list[str] = []
        self.logged: list[str] = []
        self.defects: list[str] = []
        self.exit_code: int | None = None
        self.ended_s, self.progress, self.has_finished = 0.0, 0, False
        self.result: object = None
        self.clock_offset_s = 0.0
        self.tasks: list[Task] = []
        self._program = Thread(lambda: self._start(self._run))
        self._run: Callable[[], None] = lambda: None
        self._pending: dict[Task, type[BaseException]] = {}
        self._handlers: dict[int, Any] = {}
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
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
            except Exception as error:
                code = 1
                self._hook(type(error), error, error.__traceback__)
            for call in reversed(self._exit_calls):
                call()
            if self.runtime is not None:
                self.runtime.disconnect(self)
            self.exit(code)

        self._run = run
        self._program.start()

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
        for child in self.children:
            child.end(-signal.SIGKILL)
        for connection in list(self.sockets):
            connection.close()
        self.simulation.on_end(self)
        self.ended()

    def freeze(self) -> None:
        """Stops all Python threads."""
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        """Continues all Python threads."""
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
        if pending := self._pending.pop(task, None):
            raise pending()
        return woken

    def send_signal(self, number: int) -> None:
        """Calls the handler of a signal, or ends the process."""
        handler = self._handlers.get(number, signal.SIG_DFL)
        if callable(handler):
            self._start(lambda: handler(number, None))
        else:
            self.end(-number)

    def signal_at(self, when_s: float, handle: Callable[[], None]) -> None:
        """Calls a signal handler at a time, unless the process has ended."""

        def wait_and_handle() -> None:
            self.wait(when_s - self.simulation.scheduler.now_s)
            handle()

        if when_s > self.simulation.scheduler.now_s:
            self._start(wait_and_handle)

    def _start(self, run: Callable[[], object]) -> Task:
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

    def condition(self) -> Condition:
        """Returns a condition."""
        return Condition(self)

    def queue(self) -> Queue:
        """Returns a queue."""
        return Queue(self)

    def thread(self, run: Callable[..., None], *args: object, name: str) -> Thread:
        """Returns a thread."""
        return Thread(lambda: self._start(lambda: run(*args)))

    def main_thread(self) -> Thread:
        """Returns the thread of the program."""
        return self._program

    def is_current(self, thread: object) -> bool:
        """Whether a thread calls this."""
        return isinstance(thread, Thread) and thread.task is current_task()

    def process_index(self) -> int:
        """Returns its number in the runtime."""
        return self.rank

    def process_count(self) -> int:
        """Returns the number of processes in the runtime."""
        return self.count if self.runtime is None else self.runtime.count

    def coordination_client(self) -> Any:
        """Returns the client."""
        return self.client

    def coordinator_host(self) -> str:
        """Returns the address of the coordination service."""
        assert self.runtime is not None
        return address_of(self.runtime.service.place)

    def initialize_jax(
        self, address: str, num_processes: int, process_id: int, **arguments: Any
    ) -> None:
        """Connects to the runtime of the run."""
        self.simulation.connect_jax(self)

    def start_coordination_service(self, address: str, num_processes: int) -> Runtime:
        """Returns a runtime, whose service is in this process."""
        runtime = self.simulation.add_runtime(num_processes, self, is_supervised=True)
        self.simulation.runtimes_by_address[address] = weakref.ref(runtime)
        return runtime

    def connect_coordination_service(
        self, address: str, num_processes: int, process_id: int
    ) -> Callable[[], None]:
        """Connects to a runtime."""
        return self.simulation.connect_to_address(self, address, process_id)

    def leave_runtime(self, keep: bool) -> None:
        """Leaves the runtime; its service still knows the process."""
        self.runtime = self.client = None
        self.rank = self.index

    def name(self) -> str:
        """Returns the name of the host."""
        return f"host{self.place}"

    def pid(self) -> int:
        """Returns a number that no other process has."""
        return self._pid

    def namespace(self) -> str:
        """Returns a text that the processes of a host share."""
        return f"simulated{self.place}"

    def state_of(self, pid: int) -> str:
        """Returns the state of a process of this host, as proc(5) does."""
        process = self.simulation.find(self.place, pid)
        if process is None:
            raise FileNotFoundError(pid)
        return "T" if process.is_stopped else "S"

    def kill(self, pid: int) -> None:
        """Kills a process of this host."""
        process = self.simulation.find(self.place, pid)
        if process is not None:
            process.end(-signal.SIGKILL)

    def set_signal_handler(self, number: int, handler: Any) -> Any:
        """Sets the handler of a signal."""
        before = self._handlers.get(number, signal.SIG_DFL)
        self._handlers[number] = handler
        return before

    def connect(self, host: str, port: int, timeout_s: float) -> SimulatedSocket:
        """Returns a connection."""
        return self.simulation.sockets.connect(self, host, port, timeout_s)

    def listen(self, host: str, port: int, family: int) -> SimulatedSocket:
        """Returns a socket that listens."""
        return self.simulation.sockets.listen(self, host, port)

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

    def stack_of(self, thread: object) -> None:
        """Returns that the stack is unknown."""

    def raise_in(self, thread: object, error: type[BaseException]) -> None:
        """Raises in a thread when it next runs Python, so not in a collective."""
        assert isinstance(thread, Thread)
        assert thread.task is not None
        self._pending[thread.task] = error

    def print_error(self, text: str) -> None:
        """Keeps a line."""
        self.printed.append(text.rstrip())

    def print_all_stacks(self) -> None:
        """Prints nothing: the stacks of this machine are those of the simulator."""

    def _print_exception(
        self, kind: type[BaseException], error: BaseException, where: object
    ) -> None:
        self.printed.append(f"{kind.__name__}: {error}")


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
