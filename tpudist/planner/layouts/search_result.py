"""The result of a search: the layouts that fit, fastest first, and remedies for the others."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tpudist.planner import json_records
from tpudist.planner.layouts.search_outcomes import (
    FAILED,
    FITS,
    NOT_REACHED,
    TOO_LARGE,
    Outcome,
    Remedy,
    SearchOutcomes,
    counts_tokens,
)

JSON_VERSION = 1


@dataclasses.dataclass(frozen=True)
class SearchResult(SearchOutcomes):
    """Result of a search: all candidates, the best first.

    Attributes:
        topology: Name of the slice, or number and kind of the devices.
        num_devices: Number of devices.
        outcomes: Outcomes by status. First the candidates that fit, fastest first: by tokens per
            second if they were counted, else by step time, else by memory. Then candidates that are
            too large, smallest excess first; then failed ones; then those not reached.
        seconds: Seconds that the search took.
        time_budget_s: Seconds that it was allowed to take.
    """

    def to_json(self) -> str:
        """Returns the result as JSON, including the plans; `from_json` reads it."""
        return json_records.dumps(self, JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "SearchResult":
        """Returns the result that `to_json` wrote.

        Raises:
            ValueError: If the text is not a result, or another version of tpudist wrote it.
        """
        return json_records.loads(cls, text, JSON_VERSION)

    def __rich__(self) -> Any:
        from tpudist.planner.layouts import search_text
        from tpudist.planner.show.terminal import TerminalReport

        return TerminalReport(search_text.describe_search(self))

    def __str__(self) -> str:
        from tpudist.planner.show.terminal import format_plain

        return format_plain(self)

    def _repr_html_(self) -> str:
        from tpudist.planner.layouts import search_text
        from tpudist.planner.show.html import format_html

        return format_html(search_text.describe_search(self))


def rank(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Returns the outcomes in the order of `SearchResult`, with remedies for those too large."""
    order = [FITS, TOO_LARGE, FAILED, NOT_REACHED]
    fitting = [x for x in outcomes if x.status == FITS]
    by_tokens = counts_tokens(fitting)
    outcomes = [
        dataclasses.replace(x, remedy=_find_remedy(x, fitting, by_tokens))
        if x.status == TOO_LARGE
        else x
        for x in outcomes
    ]
    return tuple(sorted(outcomes, key=lambda x: (order.index(x.status), *_sort_key(x, by_tokens))))


def _sort_key(outcome: Outcome, by_tokens: bool) -> tuple[float, float]:
    """Returns the order within one status, best first: by time or excess memory, then by memory."""
    if outcome.plan is None:
        return (0.0, 0.0)
    if outcome.plan.refusal is not None:
        return (float(outcome.plan.refusal.over_bytes), 0.0)
    memory = float(outcome.plan.memory.reserved_bytes) if outcome.plan.memory else math.inf
    if by_tokens:
        return (-(outcome.plan.tokens_per_s or 0.0), memory)
    return (math.inf if outcome.step_s is None else outcome.step_s, memory)


def _find_remedy(outcome: Outcome, fitting: Sequence[Outcome], by_tokens: bool) -> Remedy | None:
    # Fewest changed settings first, because each is a change of the program; then the fastest.
    options = [(outcome.candidate.changes_to(x.candidate), x) for x in fitting]
    if not options:
        return None
    changes, nearest = min(options, key=lambda pair: (len(pair[0]), _sort_key(pair[1], by_tokens)))
    return Remedy(nearest.candidate.name, changes)
