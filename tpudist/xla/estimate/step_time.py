"""Estimates how long a step of a compiled program takes on a chip, and which parts take longest.

`instruction_time` has the rules for single instructions, `links` for transfers, and `timeline` for
their overlap. The rules were fixed before any comparison with a training run, from the compiler's
own figures, the chips' documents and published microbenchmarks. A step takes at least the time to
move all its bytes to and from HBM.

XLA's `cost_analysis()` is not used: it counts the bodies of loops once, and its `optimal_seconds`
can be negative.
"""

import dataclasses
from collections.abc import Callable

from tpudist.xla.estimate import (
    error_bar,
    guesses,
    hbm_traffic,
    instruction_time,
    kernels,
    timeline,
)
from tpudist.xla.estimate.error_bar import Cause
from tpudist.xla.estimate.guesses import Guess
from tpudist.xla.estimate.timeline import Event
from tpudist.xla.hardware.chips import Chip
from tpudist.xla.hlo.hlo_module import Module

_NUM_TOP = 20  # operations in `TimeEstimate.top`
_MIN_SHARE = 1e-9  # of a step: less is the rounding error of a difference


@dataclasses.dataclass(frozen=True)
class OpTime:
    """The time per step of all instructions of one kind and source line.

    Attributes:
        name: Name of the longest instruction in the program.
        op_name: Path of the JAX operation.
        source: The user's line "file:line"; None if the compiler added the instruction.
        seconds: Seconds per step, including trip counts of loops; for a transfer, only exposed
            time.
        share: Share of the step, 0 to 1.
        kind: "matmul", "kernel", "elementwise", "ici", "dcn", "host" for copies to the host's
            memory and callbacks, or "hbm" for a copy between HBM and VMEM for which other
            instructions wait.
    """

    name: str
    op_name: str
    source: str | None
    seconds: float
    share: float
    kind: str


