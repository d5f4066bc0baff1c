"""Three questions about sizes: the largest batch, the smallest slice, the cheapest run.

Every combination of a slice, a batch and a layout is estimated without the compiler. Then the
compiler confirms the best of them, one after the other, until one fits. The cheapest run needs more
compilations if a choice turns out dearer than its estimate.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tpudist.planner.layouts import candidates, first_pass
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.plan_record import Plan
from tpudist.planner.roofline.step_estimate import Estimator, StepEstimate
from tpudist.planner.show.progress import Progress, silent_progress
from tpudist.xla import topology as topologies
from tpudist.xla.hardware import slices

_log = logging.getLogger("tpudist")

MakeStep = Callable[[Candidate], Sequence[Any]]
_SPARE = 1.2  # of the memory: a choice above is not compiled
_MAX_DOUBLINGS = 20  # of the batch
_SAFE = 0.95  # of the memory: a choice below probably fits


@dataclasses.dataclass(frozen=True)
class Choice:
    """A slice, a batch and a layout.

    Attributes:
        candidate: The slice, the batch and the layout.
        num_chips: Number of chips of the slice.
        tokens_per_step: Tokens of a global batch.
        estimate: Estimate without the compiler.
        plan: Plan by the compiler; None if the choice was not compiled.
    """

    candidate: Candidate
    num_chips: int
    tokens_per_step: int
    estimate: StepEstimate
    plan: Plan | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the plan if there is one."""
        return self.plan.time.step_s if self.plan and self.plan.time else self.estimate.step_s

    @property
    def memory_share(self) -> float:
        """Estimated share of the memory."""
        return self.estimate.peak_bytes / self.estimate.capacity_bytes

    @property
    def compiled_bytes(self) -> int:
        """Memory by the compiler, also if it does not fit; 0 if it is not known."""
        if self.plan is None:
            return 0
        if self.plan.memory is not None:
            return self.plan.memory.reserved_bytes
        return self.plan.refusal.needed_bytes if self.plan.refusal else 0

    @property
    def fits(self) -> bool:
        """Whether it fits, by the plan if there is one."""
        return self.plan.fits if self.plan else self.estimate.fits

    def days(self, num_tokens: float) -> float:
        """Returns the days of a run."""
        return num_tokens / self.tokens_per_step * self.step_s / 86_400

    def chip_hours(self, num_tokens: float) -> float:
        """Returns the chip-hours of a run."""
        return 24 * self.days(num_tokens) * self.num_chips


@dataclasses.dataclass(frozen=True)
class Sizing:
    """The answer to a question about sizes.

    Attributes:
        answer: The best choice that the compiler confirmed, or that was estimated if
            `max_compiles` is 0; None if none fits.
        compiled: Choices that were compiled, in order.
        choices: The best choice of each slice and batch.
        num_estimated: Number of estimated choices.
        estimate_s: Seconds of all estimates.
        next_batch: Next larger batch that was estimated, for the largest batch; None if there is
            none, so a larger one may fit.
        num_cheaper: Number of choices that were not compiled and have a cheaper estimate.
    """

    answer: Choice | None
    compiled: tuple[Choice, ...]
    choices: tuple[Choice, ...]
    num_estimated: int
    estimate_s: float
    next_batch: int | None = None
    num_cheaper: int = 0


