"""Compares an array of the replicas with the same array of one device.

The problem is to tell a mistake from rounding, which is also amplified: by a small divisor, or by a
sum whose addends cancel. So the effect of rounding is measured. One device repeats the step with
inputs that are changed as rounding would change them, and the differences of these *disturbed* runs
are the tolerance.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Largest difference that is tolerated in a large array, as a multiple of the effect of rounding. It
# is twice as large in an array of one element, whose rounding errors cannot average out.
_SAFETY = 4.0
# Rounding to a stored number changes it by up to half a unit, and by the root mean square of 0.29.
_STORAGE_ROUNDING = 0.3
# The addends of a change cancel if rounding is more than half of it, and 10 times the usual size.
_CANCELLED_SHARE = 0.5
_CANCELLED_GROWTH = 10
_LEAST = 1e-30  # of a tolerance: arrays of zeros differ by nothing
# Largest share of an array that a factor may leave unexplained.
_UNEXPLAINED = 0.01
# Differences that are more tolerances than this are too large for rounding errors in sums.
_MOST_BY_ROUNDING = 1e5


@dataclasses.dataclass(frozen=True)
class Pair:
    """One array that was computed on the replicas and on one device.

    Attributes:
        leaf: Path of the array.
        output: The number of the output of the program.
        before: The array that it replaces; None if it replaces none.
        one: The array of one device.
        disturbed: The arrays before and after the step on one device, for inputs that were changed
            as rounding would.
        many: The array of the replicas; `[num_replicas, ...]` if `is_per_replica`.
        is_per_replica: Whether the step returns one value for each replica in the place of one for
            all.
    """

    leaf: str
    output: int
    before: np.ndarray | None
    one: np.ndarray
    disturbed: Sequence[tuple[np.ndarray | None, np.ndarray]]
    many: np.ndarray
    is_per_replica: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference of one array.

    Attributes:
        leaf: Path of the array.
        output: The number of the output of the program.
        factor: See `Difference`.
        max_error: See `Difference`.
        tolerance: See `Difference`.
        is_per_replica: See `Pair`.
        is_number: Whether the array has only one element.
    """

    leaf: str
    output: int
    factor: float | None
    max_error: float
    tolerance: float
    is_per_replica: bool = False
    is_number: bool = False

    @property
    def may_be_rounding(self) -> bool:
        """Whether rounding errors in sums may explain the difference."""
        return self.max_error < _MOST_BY_ROUNDING * self.tolerance


@np.errstate(invalid="ignore")  # differences of infinities
def compare(pair: Pair, epsilon: float, n: int = 1) -> Finding | None:
    """Returns how an array differs; None if rounding explains it.

    Args:
        pair: The array.
        epsilon: The relative rounding error of the least precise numbers that are computed.
        n: Number of replicas that reduce the array. Default: 1, for a program over all rows.
    """
    if pair.is_per_replica:
        many = _floats(pair.many)
        largest = _max_abs(many - many[:1])
        return Finding(pair.leaf, pair.output, None, largest, 0.0, is_per_replica=True)
    if pair.one.dtype == bool or pair.one.dtype.kind in "iu":
        return _compare_exactly(pair)
    one, many = _floats(pair.one), _floats(pair.many)
    before = np.zeros_like(one) if pair.before is None else _floats(pair.before)
    if one.shape != many.shape:
        return Finding(pair.leaf, pair.output, None, math.inf, 0.0)
    rounding, tolerance = _measure_rounding(pair, epsilon, n)
    finite = np.isfinite(one) & np.isfinite(many)
    # NaN in both, or the same infinity in both, is agreement.
    if not (finite | (np.isnan(one) & np.isnan(many)) | (one == many)).all():
        return Finding(pair.leaf, pair.output, None, math.inf, tolerance)
    error = np.where(finite, many - one, 0)
    # The norm decides. The largest element and its tolerance are for the report.
    if _norm(error) <= rounding:
        return None
    # The factor compares changes, not the arrays: one step hardly moves a parameter, so a change
    # that is n times too large is invisible in the parameter itself.
    changes = np.where(finite, one - before, 0), np.where(finite, many - before, 0)
    factor = _find_factor(*changes, rounding)
    largest = _max_abs(error)
    return Finding(pair.leaf, pair.output, factor, largest, tolerance, is_number=one.size == 1)


def _measure_rounding(pair: Pair, epsilon: float, n: int) -> tuple[float, float]:
    """Returns the largest norm of a difference that rounding explains, and its largest element."""
    one = _floats(pair.one)
    change = one if pair.before is None else one - _floats(pair.before)
    noise = [
        (_floats(after) if old is None else _floats(after) - _floats(old)) - change
        for old, after in pair.disturbed
    ]
    # A lower bound, for arrays that the disturbances happen not to change.
    unit = np.finfo(pair.one.dtype).eps if pair.one.dtype.kind == "f" else epsilon
    floor = _STORAGE_ROUNDING * unit * np.abs(one) + epsilon * np.abs(change)
    safety = _SAFETY * (1 + 1 / math.sqrt(max(one.size, 1)))
    largest_noise = max(map(_norm, noise), default=0.0)
    if largest_noise > max(_CANCELLED_SHARE * _norm(change), _CANCELLED_GROWTH * _norm(floor)):
        # All addends cancel, and only rounding is left. A wrong sum would make the rounding n times
        # as large, and its square n**2 times: a difference of that size says nothing.
        safety *= n**2
    effects = [*noise, floor]
    return safety * max(map(_norm, effects)) + _LEAST, safety * max(map(_max_abs, effects))


def _find_factor(a: np.ndarray, b: np.ndarray, rounding: float) -> float | None:
    """Returns the factor between two arrays if it explains their difference."""
    factor = _factor_between(a, b)
    # `a` and `b` both have rounding errors.
    tolerance = max(_UNEXPLAINED * _norm(b), 2 * rounding)
    if factor is not None and _norm(b - factor * a) > tolerance:
        return None
    return factor


def _compare_exactly(pair: Pair) -> Finding | None:
    one, many = np.asarray(pair.one), np.asarray(pair.many)
    if one.shape == many.shape and (one == many).all():
        return None
    if any((np.asarray(x) != one).any() for _, x in pair.disturbed):
        return None  # a choice that rounding may change, such as the class with the largest logit
    if one.shape != many.shape:
        return Finding(pair.leaf, pair.output, None, math.inf, 0.0)
    before = 0 if pair.before is None else np.asarray(pair.before, np.float64)
    a, b = np.asarray(one, np.float64) - before, np.asarray(many, np.float64) - before
    factor = _factor_between(a, b)
    # Integers: a remainder below one half is only the rounding of the factor.
    if factor is not None and np.abs(b - factor * a).max() > 0.5:
        factor = None
    largest = _max_abs(b - a)
    return Finding(pair.leaf, pair.output, factor, largest, 0.0, is_number=one.size == 1)


def _floats(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.complex128 if np.asarray(x).dtype.kind == "c" else np.float64)


def _factor_between(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns the factor by which `a` comes closest to `b`; None if `a` is zero."""
    scale = np.vdot(a, a).real
    return float(np.vdot(a, b).real / scale) if scale else None


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.ravel()))


def _max_abs(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))
