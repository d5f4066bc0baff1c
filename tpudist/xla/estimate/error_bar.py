"""Estimates how far the time of a step may be from its estimate, and why.

The bar has a low and a high end. Each cause below has a range, in which the time of its
instructions may be, relative to the estimate. The rules were fixed before any comparison with a
training run, from published microbenchmarks:

1. A cause is common to all its instructions, so its errors add up: the step is simulated again with
   all of them at the low end of the range, and once at the high end. Hidden time stays hidden.
2. Different causes are independent, so their errors do not add up: the ends of the bar are the
   root of the sum of their squares from the estimate, for each end.
3. A measured rate (`Calibration`) halves the range of its cause.
4. A range without any measurement is twice that of the nearest measured one.
5. No step is faster than its operations at the chip's peak, and no instruction is faster than its
   bytes at the high end of the memory's bandwidth.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from tpudist.xla.estimate import flops, instruction_time, kernels, timeline
from tpudist.xla.estimate.timeline import Event
from tpudist.xla.hardware import links
from tpudist.xla.hardware.chips import CALIBRATED, Chip
from tpudist.xla.hlo.hlo_module import Module


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of the spread of an estimate.

    Attributes:
        name: Short name, such as "matrix products".
        low_s: Seconds by which a step may be faster than its estimate.
        high_s: Seconds by which it may be slower.
    """

    name: str
    low_s: float
    high_s: float


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """The range of the time of a step, and its causes, largest first."""

    low_s: float
    high_s: float
    causes: tuple[Cause, ...]


PRODUCTS, CONVOLUTIONS, OTHERS = "matrix products", "convolutions", "other instructions"
READS = "products bound by memory"
MEMORY, START_UP, ICI = "memory bandwidth", "start-up of transfers", "ICI bandwidth"
ALL_TO_ALL, DCN, DCN_SUMS = "all-to-all", "DCN bandwidth", "sums over DCN"
HOST, GUESSED, OVERLAP = "host bandwidth", "guessed instructions", "overlap"
SLICES, BRANCHES = "the slowest slice", "branches of conditionals"
_ATTENTION, KERNELS, BLOCKS = "attention kernel", "custom kernels", "copies of blocks"
UNREAD, NO_CYCLES = "kernels that cannot be read", "computations without XLA's cycles"

RANGES: Mapping[str, tuple[float, float]] = {
    # Largest distance of a measurement from XLA's cycles at the chip's mean rate: v5e, 11 %, and
    # tpu7x, 12 % (`microbenchmarks.MATMULS`).
    PRODUCTS: (1 / 1.12, 1.12),
    # Not measured (rule 4).
    READS: (1 / 1.24, 1.24),
    CONVOLUTIONS: (1 / 1.24, 1.24),
    OTHERS: (1 / 1.24, 1.24),
    # Time of a machine program over its estimate (`instruction_time`, rule 3): Splash attention of
    # 32 heads and 8,192 positions, forward 1.30 and 1.15 (v6e, blocks of 512 and 1024), 1.00 and
    # 0.97 (v5e); backward 0.96 and 0.91 (v6e), 0.85 (v5e). Each attention kernel has its own error.
    _ATTENTION: (0.85, 1.30),
    KERNELS: (0.85, 1.30),
    # XLA's cycles over rule 6 of `instruction_time`: 80 % of 99 short programs. See `_LONG_STEP_S`.
    NO_CYCLES: (0.84, 1.15),
    # Without its grid, a kernel is estimated at 95 % of the rate of a large product, the best
    # blocks. Untuned ones take it to half of that rate.
    UNREAD: (1.0, 1.9),
    # Low: if the wait followed the clock, 1.5 GHz of v5e to 2.2 GHz of tpu7x. High: the slowest
    # measurement, 145 ms for the Flash attention of 4,096 positions with blocks of 128 on v5e, at
    # least 0.55 us per step (jax-ml/jax, issue 24633, if its heads have 64).
    BLOCKS: (1.5 / 2.2, 0.55 / 0.35),
    # 0.83 of the peak is estimated; a copy on v6e reaches 0.83 (tpu-recipes), an attention kernel
    # that reads a cache on tpu7x 0.86 (arXiv:2604.15464), and the range is 0.82 to 0.87.
    MEMORY: (0.83 / 0.87, 0.83 / 0.82),
    # 5.0 us per stage on v5e; 10.5 us for an all-reduce of 2 to 8 MiB over a tpu7x:2x2x4
    # (accelerator-microbenchmarks, issue 71).
    START_UP: (5.0e-6 / links.STAGE_S, 10.5e-6 / links.STAGE_S),
    # Measured over estimated: 0.93 (v2), 1.00 (tpu7x), 1.04 (v5p), 1.20 (v5e); see `links`.
    ICI: (0.93, 1.20),
    ALL_TO_ALL: (0.86, 1.40),
    # From the documented bandwidth to a third of it (`links.DCN_SHARE`). Sums are estimated at the
    # slow end, so they end where measurements of ICI do.
    DCN: (links.DCN_SHARE, links.DCN_SHARE / links.DCN_SUM_SHARE),
    DCN_SUMS: (links.DCN_SUM_SHARE / links.DCN_SHARE, 1.20),
    HOST: (0.86, 1.40),
    # Instructions without a rule. A factor of two each way is a guess, too.
    GUESSED: (0.5, 2.0),
}
_MOSTLY_BYTES = 0.95
"""Share of the time of an instruction from which on only the memory decides its error."""
_LONG_STEP_S, _LONG_RANGE = 0.05, (0.94, 1.08)
"""The range of `NO_CYCLES` for computations of at least 50 ms, whose errors partly cancel: 18 of 20
training steps of 0.07 to 124 s, of transformers and mixtures of experts on v4, v5e, v5p, v6e and
tpu7x. All of them are from 0.92 to 1.09. None of them mostly convolves."""
_CALIBRATED_BY = {
    PRODUCTS: "matmul_share",
    MEMORY: "hbm_efficiency",
    ICI: "ici_bytes_per_s",
    HOST: "host_bytes_per_s",
}

