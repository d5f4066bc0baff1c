"""The probable causes of differences from one device, with their remedies.

A wrong reduction over n replicas makes values n times too large or too small, or their squares n**2
times. So a factor that is a power of n distinguishes a wrong reduction from an operation that mixes
the rows of one replica.
"""

import math
from collections.abc import Sequence

from tpudist.verification.comparison import Finding

SAME_FACTOR = 0.02
"""Largest relative distance of a factor from the number that explains it."""

NOT_REDUCED = (
    "It differs between replicas: the gradients or statistics it is computed from are not reduced.",
    "Reduce them over the replicas: all_reduce('sum', grads) if the loss is divided by the rows of "
    "all replicas (compute_average_loss), all_reduce('mean', grads) if it is a mean over the "
    "replica's own rows.",
)
"""Cause and remedy of state that differs between replicas."""

_NUMBER = (
    "a number counts only the replica's own rows, or a value is divided or multiplied by the "
    "number of replicas once too often.",
    "Count the rows of all replicas: all_reduce('sum', count). Divide by the number of replicas "
    "only a value that is summed over them.",
)

MIXED = (
    "Two values are added and then summed over the replicas, but only one of them is right after "
    "that. The other one is equal on all replicas, or a mean over the replica's own rows, and "
    "counts once for each replica.",
    "Divide a value that is equal on all replicas by the number of replicas: "
    "tpudist.scale_regularization_loss(value). Divide a loss by the rows of all replicas: "
    "tpudist.compute_average_loss(per_example_loss).",
)
"""Cause and remedy of a sum in which one addend counts once for each replica."""

_NONLINEAR = (
    "a nonlinear operation, such as clipping, normalizing or dividing by the replica's own count, "
    "comes before the reduction."
)
_LOCAL = (
    f"It differs only if replicas have different rows: {_NONLINEAR}",
    "Reduce first: all_reduce the gradients, or the sum and the count, and then clip or divide.",
)
_TAIL = (
    "It differs only on a partial batch: each replica takes a mean over its own rows, and the "
    "means count equally.",
    "Sum over rows and divide by the number of rows on all replicas: "
    "tpudist.compute_average_loss(per_example_loss), with all_reduce('sum', grads).",
)
SHARED_DRAWS = (
    "All replicas draw the same random numbers for their different rows: their keys are equal. On "
    "one device, each row has its own random numbers.",
    "Give each replica its own key: tpudist.get_replica_context().random_key(key).",
)
"""Cause and remedy of random numbers for each row, drawn with one key by all replicas."""

EQUAL_ROWS = (
    "All replicas have the same rows: each row is read once for each replica.",
    "Give each replica its own rows: strategy.experimental_distribute_dataset(dataset).",
)
"""Cause and remedy of a batch that replicas do not share."""

_UNKNOWN = (
    "It differs from one device also if all replicas have the same rows.",
    "Compare the line with a step for one device: use each replica's rows once, and reduce once.",
)


def factor_of_array(found: Finding, n: int) -> float | None:
    """Returns the factor of an array if it explains the difference; else None.

    A single number always has a factor, and a factor of one explains nothing.
    """
    factor = found.factor
    if factor is None or is_power(factor, n):
        return factor
    return None if found.is_number or abs(factor - 1) < SAME_FACTOR else factor


def factor_of_step(factors: Sequence[float | None], n: int) -> float | None:
    """Returns the factor that explains the factors of the arrays of a step; None if none does.

    Gradients that are n times too large make Adam's second moments n**2 times too large, and
    parameters nearly equal: the power of n that is closest to one explains them all.
    """
    powers = [x for x in factors if x is not None and is_power(x, n)]
    return min(powers, key=lambda x: abs(math.log(x)), default=None)


def is_power(factor: float | None, n: int) -> bool:
    """Returns whether a factor is a power of the number of replicas, from -2 to 2, but not 0."""
    return factor is not None and any(_has_power(factor, n, power) for power, _, _ in _FACTORS)


def _has_power(factor: float, n: int, power: int) -> bool:
    return abs(factor / float(n) ** power - 1) < SAME_FACTOR


def explain(comparison: str, n: int, factor: float | None, kind: str = "") -> tuple[str, str]:
    """Returns the probable cause of a difference from one device, and the remedy.

    Args:
        comparison: The comparison that found it first.
        n: Number of replicas.
        factor: The factor of the step; see `factor_of_step`.
        kind: The kind of the place at which it begins; see `Place`.
    """
    if comparison == "tail":
        return _TAIL
    times = "" if factor is None else f"{factor:.4g} times: "
    if kind == "nonlinear":
        return f"{times}{_NONLINEAR}", _LOCAL[1]
    if kind == "number":
        return f"{times}{_NUMBER[0]}", _NUMBER[1]
    if factor is not None:
        # At most one power fits: for n of at least 2 they are a factor of 2 apart, and the
        # tolerance is 2 %.
        for power, text, remedy in _FACTORS:
            if _has_power(factor, n, power):
                return f"{factor:.4g} times: {text.format(n=n)}", remedy
    if comparison == "rows":
        return _LOCAL
    if factor is not None:
        return f"{factor:.4g} times the value of one device.", _UNKNOWN[1]
    return _UNKNOWN


_FACTORS = (
    (
        1,
        "gradients of a mean over the replica's own rows, or of a value that is equal on all "
        "replicas because it was reduced before, are summed over {n} replicas; or a value is "
        "multiplied by the number of replicas.",
        "If the value is already reduced, remove one reduction: tpudist.Optimizer reduces "
        "gradients itself. Otherwise divide the loss by the rows of all replicas, "
        "tpudist.compute_average_loss(per_example_loss), or average the gradients, "
        "all_reduce('mean', grads).",
    ),
    (
        -1,
        "averaged twice: a value that is already divided by the rows of all replicas is averaged "
        "over {n} replicas.",
        "Sum it over the replicas: all_reduce('sum', grads).",
    ),
    (
        2,
        "summed twice over {n} replicas, or the square of a value that is {n} times too large.",
        "Reduce once.",
    ),
    (
        -2,
        "divided twice by {n} replicas, or the square of a value that is {n} times too small.",
        "Divide once.",
    ),
)
