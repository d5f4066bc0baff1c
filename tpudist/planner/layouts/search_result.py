"""What a search found: what fits, fastest first, and what would make fit what does not."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tpudist.planner import as_json
from tpudist.planner.layouts.search_outcomes import Outcome, Remedy, SearchOutcomes
from tpudist.planner.search_status import FAILED, FITS, NOT_REACHED, TOO_LARGE

JSON_VERSION = 1


@dataclasses.dataclass(frozen=True)
class SearchResult(SearchOutcomes):
    """All candidates of a search, the best first.

    Attributes:
        topology: The slice, or the kind of the devices.
        num_devices: How many devices it has.
        outcomes: First those that fit, the fastest first (by tokens per second if they were
            counted, else by step time, else by memory); then those that are too large, the least
            so first; then those that failed, and those that were not reached.
        seconds: How long the search took.
        time_budget_s: How long it was allowed to take.
    """

    def to_json(self) -> str:
        """All of it as JSON, plans included; `from_json` reads it back."""
        return as_json.dumps(self, JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "SearchResult":
        """The result that `to_json` wrote.

        Raises:
            ValueError: The text is none, or one of another version of tpudist.
        """
        return as_json.loads(cls, text, JSON_VERSION)

    def __rich__(self) -> Any:
        from tpudist.planner.layouts import search_text
        from tpudist.planner.show import table

        return table.lay_out(search_text.describe_search(self))

    def _repr_html_(self) -> str:
        from tpudist.planner.layouts import search_text
        from tpudist.planner.show import html

        return html.lay_out(search_text.describe_search(self))


def rank(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes as `SearchResult` has them, each too large one with its remedy."""
    order = [FITS, TOO_LARGE, FAILED, NOT_REACHED]
    fitting = [one for one in outcomes if one.status == FITS]
    counted = all(one.plan and one.plan.tokens_per_s for one in fitting)
    found = [
        dataclasses.replace(one, remedy=_remedy(one, fitting)) if one.status == TOO_LARGE else one
        for one in outcomes
    ]
    return tuple(sorted(found, key=lambda one: (order.index(one.status), *_worth(one, counted))))


def _worth(one: Outcome, counted: bool) -> tuple[float, float]:
    """Small for what is good, within one status."""
    if one.plan is None:
        return (0.0, 0.0)
    if one.plan.refusal is not None:
        return (float(one.plan.refusal.over_bytes), 0.0)
    memory = float(one.plan.memory.peak_bytes) if one.plan.memory else math.inf
    if counted:
        return (-(one.plan.tokens_per_s or 0.0), memory)
    return (math.inf if one.step_s is None else one.step_s, memory)


def _remedy(one: Outcome, fitting: Sequence[Outcome]) -> Remedy | None:
    """Of those that differ in the fewest settings, the fastest."""
    changes = [(one.candidate.changes_to(other.candidate), other) for other in fitting]
    if not changes:
        return None
    counted = all(other.plan and other.plan.tokens_per_s for other in fitting)
    least, best = min(changes, key=lambda pair: (len(pair[0]), _worth(pair[1], counted)))
    return Remedy(best.candidate.name, least)