CONTENTION = 0.189
"""Mean slow-down of computation while collectives run (arXiv:2507.03114, on GPUs; on a
TPU they share its memory). It is the high end of `OVERLAP`: 0.189 s per hidden second of a program
that is not tuned."""
LARGEST_GAIN = 1 - 1 / 1.38
"""Largest share of a step that a tuned schedule hides: 1.38 times the throughput (Wang et al.,
Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023, TPU v4). It is the
low end of `OVERLAP`, if computation can cover that much of the waits."""
SLICE_SLOWDOWN = 0.0115
SLICE_RANGE = (0.004, 0.019)
"""Share of a step by which it waits longer for the slowest of n slices, per log(n), which is how
the largest of n random delays grows: 1 % for 12 slices of v6e, 6 % for 24, and their mean
(cloud.google.com/blog/products/compute/trillium-tpu-is-ga)."""


def slowdown_of_slices(num_slices: int) -> float:
    """Returns the share of a step by which `num_slices` slices are slower than one."""
    return SLICE_SLOWDOWN * math.log(num_slices)


def estimate(
    module: Module, chip: Chip, simulated: timeline.Timeline, memory_bound_s: float, floor_s: float
) -> ErrorBar:
    """Returns the error bar of a simulated step.

    Args:
        module: Compiled program.
        chip: Chip of the devices.
        simulated: Timeline of the step.
        memory_bound_s: Time of all bytes to and from HBM.
        floor_s: Time of all operations at the chip's peak.
    """
    spread = _Spread(module, chip, simulated, memory_bound_s)
    causes = [spread.common(name) for name in spread.names()]
    causes += [spread.overlap(), spread.slices(), spread.branches()]
    causes = [cause for cause in causes if cause.low_s > 0 or cause.high_s > 0]
    causes.sort(key=lambda cause: -(cause.low_s + cause.high_s))
    step_s = spread.step_s
    low_s = step_s - math.hypot(*(cause.low_s for cause in causes))
    high_s = step_s + math.hypot(*(cause.high_s for cause in causes))
    return ErrorBar(min(step_s, max(low_s, floor_s)), high_s, tuple(causes))


