"""Lists the transfers of a compiled program with their mesh axes, network and time."""

import dataclasses

from tpudist.xla.estimate import timeline


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """One transfer of a compiled program, with its cost per step.

    Attributes:
        kind: HLO opcode; "copy-to-host" or "copy-from-host" for the host's memory.
        num_bytes: Size of the complete operand or result on one device, per run.
        count: Runs per step, including the trip counts of loops.
        axes: Mesh axes along which it moves data, in the order of the mesh.
        network: "ici" inside a slice, "dcn" between slices, "host" to the host's memory.
        is_async: Whether other work can be scheduled while it runs.
        source: The user's line "file:line"; None if the compiler added it.
        op_name: Path of the JAX operation.
        sent_bytes: Bytes that one device sends over that network per step.
        seconds: Seconds per step; 0 if the chip is unknown.
        exposed_s: Seconds per step that no computation hides.
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


def uses(simulated: timeline.Timeline) -> list[CollectiveUse]:
    """Returns the transfers of a step from its timeline, in the order in which they run.

    Each instruction appears once, with its count. A conditional counts as its slowest branch.
    Copies between HBM and VMEM are left out.
    """
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
        for event in simulated.events
        if (transfer := event.transfer) is not None and transfer.network != "hbm"
    ]
