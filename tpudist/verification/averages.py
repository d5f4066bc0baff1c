"""Averages of NNX, which are a total divided by a count."""

from collections.abc import Collection, Sequence

from tpudist.verification.causes import SAME_FACTOR
from tpudist.verification.comparison import Finding

ONE_NUMBER = (
    "the metric receives one number for each replica, a share of the loss of the step or a mean "
    "over the replica's own rows, and counts it as one example.",
    "Pass the losses of the examples to the metric (values=losses), not the loss of the step.",
)
"""Cause and remedy of a total or a count with a factor, if the average is wrong."""

# The parts of the state of `nnx.metrics.Average`.
_OTHER_PART = {"total": "count", "count": "total"}


def drop_equal_quotients(found: Sequence[Finding], averages: Collection[str]) -> list[Finding]:
    """Returns the findings without totals and counts that have the same factor.

    Their quotient, the value of the average, is the same as on one device.

    Args:
        found: The findings.
        averages: Names of the totals and counts of averages.
    """
    factors = {x.leaf: x.factor for x in found if x.leaf in averages}

    def is_right(leaf: str) -> bool:
        factor = factors.get(leaf)
        for part, other in _OTHER_PART.items():
            # A leaf without the part gets a name that no leaf has.
            head, _, tail = leaf.rpartition(part)
            known = factors.get(f"{head}{other}{tail}")
            if factor and known and abs(known / factor - 1) < SAME_FACTOR:
                return True
        return False

    return [x for x in found if not is_right(x.leaf)]