@dataclasses.dataclass(frozen=True)
class Sizer:
    """Estimates and compiles choices.

    Attributes:
        make_step: Same as in `planner.search`; its step has `candidate.batch` rows.
        tokens_per_row: Tokens of a row of the batch.
        geometries: Same as in `planner.search`; by default the usual geometries of each slice.
        remat: Same as in `planner.search`.
        microbatches: Same as in `planner.search`.
        max_compiles: Number of choices to compile at most.
        report: Progress callback.
    """

    make_step: MakeStep
    tokens_per_row: int
    geometries: Sequence[Mapping[str, int]] | None = None
    remat: Sequence[str] = ("none", "full")
    microbatches: Sequence[int] = (1,)
    max_compiles: int = 3
    report: Progress = silent_progress

    def largest_batch(self, topology: str) -> Sizing:
        """Returns the largest batch that fits a slice; it tries two sizes per doubling."""
        started, found = time.monotonic(), list[list[Choice]]()
        first = max(1, slices.parse(topology).num_devices // 8)
        for k in range(_MAX_DOUBLINGS):
            batches = (first * 2**k, 3 * first * 2 ** (k - 1)) if k else (first,)
            groups = [self._estimate(topology, batch) for batch in sorted(batches)]
            found += groups
            smallest = [min((x.memory_share for x in group), default=0.0) for group in groups]
            if max(smallest) > _SPARE:
                break
        sizing = self._confirm(reversed(found), started)
        tried = [x.candidate.batch or 0 for group in found for x in group]
        best = sizing.answer.candidate.batch or 0 if sizing.answer else 0
        larger = min((x for x in tried if x > best), default=None)
        return dataclasses.replace(sizing, num_estimated=len(tried), next_batch=larger)

    def smallest_slice(self, batch_of: Mapping[str, int]) -> Sizing:
        """Returns the smallest slice that fits.

        Args:
            batch_of: Global batch for each slice.
        """
        started = time.monotonic()
        ordered = sorted(batch_of, key=lambda name: slices.parse(name).num_chips)
        groups = (self._estimate(name, batch_of[name]) for name in ordered)
        return self._confirm(groups, started)

    def cheapest(
        self,
        batch_of: Mapping[str, int],
        num_tokens: float,
        days: float,
        prices: Mapping[str, float],
    ) -> Sizing:
        """Returns the cheapest way to train on `num_tokens` within `days`.

        Args:
            batch_of: Global batch for each slice.
            num_tokens: Tokens of the run.
            days: Days until its end.
            prices: Price of a chip for an hour, by generation; 1 if it is missing.
        """
        started = time.monotonic()
        groups = [self._estimate(name, batch) for name, batch in batch_of.items()]
        number = sum(map(len, groups))
        groups = [[x for x in group if x.memory_share <= _SPARE] for group in groups]

        def cost(choice: Choice) -> float:
            return cost_of(choice, num_tokens, prices)

        in_time = [x for group in groups for x in group if x.days(num_tokens) <= days]
        by_cost, compiled = sorted(in_time, key=cost), list[Choice]()
        answer = None if self.max_compiles else next((x for x in by_cost if x.fits), None)
        seconds = time.monotonic() - started
        for choice in by_cost[: self.max_compiles]:
            if answer is not None and cost(answer) <= cost(choice):
                break
            compiled.append(self._compile(choice))
            possible = [x for x in compiled if x.fits and x.days(num_tokens) <= days]
            answer = min(possible, key=cost, default=None)
        left = by_cost[len(compiled) :] if compiled else []
        cheaper = [x for x in left if answer is not None and cost(x) < cost(answer)]
        best = tuple(min(group, key=_place) for group in groups if group)
        return Sizing(answer, tuple(compiled), best, number, seconds, num_cheaper=len(cheaper))

    def follows_batch(self, batch_of: Mapping[str, int]) -> bool:
        """Returns whether the step changes with `candidate.batch`; True if it has no estimate."""
        for candidate in self._candidates(*next(iter(batch_of.items()))):
            doubled = dataclasses.replace(candidate, batch=2 * (candidate.batch or 1))
            estimator = Estimator(self.make_step, [candidate.replica_axes])
            try:
                found = estimator.estimate(candidate)
                return found is None or found != estimator.estimate(doubled)
            except Exception as error:  # the layout may not be possible
                _log.debug("no estimate of %s", candidate.name, exc_info=error)
        return True

    def find_error(self, batch_of: Mapping[str, int]) -> Exception | None:
        """Returns the first error of a layout, for steps that fail; None if there is none."""
        for topology, batch in batch_of.items():
            candidate = self._candidates(topology, batch)[0]
            try:
                Estimator(self.make_step, [candidate.replica_axes]).estimate(candidate)
            except Exception as error:
                return error
        return None

    def _candidates(self, topology: str, batch: int) -> list[Candidate]:
        devices = topologies.devices(topology)
        made = candidates.make_candidates(
            topology, devices, self.geometries, self.remat, self.microbatches
        )
        return [dataclasses.replace(x, batch=batch) for x in made]

    def _estimate(self, topology: str, batch: int) -> list[Choice]:
        made = self._candidates(topology, batch)
        deadline = time.monotonic() + 3600
        found = first_pass.estimate_all(self.make_step, made, None, self.report, deadline)
        tokens = batch * self.tokens_per_row
        chips = slices.parse(topology).num_chips
        return [Choice(candidate, chips, tokens, x) for candidate, x in found.items()]

    def _confirm(self, groups: Iterable[Sequence[Choice]], started: float) -> Sizing:
        """Compiles the fastest and the smallest choice of each group, until one fits."""
        best, compiled, answer, number, compile_s = [], [], None, 0, 0.0
        for group in groups:
            number += len(group)
            likely = sorted((x for x in group if x.memory_share <= _SPARE), key=_place)
            if not likely:
                continue
            best.append(likely[0])
            smallest = min(likely, key=lambda x: x.memory_share)
            for choice in dict.fromkeys((likely[0], smallest)):
                if answer is None and not self.max_compiles and choice.fits:
                    answer = choice
                elif answer is None and len(compiled) < self.max_compiles:
                    begun = time.monotonic()
                    compiled.append(self._compile(choice))
                    compile_s += time.monotonic() - begun
                    if compiled[-1].fits:
                        answer = compiled[-1]
            if answer is not None:
                break
        seconds = time.monotonic() - started - compile_s
        return Sizing(answer, tuple(compiled), tuple(best), number, seconds)

    def _compile(self, choice: Choice) -> Choice:
        step = self.make_step(choice.candidate)
        report = self.report
        name = f"{choice.candidate.topology}: {choice.candidate.name}"

        def report_name(activity: str, seconds: float) -> None:
            report(f"{name}: {activity}", seconds)

        plan = first_pass.plan(
            step,
            choice.candidate,
            {"progress": report_name},
            {"tokens_per_step": choice.tokens_per_step},
        )
        return dataclasses.replace(choice, plan=dataclasses.replace(plan, _source=None))


def cost_of(choice: Choice, num_tokens: float, prices: Mapping[str, float]) -> float:
    """Returns the cost of a run; without a price of its chip, the chip-hours."""
    generation = slices.parse(choice.candidate.topology or "").generation
    return choice.chip_hours(num_tokens) * prices.get(generation, 1.0)


def pareto_front(
    choices: Iterable[Choice], num_tokens: float, prices: Mapping[str, float]
) -> list[Choice]:
    """Returns the choices for which no other is both faster and cheaper, fastest first."""
    front: list[Choice] = []
    for choice in sorted(
        choices, key=lambda x: (x.days(num_tokens), cost_of(x, num_tokens, prices))
    ):
        if not front or cost_of(choice, num_tokens, prices) < cost_of(
            front[-1], num_tokens, prices
        ):
            front.append(choice)
    return front


def _place(choice: Choice) -> tuple[bool, float]:
    return choice.memory_share > _SAFE, choice.step_s / choice.tokens_per_step
