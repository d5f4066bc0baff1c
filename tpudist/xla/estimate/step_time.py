"""Prices a compiled program: how long a step takes on a chip, and what takes so long.

The rules for single instructions stand in `instruction_time`, those for transfers in `links`, and
how they overlap in `timeline`. They were fixed before they were compared with any training run,
from the compiler's own figures, the chips' documents and published microbenchmarks. A step never
takes less than all its bytes take to and from HBM.

XLA's `cost_analysis()` is not used: it counts the bodies of loops once, and its `optimal_seconds`
can be negative.
"""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from tpudist.xla.estimate import hbm_traffic, instruction_time, kernels, timeline
from tpudist.xla.estimate.timeline import Event
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo.hlo_module import Module

_NUM_TOP = 20


@dataclasses.dataclass(frozen=True)
class OpTime:
    """What one instruction takes per step.

    Attributes:
        name: Its name in the program.
        op_name: The path of the JAX operation.
        source: The user's line "file:line", or None if nobody asked for it.
        seconds: What it takes per step, trip counts of loops included; of a transfer, the exposed
            part.
        share: That as a share of the step.
        kind: "matmul", "kernel", "elementwise", "ici", "dcn", "host", or "hbm" for a copy between
            HBM and VMEM that others wait for.
    """

    name: str
    op_name: str
    source: str | None
    seconds: float
    share: float
    kind: str


@dataclasses.dataclass(frozen=True)
class TimeEstimate:
    """What a step takes on one device, in seconds.

    The step is what is computed, `compute_s` and `kernels_s`, and what is waited for, the exposed
    parts; or `memory_bound_s` if that is more.

    Attributes:
        step_s: The whole step.
        compute_s: Instructions that XLA prices.
        kernels_s: Custom kernels, of which XLA knows no cost.
        memory_bound_s: The least that moving all bytes to and from HBM takes.
        ici_s: Collectives inside a slice, hidden ones included.
        dcn_s: Collectives between slices, hidden ones included.
        host_s: Transfers to and from the host's memory, hidden ones included.
        exposed_ici_s: The part of `ici_s` that no computation hides.
        exposed_dcn_s: The part of `dcn_s` that no computation hides.
        exposed_host_s: The part of `host_s` that no computation hides.
        exposed_hbm_s: What is waited for copies between HBM and VMEM.
        flops: Operations of matrix multiplications and kernels, loops multiplied.
        hbm_bytes: Bytes to and from HBM, those from and to the host included, loops multiplied.
        top: The instructions that take longest, longest first.
        unknown_trip_counts: Loops that count once, since the program does not say how often they
            run.
        unknown_kernels: Custom kernels that count only by their bytes, since nobody says how many
            operations they run.
    """

    step_s: float
    compute_s: float
    kernels_s: float
    memory_bound_s: float
    ici_s: float
    dcn_s: float
    host_s: float
    exposed_ici_s: float
    exposed_dcn_s: float
    exposed_host_s: float
    exposed_hbm_s: float
    flops: float
    hbm_bytes: float
    top: tuple[OpTime, ...]
    unknown_trip_counts: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()


def price(module: Module, mesh: Mesh, chip: Chip) -> TimeEstimate:
    """What one step of a compiled program takes on the devices of `mesh`, which are `chip`s."""
    return estimate_from_timeline(module, chip, timeline.play(module, mesh, chip))


def estimate_from_timeline(module: Module, chip: Chip, played: timeline.Timeline) -> TimeEstimate:
    """What a step takes that was played through already."""
    events = played.events
    hbm_bytes = _total(events, lambda e: e.price.hbm_bytes if e.price else 0.0)
    # What is copied beside the computation; of a copy from or to the host, one end.
    hbm_bytes += _total(
        tuple(e for e in events if e.is_async and _network(e) in ("hbm", "host")),
        lambda e: hbm_traffic.num_bytes(module, e.instruction),
    )
    memory_bound_s = hbm_bytes / instruction_time.Rates.of(chip).hbm_bytes_per_s
    step_s = max(played.seconds, memory_bound_s)

    def sum_compute(*kinds: str) -> float:
        return _total(events, lambda e: e.price.seconds if e.price and e.price.kind in kinds else 0)

    def sum_sent(network: str) -> float:
        return _total(
            events, lambda e: e.transfer.seconds if e.transfer and _network(e) == network else 0.0
        )

    def sum_exposed(network: str) -> float:
        return _total(events, lambda e: e.exposed_s if _network(e) == network else 0.0)

    return TimeEstimate(
        step_s=step_s,
        compute_s=sum_compute("matmul", "elementwise"),
        kernels_s=sum_compute("kernel"),
        memory_bound_s=memory_bound_s,
        ici_s=sum_sent("ici"),
        dcn_s=sum_sent("dcn"),
        host_s=sum_sent("host"),
        exposed_ici_s=sum_exposed("ici"),
        exposed_dcn_s=sum_exposed("dcn"),
        exposed_host_s=sum_exposed("host"),
        exposed_hbm_s=sum_exposed("hbm"),
        flops=_total(events, lambda e: e.price.flops if e.price else 0.0),
        hbm_bytes=hbm_bytes,
        top=_top(events, step_s),
        unknown_trip_counts=module.unknown_trip_counts,
        unknown_kernels=tuple(
            dict.fromkeys(
                event.instruction.op_name or event.instruction.name
                for event in events
                if kernels.is_kernel(event.instruction)
                and kernels.flops(module, event.instruction) is None
            )
        ),
    )


def _total(events: tuple[Event, ...], each: Callable[[Event], float]) -> float:
    return sum(event.count * each(event) for event in events)


def _network(event: Event) -> str | None:
    return event.transfer.network if event.transfer else None


def _top(events: tuple[Event, ...], step_s: float) -> tuple[OpTime, ...]:
    found = []
    for event in events:
        if event.price:
            found.append((event.count * event.price.seconds, event, event.price.kind))
        if event.transfer:
            found.append((event.count * event.exposed_s, event, event.transfer.network))
    longest = sorted((part for part in found if part[0]), key=lambda part: -part[0])[:_NUM_TOP]
    return tuple(_op_time(event, seconds, step_s, kind) for seconds, event, kind in longest)


def _op_time(event: Event, seconds: float, step_s: float, kind: str) -> OpTime:
    # What starts an asynchronous collective is nobody's: the collective in it is.
    sent = event.transfer if event.transfer and event.transfer.network == kind else None
    by = sent or event.instruction
    return OpTime(event.instruction.name, by.op_name, by.source, seconds, seconds / step_s, kind)
