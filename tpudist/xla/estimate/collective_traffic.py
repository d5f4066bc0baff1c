"""Reads what a compiled program sends: along which mesh axes, over which network, and how long."""

import dataclasses

from jax.sharding import Mesh

from tpudist.xla.estimate import timeline
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo.hlo_module import Module


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """One collective of a compiled program, with how often a step runs it and what that takes.

    Attributes:
        kind: The HLO opcode; "copy-to-host" or "copy-from-host" for the host's memory.
        num_bytes: Size of the whole operand or result on one device, per occurrence.
        count: How often a step runs it, trip counts of loops included.
        axes: The mesh axes along which it moves data, in the order of the mesh.
        network: "ici" inside a slice, "dcn" between slices, "host" to the host's memory.
        is_async: Whether other work can be scheduled while it runs.
        source: The user's line "file:line", or None if nobody asked for it.
        op_name: The path of the JAX operation.
        sent_bytes: What one device sends over that network per step.
        seconds: What it takes per step, in all; 0 where the chip is not known.
        exposed_s: The part of it that no computation hides.
    """

    kind: str
    num_bytes: int
    count: float
    axes: tuple[str, ...]
    network: str
    is_async: bool
    source: str | None
    op_name: str
    sent_bytes: float
    seconds: float
    exposed_s: float


def uses(module: Module, mesh: Mesh, chip: Chip | None) -> list[CollectiveUse]:
    """What a step of a compiled program sends, in the order in which it runs.

    Each instruction is given once, with its count; of a conditional, the branch that takes longest.
    Copies between HBM and VMEM are left out.

    Args:
        module: The compiled program.
        mesh: The mesh that it was compiled for.
        chip: What its devices are; None (as for CPU) if nothing is to be priced.
    """
    return uses_of_timeline(timeline.play(module, mesh, chip))


def uses_of_timeline(played: timeline.Timeline) -> list[CollectiveUse]:
    """What a step sends that was played through already."""
    return [
        CollectiveUse(
            kind=transfer.kind,
            num_bytes=transfer.num_bytes,
            count=event.count,
            axes=transfer.axes,
            network=transfer.network,
            is_async=event.is_async,
            source=transfer.source,
            op_name=transfer.op_name,
            sent_bytes=event.count * transfer.sent_bytes,
            seconds=event.count * transfer.seconds,
            exposed_s=event.count * event.exposed_s,
        )
        for event in played.events
        if (transfer := event.transfer) is not None and transfer.network != "hbm"
    ]
