"""Compares what replicas and one device computed: factor, tolerance, cause and remedy."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

SAFETY = 4.0
"""Largest difference that is tolerated in a large array, as a multiple of the effect of rounding.

Twice as large in an array of one element, whose rounding errors cannot average out.
"""

_MOST_BY_ROUNDING = 1e5
"""Largest difference that rounding of sums may explain, as a multiple of that of the inputs."""

SAME_FACTOR = 0.02
"""Largest relative distance of a factor from the number that explains it."""


@dataclasses.dataclass(frozen=True)
class Values:
    """One array that was computed on the replicas and on one device.

    Attributes:
        leaf: Path of the array.
        output: The number of the output of the program.
        before: The array that it replaces; None if it replaces none.
        one: The array of one device.
        disturbed: The arrays before and after the step on one device, for inputs that were changed
            as rounding would.
        many: The array of the replicas; `[num_replicas, ...]` if `differs`.
        differs: Whether the step returns one value for each replica in the place of one for all.
    """

    leaf: str
    output: int
    before: np.ndarray | None
    one: np.ndarray
    disturbed: Sequence[tuple[np.ndarray | None, np.ndarray]]
    many: np.ndarray
    differs: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference of one array.

    Attributes:
        leaf: Path of the array.
        output: The number of the output of the program.
        factor: See `Difference`.
        max_error: See `Difference`.
        tolerance: See `Difference`.
        differs: Whether the step returns one value for each replica in the place of one for all.
        is_number: Whether the array has only one element.
    """

    leaf: str
    output: int
    factor: float | None
    max_error: float
    tolerance: float
    differs: bool = False
    is_number: bool = False

    @property
    def may_be_rounding(self) -> bool:
        """Whether rounding errors in sums may explain the difference."""
        return self.max_error < _MOST_BY_ROUNDING * self.tolerance


@np.errstate(invalid="ignore")  # differences of infinities
def compare(values: Values, epsilon: float, n: int = 1) -> Finding | None:
    """Returns how an array differs; None if rounding explains it.

    Args:
        values: The array.
        epsilon: The relative rounding error of the least precise numbers that are computed.
        n: Number of replicas.
    """
    if values.differs:
        many = _floats(values.many)
        largest = _largest(many - many[:1])
        return Finding(values.leaf, values.output, None, largest, 0.0, differs=True)
    if values.one.dtype == bool or values.one.dtype.kind in "iu":
        return _compare_exactly(values)
    one, many = _floats(values.one), _floats(values.many)
    before = np.zeros_like(one) if values.before is None else _floats(values.before)
    if one.shape != many.shape:
        return Finding(values.leaf, values.output, None, math.inf, 0.0)
    # The effect of rounding is measured: the differences of the disturbed runs. `floor` is a lower
    # bound for it, for arrays that the disturbances happen not to change.
    noise = [
        (_floats(after) if old is None else _floats(after) - _floats(old)) - (one - before)
        for old, after in values.disturbed
    ]
    own = np.finfo(values.one.dtype).eps if values.one.dtype.kind == "f" else epsilon
    floor = 0.3 * own * np.abs(one) + epsilon * np.abs(one - before)
    safety = SAFETY * (1 + 1 / math.sqrt(max(one.size, 1)))
    largest_noise = max(map(_size, noise), default=0.0)
    if largest_noise > max(0.5 * _size(one - before), 10 * _size(floor)):
        # All addends cancel, and only rounding is left. A wrong sum makes it n times as large, and
        # its square n**2 times.
        safety *= n**2
    rounding = safety * max([_size(x) for x in noise] + [_size(floor)]) + 1e-30
    tolerance = safety * max(float(np.abs(x).max(initial=0)) for x in [*noise, floor])
    error = many - one
    finite = np.isfinite(one) & np.isfinite(many)
    # NaN in both, or the same infinity in both, is agreement.
    if not (finite | (np.isnan(one) & np.isnan(many)) | (one == many)).all():
        return Finding(values.leaf, values.output, None, math.inf, tolerance)
    error = np.where(finite, error, 0)
    if _size(error) <= rounding:
        return None
    # The factor compares changes, not the arrays: one step hardly moves a parameter, so a change
    # that is n times too large is invisible in the parameter itself.
    changes = np.where(finite, one - before, 0), np.where(finite, many - before, 0)
    factor = _find_factor(*changes, rounding)
    largest = _largest(error)
    return Finding(values.leaf, values.output, factor, largest, tolerance, is_number=one.size == 1)


def _find_factor(a: np.ndarray, b: np.ndarray, rounding: float) -> float | None:
    """Returns the factor between two arrays if it explains their difference."""
    factor = _factor_between(a, b)
    # It must do so up to one percent, or up to rounding.
    if factor is not None and _size(b - factor * a) > max(0.01 * _size(b), 2 * rounding):
        return None
    return factor


def _compare_exactly(values: Values) -> Finding | None:
    one, many = np.asarray(values.one), np.asarray(values.many)
    if one.shape == many.shape and (one == many).all():
        return None
    if any((np.asarray(x) != one).any() for _, x in values.disturbed):
        return None  # a choice that rounding may change, such as the class with the largest logit
    if one.shape != many.shape:
        return Finding(values.leaf, values.output, None, math.inf, 0.0)
    before = 0 if values.before is None else np.asarray(values.before, np.float64)
    a, b = np.asarray(one, np.float64) - before, np.asarray(many, np.float64) - before
    factor = _factor_between(a, b)
    # Integers: a remainder below one half is only the rounding of the factor.
    if factor is not None and np.abs(b - factor * a).max() > 0.5:
        factor = None
    largest = _largest(b - a)
    return Finding(values.leaf, values.output, factor, largest, 0.0, is_number=one.size == 1)


def _floats(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.complex128 if np.asarray(x).dtype.kind == "c" else np.float64)


def _factor_between(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns the factor by which `a` comes closest to `b`; None if `a` is zero."""
    scale = np.vdot(a, a).real
    return float(np.vdot(a, b).real / scale) if scale else None


def _size(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.ravel()))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))


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
    """Returns whether a factor is a power of the number of replicas other than one."""
    return factor is not None and any(_is_power(factor, n, power) for power, _, _ in _FACTORS)


def _is_power(factor: float, n: int, power: int) -> bool:
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
            if _is_power(factor, n, power):
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
