"""Metrics that are a total divided by a count, as `nnx.metrics.Average`."""

import re
from collections.abc import Sequence

from tpudist.verification.comparison import SAME_FACTOR, Finding

_PART = re.compile(r"^(MetricState '(?:.*\W)?)(total|count)(\W.*)$")

ONE_NUMBER = (
    "the metric is given one number for each replica, a share of the loss of the step or a mean "
    "over the replica's own rows, and counts it as one example.",
    "Give the metric the losses of the examples (values=losses), not the loss of the step.",
)
"""Cause and remedy of a total or a count that has a factor, where the average is wrong."""


def is_part(leaf: str) -> bool:
    """Returns whether a leaf is the total or the count of a metric."""
    return _PART.match(leaf) is not None


def drop_right(found: Sequence[Finding]) -> list[Finding]:
    """Returns the findings without totals and counts that have the same factor.

    Their quotient, which is the value of the metric, is that of one device.
    """
    factors = {x.leaf: x.factor for x in found}

    def is_right(x: Finding) -> bool:
        match = _PART.match(x.leaf)
        if match is None or not x.factor:
            return False
        other = "count" if match[2] == "total" else "total"
        factor = factors.get(f"{match[1]}{other}{match[3]}")
        return factor is not None and abs(factor / x.factor - 1) < SAME_FACTOR

    return [x for x in found if not is_right(x)]