@dataclasses.dataclass(frozen=True)
class TimeEstimate:
    """Estimated seconds of a step on one device.

    A step takes `compute_s + kernels_s` and the four `exposed_*_s`, but at least `memory_bound_s`;
    to this, several slices add `slow_slices_s`.

    Attributes:
        step_s: Complete step.
        compute_s: Instructions for which XLA has an estimate.
        kernels_s: Custom kernels, for which XLA has none.
        memory_bound_s: Lower bound: the time to move all bytes to and from HBM.
        ici_s: Collectives inside a slice, including hidden ones.
        dcn_s: Collectives between slices, including hidden ones.
        host_s: Transfers to and from the host's memory, including hidden ones, and callbacks.
        exposed_ici_s: Part of `ici_s` that no computation hides.
        exposed_dcn_s: Part of `dcn_s` that no computation hides.
        exposed_host_s: Part of `host_s` that no computation hides.
        exposed_hbm_s: Waits for copies between HBM and VMEM.
        flops: Operations of matrix multiplications and kernels, including trip counts.
        hbm_bytes: Bytes to and from HBM, including transfers with the host, and trip counts.
        top: Operations that take longest, longest first.
        peak_bound_s: Lower bound: the time of `flops` at the chip's peak for their numbers.
        unknown_trip_counts: Loops that count once because their trip count is unknown.
        unknown_kernels: Custom kernels that count only by their bytes because the number of their
            operations is unknown.
        low_s: Low end of the error bar of `step_s`; None in plans of older versions.
        high_s: High end.
        causes: Causes of the error bar, largest first; see `error_bar`.
        guessed_s: Part of `step_s` that no rule prices, or in loops of unknown length.
        slow_slices_s: Part of `step_s` in which the slices wait for the slowest of them.
        guessed: Guessed parts, longest first, and conditionals with their branches.
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
    peak_bound_s: float = 0.0
    unknown_trip_counts: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()
    low_s: float | None = None
    high_s: float | None = None
    causes: tuple[Cause, ...] = ()
    guessed_s: float = 0.0
    slow_slices_s: float = 0.0
    guessed: tuple[Guess, ...] = ()


def estimate(module: Module, chip: Chip, simulated: timeline.Timeline) -> TimeEstimate:
    """Estimates the step of a compiled program from its timeline."""
    events = simulated.events
    hbm_bytes = _per_step(events, lambda e: _hbm_bytes(module, e))
    # Asynchronous copies have no price. A copy from or to the host has only one end in HBM.
    hbm_bytes += _per_step(
        tuple(e for e in events if e.is_async and _network(e) in ("hbm", "host")),
        lambda e: hbm_traffic.num_bytes(module, e.instruction),
    )
    memory_bound_s = hbm_bytes / instruction_time.Rates.of(chip).hbm_bytes_per_s
    one_slice_s = max(simulated.seconds, memory_bound_s)
    slow_slices_s = error_bar.slowdown_of_slices(simulated.num_slices) * one_slice_s
    step_s = one_slice_s + slow_slices_s
    peak_bound_s = _per_step(events, lambda e: e.price.peak_s if e.price else 0.0)
    bar = error_bar.estimate(module, chip, simulated, memory_bound_s, peak_bound_s)

    def sum_compute(*kinds: str) -> float:
        return _per_step(
            events, lambda e: e.price.seconds if e.price and e.price.kind in kinds else 0.0
        )

    def sum_transfers(network: str) -> float:
        return _per_step(
            events, lambda e: e.transfer.seconds if e.transfer and _network(e) == network else 0.0
        )

    def sum_exposed(network: str) -> float:
        return _per_step(events, lambda e: e.exposed_s if _network(e) == network else 0.0)

    return TimeEstimate(
        step_s=step_s,
        compute_s=sum_compute("matmul", "elementwise"),
        kernels_s=sum_compute("kernel"),
        memory_bound_s=memory_bound_s,
        ici_s=sum_transfers("ici"),
        dcn_s=sum_transfers("dcn"),
        host_s=sum_transfers("host") + sum_compute("host"),
        exposed_ici_s=sum_exposed("ici"),
        exposed_dcn_s=sum_exposed("dcn"),
        exposed_host_s=sum_exposed("host") + sum_compute("host"),
        exposed_hbm_s=sum_exposed("hbm"),
        flops=_per_step(events, lambda e: e.price.flops if e.price else 0.0),
        peak_bound_s=peak_bound_s,
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
        low_s=bar.low_s,
        high_s=bar.high_s,
        causes=bar.causes,
        guessed_s=min(step_s, guesses.sum_seconds(module, simulated)),
        guessed=guesses.list_guesses(module, simulated),
        slow_slices_s=slow_slices_s,
    )


def _per_step(events: tuple[Event, ...], each: Callable[[Event], float]) -> float:
    """Returns the sum over all runs of a figure of each run."""
    return sum(event.count * each(event) for event in events)


def _hbm_bytes(module: Module, event: Event) -> float:
    """Returns the bytes through HBM of a run of an instruction, or of the ends of a collective."""
    computed = event.price.hbm_bytes if event.price else 0.0
    is_fusion = event.instruction.opcode == "fusion"
    if _network(event) not in ("ici", "dcn") or (event.is_async and is_fusion):
        return computed
    return max(computed, hbm_traffic.collective_bytes(module, event.instruction))


def _network(event: Event) -> str | None:
    return event.transfer.network if event.transfer else None


def _top(events: tuple[Event, ...], step_s: float) -> tuple[OpTime, ...]:
    """Returns the longest operations, where instructions of one kind and line are one operation."""
    parts: dict[tuple[str, str], list[OpTime]] = {}
    for event in events:
        times = []
        if event.price:
            times.append((event.count * event.price.seconds, event.price.kind))
        if event.transfer:
            times.append((event.count * event.exposed_s, event.transfer.network))
        for seconds, kind in times:
            if seconds > _MIN_SHARE * step_s:
                part = _op_time(event, seconds, step_s, kind)
                place = part.source or part.op_name or part.name
                parts.setdefault((kind, place), []).append(part)
    merged = map(_merge, parts.values())
    return tuple(sorted(merged, key=lambda part: -part.seconds)[:_NUM_TOP])


def _merge(parts: list[OpTime]) -> OpTime:
    """Returns one operation for all `parts`, under the name of the longest."""
    longest = max(parts, key=lambda part: part.seconds)
    seconds = sum(part.seconds for part in parts)
    share = sum(part.share for part in parts)
    return dataclasses.replace(longest, seconds=seconds, share=share)


def _op_time(event: Event, seconds: float, step_s: float, kind: str) -> OpTime:
    # The instruction that starts an asynchronous collective has no source line; the transfer has.
    transfer = event.transfer if event.transfer and event.transfer.network == kind else None
    origin = transfer or event.instruction
    share = seconds / step_s
    return OpTime(event.instruction.name, origin.op_name, origin.source, seconds, share, kind)