class _Spread:
    def __init__(
        self, module: Module, chip: Chip, simulated: timeline.Timeline, memory_bound_s: float
    ):
        self._chip = chip
        self._simulated = simulated
        self._memory_bound_s = memory_bound_s
        self._slices = 1 + slowdown_of_slices(simulated.num_slices)
        self.step_s = max(simulated.seconds, memory_bound_s) * self._slices
        rates = instruction_time.Rates.of(chip)
        self._bytes_per_s = rates.hbm_bytes_per_s / RANGES[MEMORY][0]
        self._compute_causes = {
            id(event): _cause_of_compute(module, rates, event)
            for event in simulated.events
            if event.price
        }
        self._rule_6 = set() if module.has_cycles else set(self._without_cycles())

    def _without_cycles(self) -> Iterator[int]:
        """Yields the events whose time is from rule 6 of `instruction_time`."""
        for event in self._simulated.events:
            cause = self._compute_causes.get(id(event))
            if cause in (PRODUCTS, CONVOLUTIONS, READS, OTHERS):
                yield id(event)

    def names(self) -> list[str]:
        """Returns the causes that the step has, each once."""
        names = list(self._compute_causes.values())
        if self._rule_6:
            names.append(NO_CYCLES)
        for event in self._simulated.events:
            if event.transfer:
                names += [_cause_of_transfer(event)] + [START_UP] * bool(event.transfer.start_up_s)
        return list(dict.fromkeys(names))

    def common(self, name: str) -> Cause:
        """Returns the effect of a cause on all its instructions at once."""
        key = _ATTENTION if name.startswith(_ATTENTION) else name
        low, high = RANGES[key]
        if name == NO_CYCLES and self._is_long():
            low, high = _LONG_RANGE
        if self._chip.sources.get(_CALIBRATED_BY.get(name, "")) == CALIBRATED:
            low, high = math.sqrt(low), math.sqrt(high)
        return Cause(
            name,
            max(0.0, self.step_s - self._step_s(name, low)),
            max(0.0, self._step_s(name, high) - self.step_s),
        )

    def _is_long(self) -> bool:
        """Returns whether the step is long and mostly without convolutions (`_LONG_RANGE`)."""
        convolutions_s = others_s = 0.0
        for event in self._simulated.events:
            if id(event) in self._rule_6:
                seconds = event.count * timeline.compute_seconds(event)
                if self._compute_causes[id(event)] == CONVOLUTIONS:
                    convolutions_s += seconds
                else:
                    others_s += seconds
        return convolutions_s + others_s >= _LONG_STEP_S and convolutions_s < others_s

    def _step_s(self, name: str, factor: float) -> float:
        """Returns the time of the step with instructions of a cause at `factor` times theirs."""

        def compute(event: Event) -> float:
            seconds = timeline.compute_seconds(event)
            has_cause = self._compute_causes[id(event)] == name
            if not (id(event) in self._rule_6 if name == NO_CYCLES else has_cause):
                return seconds
            num_bytes = event.price.hbm_bytes if event.price else 0.0
            return max(seconds * factor, min(seconds, num_bytes / self._bytes_per_s))

        def transfer(event: Event) -> float:
            assert event.transfer is not None
            start_up_s = event.transfer.start_up_s
            moving_s = event.transfer.seconds - start_up_s
            if name == START_UP:
                return start_up_s * factor + moving_s
            return start_up_s + moving_s * (factor if _cause_of_transfer(event) == name else 1.0)

        memory_bound_s = self._memory_bound_s * (factor if name == MEMORY else 1.0)
        return max(self._simulated.replay(compute, transfer), memory_bound_s) * self._slices

    def overlap(self) -> Cause:
        """Returns the effect of a schedule that hides more, or that hides at a price."""

        def per_step(seconds: Callable[[Event], float]) -> float:
            return sum(event.count * seconds(event) for event in self._simulated.events)

        compute_s = per_step(timeline.compute_seconds)
        moved_s = [event for event in self._simulated.events if _is_on_network(event)]
        exposed_s = sum(event.count * event.exposed_s for event in moved_s)
        hidden_s = sum(
            event.count * max(0.0, timeline.transfer_seconds(event) - event.exposed_s)
            for event in moved_s
            if event.is_async
        )
        hidden_s = min(hidden_s, compute_s)
        low_s = min(exposed_s, compute_s - hidden_s, LARGEST_GAIN * self.step_s)
        return Cause(OVERLAP, low_s, CONTENTION * hidden_s)

    def slices(self) -> Cause:
        """Returns the effect of faster or slower slices."""
        alone_s = self.step_s / self._slices
        low, high = (abs(x - SLICE_SLOWDOWN) * alone_s for x in SLICE_RANGE)
        logarithm = math.log(self._simulated.num_slices)
        return Cause(SLICES, low * logarithm, high * logarithm)

    def branches(self) -> Cause:
        """Returns the effect of the fastest and of the slowest branches, where one is estimated."""
        low_s = high_s = 0.0
        for conditional in self._simulated.conditionals:
            counted_s = conditional.seconds[conditional.counted]
            low_s += conditional.count * (counted_s - min(conditional.seconds))
            high_s += conditional.count * (max(conditional.seconds) - counted_s)
        return Cause(BRANCHES, min(low_s, self.step_s), high_s)


def _cause_of_compute(module: Module, rates: instruction_time.Rates, event: Event) -> str:
    price, instruction = event.price, event.instruction
    assert price is not None
    if price.guess:
        return GUESSED
    if price.hbm_bytes / rates.hbm_bytes_per_s >= _MOSTLY_BYTES * price.seconds:
        return MEMORY
    if price.kind == "kernel":
        if kernels.body(instruction) is None:
            return UNREAD
        if price.waits_for_blocks:
            return BLOCKS
        part = kernels.attention_part(instruction)
        return f"{_ATTENTION} ({part})" if part else KERNELS
    if price.kind == "matmul":
        if flops.is_convolution(module, instruction):
            return CONVOLUTIONS
        return READS if rates.is_bound_by_memory(price) else PRODUCTS
    return OTHERS


def _cause_of_transfer(event: Event) -> str:
    assert event.transfer is not None
    network, kind = event.transfer.network, event.transfer.kind
    if network == "dcn":
        return DCN_SUMS if links.dcn_share(kind) == links.DCN_SUM_SHARE else DCN
    if network == "ici":
        return ALL_TO_ALL if kind in ("all-to-all", "ragged-all-to-all") else ICI
    return HOST if network == "host" else MEMORY


def _is_on_network(event: Event) -> bool:
    return event.transfer is not None and event.transfer.network != "hbm"
