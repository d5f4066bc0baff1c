"""Simulation: a run of processes, with their network, coordination service and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from simulation.connections import Sockets
from simulation.network import Link, Network
from simulation.process import Process, keep_logs
from simulation.scheduler import Scheduler, Waker, current_task
from simulation.service import Client, Service
from tpudist.processes.peer_connections import DEAD_PEER_S

PORT = 8476
CONNECT_S = SHUTDOWN_S = 300.0
"""Seconds that JAX waits for all processes at its start and at its end."""
HEARTBEAT_S = 100.0
"""Seconds until JAX's service gives up a process that sends no heartbeat, and aborts the others."""
ABORT_S = 0.2, 1.5
"""Seconds until JAX aborts a process that has lost its service."""
EXIT_ABORTED = -6
_POWER_OFF, _SIGKILL = -99, -9


class Simulation:
    """A run.

    Args:
        count: Number of processes.
        seed: Seed of everything that is random.
        link: Network of each host; by default one of 10 Gbit/s.
        seconds_per_request: Time of the coordination service for one request.
        collectives_fail: Whether a collective fails when a process of it is lost; it hangs
            otherwise, as on TPUs.

    Attributes:
        processes: The processes; a restarted one replaces the first one.
        former: Processes that were replaced, or that have a number of another one.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        link: Link | None = None,
        seconds_per_request: float = 30e-6,
        collectives_fail: bool = True,
    ):
        self.count, self.scheduler = count, Scheduler(seed)
        self.network = Network(self.scheduler, link or Link())
        self.service = Service(self.scheduler, self.network, seconds_per_request)
        self.service.stop()  # until process 0 starts it
        self.sockets = Sockets(self.scheduler, self.network, self._is_up)
        self.collectives = Collectives(self, collectives_fail)
        self.processes = [Process(self, i, count) for i in range(count)]
        self.former: list[Process] = []
        self._without_power: set[int] = set()

    def run(self, program: Callable[[Process], None], limit_s: float = 10_000.0) -> bool:
        """Runs a program in all processes; returns whether all have ended within the limit."""
        for process in self.processes:
            process.run(program)
        return self.go_on(limit_s)

    def go_on(self, limit_s: float = 10_000.0) -> bool:
        """Lets time pass until all processes have ended."""
        with keep_logs():
            return self.scheduler.run(self._have_ended, limit_s)

    def _have_ended(self) -> bool:
        return all(x.exit_code is not None for x in (*self.processes, *self.former))

    # JAX.

    def connect_jax(self, process: Process) -> None:
        """Connects a process to the coordination service, as `jax.distributed.initialize` does."""
        if not process.index:
            self.sockets.open_grpc_port(0, PORT)
            self.service.go_on()
        process.client = Client(process, self.service, self.network)
        try:
            process.client.wait_at_barrier("jax/connect", process.count, CONNECT_S)
        except RuntimeError:
            process.client = None
            raise

    def disconnect_jax(self, process: Process) -> None:
        """Disconnects a process in order, as JAX's exit handler does."""
        assert process.client is not None
        try:
            process.client.wait_at_barrier("jax/shutdown", process.count, SHUTDOWN_S)
        except RuntimeError as error:  # JAX aborts the process
            process.printed.append(str(error))
            process.exit(EXIT_ABORTED)
        process.client = None

    # Faults.

    def kill(self, process: Process) -> None:
        """Kills a process; its kernel closes its connections."""
        process.end(_SIGKILL)

    def start_again(self, process: Process, program: Callable[[Process], None]) -> None:
        """Starts a second process with the number of another one, which may still run."""
        second = Process(self, process.index, process.count)
        if process.exit_code is None:
            self.former.append(second)
        else:
            self.former.append(process)
            self.processes[process.index] = second
        second.run(program)

    def power_off(self, process: Process) -> None:
        """Ends a host: nothing comes from it any more, not even the end of a connection."""
        self._without_power.add(process.index)
        process.end(_POWER_OFF)
        self._lose_connections_later(lambda: self._without_power.__contains__)

    def stop(self, process: Process) -> None:
        """Stops a process, like SIGSTOP: also what JAX runs in C++."""
        process.freeze()
        if not process.index:
            self.service.stop()
        self._expect_heartbeat(process, lambda: process.is_frozen)

    def go_on_after_stop(self, process: Process) -> None:
        """Lets a stopped process continue."""
        process.thaw()
        if not process.index:
            self.service.go_on()

    def split(self, indices: Sequence[int], seconds: float) -> None:
        """Splits some hosts from all others for a time."""
        part, is_over = self.network.split(indices), []

        def heal() -> None:
            is_over.append(True)
            self.network.heal(part)

        self.scheduler.after(seconds, heal)
        self._lose_connections_later(lambda: lambda i: not is_over and i in part)
        for i in indices:
            self._expect_heartbeat(self.processes[i], lambda: not is_over)

    def _lose_connections_later(self, find: Callable[[], Callable[[int], bool]]) -> None:
        """Ends connections whose other host does not answer for the time of keepalive."""

        def lose() -> None:
            is_unreachable = find()
            for process in self.processes:
                for near in list(process.sockets):
                    if near.peer is None or near.host is None or near.peer.host is None:
                        continue
                    if is_unreachable(near.host) != is_unreachable(near.peer.host):
                        near.fail(TimeoutError(110, "Connection timed out"))

        self.scheduler.after(DEAD_PEER_S, lose)

    def _expect_heartbeat(self, process: Process, is_missing: Callable[[], bool]) -> None:
        def check() -> None:
            if process.exit_code is None and process.client is not None and is_missing():
                for other in self.processes:
                    if other.client is not None:
                        self._abort(other, "JAX: heartbeat timeout")

        self.scheduler.after(HEARTBEAT_S, check)

    def _is_up(self, index: int) -> bool:
        return index not in self._without_power

    # Ends.

    def on_end(self, process: Process) -> None:
        """Follows the end of a process; `Process.end` calls it."""
        if process not in self.processes:
            return  # a second one with the number of another: it never took part
        self.collectives.lose(process)
        if process.index:
            return
        self.service.is_gone = True
        for other in self.processes:
            if other.client is not None and other.exit_code is None:
                self._lose_service(other)

    def _lose_service(self, process: Process) -> None:
        client = process.client
        assert client is not None

        def notice() -> None:
            client.lose_service()
            delay_s = self.scheduler.random.uniform(*ABORT_S)
            self.scheduler.after(delay_s, lambda: self._abort(process, "JAX: lost the service"))

        if self._is_up(0):  # after what process 0 has sent before
            self.network.send(0, process.index, "jax", 66, notice)
        else:
            self.scheduler.after(HEARTBEAT_S, notice)

    def _abort(self, process: Process, why: str) -> None:
        if process.exit_code is None and process.client is not None:
            process.printed.append(why)
            process.end(EXIT_ABORTED)


