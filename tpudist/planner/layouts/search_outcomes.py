"""The outcomes of a search, one for each candidate."""

import dataclasses

from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.plan import Plan
from tpudist.planner.search_status import FITS


@dataclasses.dataclass(frozen=True)
class Remedy:
    """The smallest change that makes a candidate fit.

    Attributes:
        candidate: The name of the one that it becomes.
        changes: What to change, as "remat none -> full".
    """

    candidate: str
    changes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is known of one candidate.

    Attributes:
        candidate: Which one.
        status: "fits", "too large", "failed" or "not reached".
        plan: What the compiler said; None if it failed or was not reached.
        reason: Why it failed or was not reached.
        same_as: The name of an earlier one that makes the very same program; or None.
        remedy: For one that is too large: the smallest change with which it fits, among all that
            were compiled; None if there is none.
    """

    candidate: Candidate
    status: str
    plan: Plan | None = None
    reason: str = ""
    same_as: str | None = None
    remedy: Remedy | None = None

    @property
    def step_s(self) -> float | None:
        """Its predicted time per step; None if it does not fit, or on devices without a price."""
        return self.plan.time.step_s if self.plan and self.plan.time else None


@dataclasses.dataclass(frozen=True)
class SearchOutcomes:
    """The outcomes of a search; `search_result.SearchResult` documents the fields."""

    topology: str
    num_devices: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    time_budget_s: float

    @property
    def best(self) -> Outcome | None:
        """The fastest one that fits; None if none does."""
        return next(iter(self.of(FITS)), None)

    def of(self, status: str) -> tuple[Outcome, ...]:
        """Those of one status."""
        return tuple(one for one in self.outcomes if one.status == status)
