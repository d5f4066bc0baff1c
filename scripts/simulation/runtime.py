"""Runtime: JAX's runtime of some processes: service, heartbeats, collectives, aborts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from simulation.scheduler import Waker, current_task
from simulation.service import Client, Service

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.simulation import Simulation

CONNECT_S = SHUTDOWN_S = 300.0
"""Seconds that JAX waits for all processes at its start and at its end."""
HEARTBEAT_S = 100.0
"""Seconds until JAX's service gives up a process that sends no heartbeat, and aborts the others."""
ABORT_S = 0.2, 1.5
"""Seconds until JAX aborts a process that has lost its service."""
EXIT_ABORTED = -6


class Runtime:
    """The runtime of `count` processes.

    Args:
        simulation: The run.
        count: Number of processes.
        owner: Process that has the service.
        is_supervised: Whether a supervisor has the service, as in `tpudist.xla.internals`: there
            are no heartbeats, no time limits, and no barrier at the end of a process.

    Attributes:
        service: The coordination service.
        collectives: Programs on the devices.
        members: Processes that connect or have connected, by their number. A process that has
            left the runtime under a supervisor stays a member: JAX aborts it, too, when the service
            ends.
    """

    def __init__(self, simulation: Simulation, count: int, owner: Process, is_supervised: bool):
        self.count, self.owner = count, owner
        self._simulation, self._is_supervised = simulation, is_supervised
        self.service = Service(
            simulation.scheduler, simulation.network, owner.place, simulation.seconds_per_request
        )
        self.collectives = Collectives(simulation, count)
        self.members: dict[int, Process] = {}
        self._clients: dict[Process, Client] = {}

    def __del__(self) -> None:
        if self._is_supervised:  # the supervisor has dropped the last reference
            self.end()

    def connect(self, process: Process, rank: int) -> Client:
        """Connects a process, which waits for all others."""
        client = Client(process, self.service, self._simulation.network)
        self.members[rank], self._clients[process] = process, client
        limit_s = math.inf if self._is_supervised else CONNECT_S
        try:
            if self.service.is_gone:
                process.wait(limit_s)
                raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")
            client.wait_at_barrier("jax/connect", self.count, limit_s)
        except RuntimeError as error:
            self._forget(process)
            raise jax.errors.JaxRuntimeError(str(error)) from None
        return client

    def _forget(self, process: Process) -> None:
        self.members = {rank: x for rank, x in self.members.items() if x is not process}

    def join(self, process: Process, client: Client, rank: int) -> None:
        """Makes a connected process a member."""
        process.runtime, process.client, process.rank = self, client, rank

    def disconnect(self, process: Process) -> None:
        """Disconnects a process in order, as JAX's exit handler does."""
        assert process.client is not None
        if not self._is_supervised:
            try:
                process.client.wait_at_barrier("jax/shutdown", self.count, SHUTDOWN_S)
            except RuntimeError as error:  # JAX aborts the process
                process.printed.append(str(error))
                process.exit(EXIT_ABORTED)
            self._forget(process)
        process.runtime = process.client = None

    def expect_heartbeat(self, process: Process, is_missing: Callable[[], bool]) -> None:
        """Aborts all processes if the heartbeats of one are missing for long."""

        def check() -> None:
            if process.exit_code is None and process.runtime is self and is_missing():
                for other in list(self.members.values()):
                    _abort(other, "JAX: heartbeat timeout")

        if not self._is_supervised:
            self._simulation.scheduler.after(HEARTBEAT_S, check)

    def on_end(self, process: Process) -> None:
        """Follows the end of a process."""
        if process in self.members.values():
            self.collectives.lose(process)
        if process is self.owner:
            self.end()

    def end(self) -> None:
        """Ends the service."""
        if self.service.is_gone:
            return
        self.service.is_gone = True
        for other in self.members.values():
            if other is not self.owner and other.exit_code is None:
                self._lose_service(other)

    def _lose_service(self, process: Process) -> None:
        scheduler = self._simulation.scheduler

        def abort() -> None:
            if process in self.members.values():
                _abort(process, "JAX: lost the service, in process 0")

        def notice() -> None:
            self._clients[process].lose_service()
            scheduler.after(scheduler.random.uniform(*ABORT_S), abort)

        if self._simulation.is_up(self.service.place):  # after what its process has sent before
            self._simulation.network.send(self.service.place, process.place, "jax", 66, notice)
        else:
            scheduler.after(HEARTBEAT_S, notice)


def _abort(process: Process, why: str) -> None:
    if process.exit_code is None:
        process.printed.append(why)
        process.end(EXIT_ABORTED)


class Collectives:
    """Programs on the devices: each waits in C++ until all processes run it."""

    def __init__(self, simulation: Simulation, count: int):
        self._simulation, self._count = simulation, count
        self._waiting: dict[int, dict[int, Waker]] = {}
        self._failed: set[int] = set()
        self._lost: list[int] = []

    def run(self, process: Process, number: int) -> None:
        """Runs collective `number`.

        Raises:
            JaxRuntimeError: If a process of it was lost.
        """
        waiting = self._waiting.setdefault(number, {})
        waiting[process.rank] = current_task().waker()
        if self._lost and self._simulation.collectives_fail:
            self._fail_later(number)
        elif len(waiting) == self._count:
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
            self._lost.append(process.rank)
            for number in self._waiting if self._simulation.collectives_fail else ():
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
