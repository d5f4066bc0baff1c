"""Measures what operations of the control plane cost, and how that grows with the processes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from simulation.connections import TCP, address_of
from simulation.process import Process
from simulation.scheduler import current_task
from simulation.simulation import PORT, Simulation
from simulation.training import make_mesh
from tpudist.preemption.agreed_boundary import BoundaryAgreement
from tpudist.processes import process_agreement, rendezvous
from tpudist.processes.coordination import Channel
from tpudist.processes.process_agreement import Intention
from tpudist.xla.mesh import ReplicaMesh

COUNTS = 16, 64, 256, 1024, 4096
WATCH_S = 60.0
SERVICE_STARTS_S = 0.02
"""Seconds that JAX needs to start its service after the rendezvous."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one operation.

    Attributes:
        messages_0: Messages that the host of process 0 sent and received.
        bytes_0: Bytes of these messages.
        messages: Messages of the busiest other process.
        bytes: Bytes of the busiest other process.
        cpu_0_s: CPU seconds of process 0 on this machine.
        cpu_s: CPU seconds of another process; the median.
        all_know_s: Virtual seconds until all processes know the result.
    """

    messages_0: float
    bytes_0: float
    messages: float
    bytes: float
    cpu_0_s: float
    cpu_s: float
    all_know_s: float


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that all processes do together.

    Attributes:
        name: Description.
        purposes: First folders of the keys that it uses.
        prepare: Called in each process before; returns what it then calls.
        is_connected: Whether JAX has connected the processes before.
        is_in_threads: Whether threads of tpudist do it, and not the program.
    """

    name: str
    purposes: Sequence[str]
    prepare: Callable[[Process, ReplicaMesh], Callable[[], object]]
    is_connected: bool = True
    is_in_threads: bool = False


def _agree(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    process_agreement.watch(mesh)
    facts = {"arguments": "float32[128,1024], int32[128]", "result": "float32[]"}
    return lambda: process_agreement.agree(mesh, Intention("Strategy.run of 'train'", facts))


def _exchange(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    process_agreement.watch(mesh)
    text = f"{process.index:100}"
    return lambda: process_agreement.exchange(mesh, Intention("states of datasets"), text)


def _barrier(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    channel = Channel("checkpoint/0")
    return lambda: channel.exchange("", purpose="to save")


def _watch(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    process_agreement.watch(mesh)
    return lambda: process.sleep(WATCH_S)


def _notice(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    agreement = BoundaryAgreement("preemption/0")

    def run_steps() -> None:
        if process.index == 1:
            agreement.notice.give("SIGTERM")
        while not agreement.reach_boundary():
            process.sleep(0.1)

    return run_steps


def _meet(process: Process, mesh: ReplicaMesh) -> Callable[[], object]:
    def meet() -> None:
        rendezvous.join(f"{address_of(0)}:{PORT}", process.count, process.index)
        if not process.index:
            process.sleep(SERVICE_STARTS_S)
            process.simulation.sockets.open_grpc_port(process.place, PORT)

    return meet


OPERATIONS = (
    Operation("rendezvous", [TCP], _meet, is_connected=False),
    Operation("agreement on a program", ["tpudist/agreement"], _agree),
    Operation("exchange of 100 bytes", ["tpudist/agreement"], _exchange),
    Operation("barrier of a checkpoint", ["tpudist/checkpoint"], _barrier),
    Operation("watch, for a minute", ["tpudist/watch", TCP], _watch, is_in_threads=True),
    Operation("notice of the end, until all stop", ["tpudist/preemption"], _notice),
)


def measure(operation: Operation, count: int, seed: int = 0, *, measures_cpu: bool = True) -> Cost:
    """Returns the cost of an operation between `count` processes."""
    simulation, mesh = Simulation(count, seed), make_mesh(count)
    simulation.scheduler.measures_cpu = measures_cpu
    cpu_ns = [0] * count
    began_s, ended_s = [0.0] * count, [0.0] * count

    def program(process: Process) -> None:
        if operation.is_connected:
            simulation.connect_jax(process)
        run, i = operation.prepare(process, mesh), process.index
        if process.client is not None:
            process.client.wait_at_barrier("simulation/ready", count)
        cpu_ns[i] = -_cpu_ns(process, operation)
        began_s[i] = simulation.scheduler.now_s
        run()
        ended_s[i] = simulation.scheduler.now_s
        process.sleep(0.0)
        cpu_ns[i] += _cpu_ns(process, operation)
        # Ends here: the end of a run has its own messages.
        if process.client is not None:
            process.client.wait_at_barrier("simulation/done", count)
        process.exit(0)

    if not simulation.run(program):
        raise RuntimeError(f"{operation.name} of {count} processes did not end")
    totals = [
        [sum(counter[i, x] for x in operation.purposes) for i in range(count)]
        for counter in (simulation.network.num_messages, simulation.network.num_bytes)
    ]
    return Cost(
        messages_0=totals[0][0],
        bytes_0=totals[1][0],
        messages=max(totals[0][1:]),
        bytes=max(totals[1][1:]),
        cpu_0_s=cpu_ns[0] / 1e9,
        cpu_s=statistics.median(cpu_ns[1:]) / 1e9,
        all_know_s=max(ended_s) - max(began_s),
    )


def _cpu_ns(process: Process, operation: Operation) -> int:
    tasks = process.tasks if operation.is_in_threads else [current_task()]
    return sum(x.cpu_ns for x in tasks)


def exponent(values: Mapping[int, float]) -> float:
    """Returns the slope of values over numbers, in logarithms: 1 if twice as many cost twice."""
    x, y = [math.log(n) for n in values], [math.log(v) for v in values.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)
