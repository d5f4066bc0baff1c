"""Programs that the simulated processes run: what they call is the real code of tpudist."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import cast

from simulation.connections import address_of
from simulation.process import Process
from simulation.simulation import PORT
from tpudist.preemption.agreed_boundary import BoundaryAgreement
from tpudist.processes import connection, process_agreement, rendezvous
from tpudist.processes.coordination import Channel
from tpudist.processes.process_agreement import Intention
from tpudist.xla.mesh import ReplicaMesh


class _Mesh:
    def __init__(self, count: int):
        self.num_processes, self.processes = count, tuple(range(count))
        device = types.SimpleNamespace(client=object())
        self.mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[device]))


def make_mesh(count: int) -> ReplicaMesh:
    """Returns the part of a mesh that an agreement reads: processes, and a device that exists."""
    return cast(ReplicaMesh, _Mesh(count))


def start(process: Process, *, meet: bool = False) -> None:
    """Starts a process as strategies do: rendezvous, JAX."""
    address = f"{address_of(0)}:{PORT}"
    if meet:
        rendezvous.join(address, process.count, process.index)
    connection.initialize(address, process.count, process.index)


def training(
    mesh: ReplicaMesh,
    steps: int,
    step_s: float,
    *,
    meet: bool = False,
    fault: Callable[[Process, int], None] = lambda process, step: None,
    notice: tuple[int, float] | None = None,
) -> Callable[[Process], None]:
    """Returns a program that trains: each step is one program of all processes.

    Every fifth step ends with the barrier of a checkpoint. After a notice, all processes save and
    stop at the same step.

    Args:
        mesh: The processes.
        steps: Number of steps.
        step_s: Seconds of each step on the host.
        meet: Whether the processes meet first, as they do without certificates.
        fault: Called in each process with the number of each step.
        notice: The process that receives a request to end, and when; None for no notice.
    """

    def train(process: Process) -> None:
        start(process, meet=meet)
        process_agreement.watch(mesh)
        checkpoints, boundary = Channel("checkpoint/0"), BoundaryAgreement("preemption/0")
        if notice is not None and notice[0] == process.index:
            process.signal_at(notice[1], lambda: boundary.notice.give("SIGTERM"))
        for step in range(steps):
            fault(process, step)
            process_agreement.agree_once(
                mesh, "train", lambda: Intention("Strategy.run of 'train'")
            )
            assert process.runtime is not None
            process.runtime.collectives.run(process, step)
            process.sleep(step_s)
            process.progress += 1
            is_last = boundary.reach_boundary()
            if is_last or step % 5 == 4:
                checkpoints.exchange("", purpose="to save a checkpoint")
            if is_last:
                break
        boundary.close()
        process.has_finished = True

    return train
