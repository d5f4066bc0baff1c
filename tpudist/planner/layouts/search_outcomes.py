"""The outcomes of a search, one for each candidate."""

import dataclasses
from collections.abc import Iterable

from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.plan_record import Plan
from tpudist.planner.roofline.step_estimate import StepEstimate

FITS, TOO_LARGE, FAILED, NOT_REACHED = "fits", "too large", "failed", "not reached"
"""Statuses of a candidate. A status is a plain string because `to_json` writes it."""
NOT_COMPILED = "not compiled"
"""Reason of a candidate that was not reached because of `max_compiles`."""
_SPARE = 1.1  # of the memory: the estimate may be this much too high for a candidate that fits


@dataclasses.dataclass(frozen=True)
class Remedy:
    """The smallest change that makes a candidate fit.

    Attributes:
        candidate: Name of the candidate after the change.
        changes: Settings to change, such as "remat none -> full".
    """

    candidate: str
    changes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one candidate.

    Attributes:
        candidate: The layout that was planned.
        status: "fits", "too large", "failed" or "not reached".
        plan: Plan of the candidate; None if it failed or was not reached.
        reason: Reason of a failure, or of a candidate that was not reached.
        same_as: Name of an earlier candidate with the same program; or None.
        estimate: Estimate without the compiler; None for devices without rates.
        remedy: For a candidate that is too large, the smallest change to a fitting candidate; None
            if no compiled candidate fits.
    """

    candidate: Candidate
    status: str
    plan: Plan | None = None
    reason: str = ""
    same_as: str | None = None
    remedy: Remedy | None = None
    estimate: StepEstimate | None = None

    @property
    def step_s(self) -> float | None:
        """Estimated seconds of a step; None if it does not fit, or for devices without rates."""
        return self.plan.time.step_s if self.plan and self.plan.time else None


@dataclasses.dataclass(frozen=True)
class SearchOutcomes:
    """The fields and queries of `search_result.SearchResult`, which documents them.

    It is a class of its own because `search_text` needs it, and `SearchResult` needs `search_text`
    for its output.
    """

    topology: str
    num_devices: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    time_budget_s: float

    @property
    def best(self) -> Outcome | None:
        """Fastest candidate that fits; None if no candidate fits."""
        return next(iter(self.of(FITS)), None)

    def of(self, status: str) -> tuple[Outcome, ...]:
        """Returns the outcomes with a status."""
        return tuple(x for x in self.outcomes if x.status == status)

    @property
    def estimated(self) -> tuple[Outcome, ...]:
        """Candidates that were estimated and not compiled, the most promising first."""
        found = [x for x in self.of(NOT_REACHED) if x.estimate]
        return tuple(sorted(found, key=lambda x: promise(x.candidate, x.estimate)))


def promise(candidate: Candidate, estimate: StepEstimate | None) -> tuple[int, float]:
    """Returns the place of a candidate in the order of a search: the fast and small ones first.

    Candidates without an estimate come before candidates that likely do not fit.
    """
    if estimate is None:
        return (1, 0.0)
    share = estimate.peak_bytes / estimate.capacity_bytes
    if share > _SPARE:
        return (2, share)
    return (0, estimate.step_s / (candidate.batch or 1))


def counts_tokens(fitting: Iterable[Outcome]) -> bool:
    """Returns whether the tokens of all candidates are counted; then they compare per token."""
    return all(x.plan and x.plan.tokens_per_s for x in fitting)
