"""Simulation: a run of processes, with their network, runtimes of JAX, and faults."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection

import jax

from simulation.connections import Sockets
from simulation.network import Link, Network
from simulation.process import Process, keep_logs
from simulation.runtime import Runtime
from simulation.scheduler import Scheduler
from tpudist.processes.peer_connections import DEAD_PEER_S
from tpudist.xla import internals

PORT = 8476
_POWER_OFF, _SIGKILL = -99, -9


class Simulation:
    """A run.

    Args:
        count: Number of processes.
        seed: Seed of everything that is random.
        per_host: Number of processes of each host.
        link: Network of each host; by default one of 10 Gbit/s.
        seconds_per_request: Time of the coordination service for one request.
        collectives_fail: Whether a collective fails when a process of it is lost; it hangs
            otherwise, as on TPUs.

    Attributes:
        processes: The processes; a restarted one replaces the first one.
        former: Processes that were replaced, or that have a number of another one.
        runtimes_by_address: Runtimes that supervisors have started.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        per_host: int = 1,
        link: Link | None = None,
        seconds_per_request: float = 30e-6,
        collectives_fail: bool = True,
    ):
        self.count, self.scheduler = count, Scheduler(seed)
        self.collectives_fail, self.seconds_per_request = collectives_fail, seconds_per_request
        self.network = Network(self.scheduler, link or Link())
        self.sockets = Sockets(self.scheduler, self.network, self.is_up)
        self._pids = itertools.count(1000)
        self._by_pid: dict[int, Process] = {}
        self._without_power: set[int] = set()
        self._runtimes: list[weakref.ref[Runtime]] = []
        self.runtimes_by_address: dict[str, weakref.ref[Runtime]] = {}
        self.processes = [Process(self, i, count, i // per_host) for i in range(count)]
        self.former: list[Process] = []
        self.runtime: Runtime | None = None
        if count:
            self.runtime = self._stopped_runtime(self.processes[0])

    def add(self, process: Process) -> int:
        """Adds a process; returns its pid."""
        pid = next(self._pids)
        self._by_pid[pid] = process
        return pid

    def find(self, place: int, pid: int) -> Process | None:
        """Returns the running process with a pid on a host."""
        process = self._by_pid.get(pid)
        if process is None or process.place != place or process.exit_code is not None:
            return None
        return process

    def run(self, program: Callable[[Process], None], limit_s: float = 10_000.0) -> bool:
        """Runs a program in all processes; returns whether all have ended within the limit."""
        for process in self.processes:
            process.run(program)
        return self.go_on(limit_s)

    def go_on(self, limit_s: float = 10_000.0, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Advances time until all processes have ended, or `is_over()`."""
        before = internals.settings_of_thread()
        try:
            with keep_logs():
                return self.scheduler.run(lambda: is_over() or self._have_ended(), limit_s)
        finally:
            # The tasks share JAX's settings of this thread, and may end within a block that sets
            # one, such as a default device.
            internals.set_in_thread(before)

    def _have_ended(self) -> bool:
        return all(x.exit_code is not None for x in (*self.processes, *self.former))

    # JAX.

    def add_runtime(self, count: int, owner: Process, *, is_supervised: bool = False) -> Runtime:
        """Returns a new runtime; `owner` has its service."""
        runtime = Runtime(self, count, owner, is_supervised)
        self._runtimes = [x for x in self._runtimes if x() is not None]
        self._runtimes.append(weakref.ref(runtime))
        return runtime

    def _stopped_runtime(self, owner: Process) -> Runtime:
        """Returns a runtime that answers when its owner has started it."""
        runtime = self.add_runtime(self.count, owner)
        runtime.service.stop()
        return runtime

    def connect_jax(self, process: Process) -> None:
        """Connects a process to the coordination service, as `jax.distributed.initialize` does."""
        runtime = self.runtime
        assert runtime is not None
        if process is runtime.owner:
            self.sockets.open_grpc_port(process.place, PORT)
            runtime.service.go_on()
        client = runtime.connect(process, process.index)
        runtime.join(process, client, process.index)

    def connect_to_address(self, process: Process, address: str, rank: int) -> Callable[[], None]:
        """Connects a process to the service of a supervisor; returns what makes it a member."""
        found = self.runtimes_by_address.get(address)
        runtime = None if found is None else found()
        if runtime is None or runtime.service.is_gone:
            raise jax.errors.JaxRuntimeError(f"UNAVAILABLE: no service at {address}")
        client = runtime.connect(process, rank)
        weak = weakref.ref(runtime)

        def join() -> None:
            runtime = weak()
            if runtime is not None:
                runtime.join(process, client, rank)

        return join

    # Faults.

    def kill(self, process: Process) -> None:
        """Kills a process; its kernel closes its connections."""
        process.end(_SIGKILL)

    def start_again(self, process: Process, program: Callable[[Process], None]) -> None:
        """Starts a second process with the number of another one, which may still run."""
        second = Process(self, process.index, process.count, process.place)
        if process.exit_code is None:
            self.former.append(second)
        else:
            self.former.append(process)
            self.processes[process.index] = second
            if self.runtime is not None and process is self.runtime.owner:
                self.runtime = self._stopped_runtime(second)
        second.run(program)

    def on_host(self, place: int) -> list[Process]:
        """Returns the running processes of a host."""
        return [x for x in self._by_pid.values() if x.place == place and x.exit_code is None]

    def power_off(self, place: int) -> None:
        """Ends a host: nothing comes from it any more, not even the end of a connection."""
        self._without_power.add(place)
        for process in self.on_host(place):
            process.end(_POWER_OFF)
        self._lose_connections_later(lambda: self._without_power.__contains__)

    def stop(self, process: Process) -> None:
        """Stops a process, like SIGSTOP: also what JAX runs in C++."""
        process.freeze()
        process.is_stopped = True
        for runtime in self._runtimes_of(process):
            runtime.service.stop()
        if process.runtime is not None:
            process.runtime.expect_heartbeat(process, lambda: process.is_frozen)

    def go_on_after_stop(self, process: Process) -> None:
        """Continues a stopped process."""
        process.is_stopped = False
        process.thaw()
        for runtime in self._runtimes_of(process):
            runtime.service.go_on()

    def split(self, places: Collection[int], seconds: float) -> None:
        """Splits some hosts from all others for a time."""
        part, is_over = self.network.split(places), []

        def heal() -> None:
            is_over.append(True)
            self.network.heal(part)

        self.scheduler.after(seconds, heal)
        self._lose_connections_later(lambda: lambda i: not is_over and i in part)
        for process in self.processes:
            if process.place in part and process.runtime is not None:
                process.runtime.expect_heartbeat(process, lambda: not is_over)

    def _lose_connections_later(self, find: Callable[[], Callable[[int], bool]]) -> None:
        """Ends connections whose other host does not answer for the time of keepalive."""

        def lose() -> None:
            is_unreachable = find()
            for process in self._by_pid.values():
                for near in list(process.sockets):
                    if near.peer is None or near.host is None or near.peer.host is None:
                        continue
                    if is_unreachable(near.host) != is_unreachable(near.peer.host):
                        near.fail(TimeoutError(110, "Connection timed out"))

        self.scheduler.after(DEAD_PEER_S, lose)

    def is_up(self, place: int) -> bool:
        """Whether a host has power."""
        return place not in self._without_power

    def on_end(self, process: Process) -> None:
        """Follows the end of a process; `Process.end` calls it."""
        for known in list(self._runtimes):
            if (runtime := known()) is not None:
                runtime.on_end(process)
        if self.runtime is not None and process is self.runtime.owner:
            self.sockets.close_grpc_port(process.place, PORT)

    def _runtimes_of(self, owner: Process) -> list[Runtime]:
        runtimes = [known() for known in self._runtimes]
        return [x for x in runtimes if x is not None and x.owner is owner]