class Collectives:
    """Programs on the devices: each waits in C++ until all processes run it."""

    def __init__(self, simulation: Simulation, fail: bool):
        self._simulation, self._fail = simulation, fail
        self._waiting: dict[int, dict[int, Waker]] = {}
        self._failed: set[int] = set()
        self._lost: list[int] = []

    def run(self, process: Process, number: int) -> None:
        """Runs collective `number`.

        Raises:
            JaxRuntimeError: If a process of it was lost.
        """
        waiting = self._waiting.setdefault(number, {})
        waiting[process.index] = current_task().waker()
        if self._lost and self._fail:
            self._fail_later(number)
        elif len(waiting) == self._simulation.count:
            self._finish(number)
        process.wait()
        if number in self._failed:
            lost = ", ".join(map(str, self._lost))
            raise jax.errors.JaxRuntimeError(
                f"INTERNAL: Gloo all-reduce failed: Connection closed by peer {lost}"
            )

    def lose(self, process: Process) -> None:
        """Fails what waits for a process that has ended."""
        if process.exit_code != 0:
            self._lost.append(process.index)
            for number in self._waiting if self._fail else ():
                self._fail_later(number)

    def _fail_later(self, number: int) -> None:
        self._failed.add(number)
        for wake in self._waiting[number].values():
            wake(self._simulation.scheduler.random.uniform(0.01, 0.06))

    def _finish(self, number: int) -> None:
        simulation, waiting = self._simulation, self._waiting[number]
        if simulation.network.has_split():
            simulation.scheduler.after(0.1, lambda: self._finish(number))
            return
        del self._waiting[number]
        for wake in waiting.values():
            wake(1e-3)
