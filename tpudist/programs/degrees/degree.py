"""The degree of a value in the rows of each replica and in the number of replicas.

With twice as many rows per replica, a value of degree k in the rows becomes 2**k times as large.
With twice as many replicas, a value of degree k in the replicas becomes 2**k times as large. A
value with equal degrees depends only on the total number of rows, as on one device. If the degree
in the replicas is larger by 1, the value is too large by a factor of the number of replicas.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

ROWS_FACTOR = 3
"""Rows of the second trace, divided by the rows of the first."""

REPLICAS_FACTOR = 2
"""Replicas of the second trace, divided by the replicas of the first."""

# Degrees from -2 to 2: the square root of a sum over rows has the degree 1/2. With factors of 3
# and 2 all pairs of degrees have different growths, since no power of 3 is a power of 2. They
# differ by at least 2.6 % (3**2.5 / 2**4).
_HALVES = tuple(Fraction(i, 2) for i in range(-4, 5))
_TOLERANCE = 1e-5
_TOLERANCE_OF_16_BITS = 1e-2  # bfloat16 has errors of 0.4 %
# A long chain of products would make the walk quadratic. A correction after more factors is missed.
_MAX_FACTORS = 8


@dataclasses.dataclass(frozen=True)
class Degree:
    """The growth of a value with the rows of each replica and with the number of replicas."""

    rows: Fraction = Fraction(0)
    replicas: Fraction = Fraction(0)

    @property
    def excess(self) -> Fraction:
        """The power of the number of replicas by which the value is too large."""
        return self.replicas - self.rows

    def __add__(self, other: "Degree") -> "Degree":
        if self is NONE or other is NONE:  # nearly always
            return other if self is NONE else self
        return Degree(self.rows + other.rows, self.replicas + other.replicas)

    def __sub__(self, other: "Degree") -> "Degree":
        if other is NONE:
            return self
        return Degree(self.rows - other.rows, self.replicas - other.replicas)

    def __mul__(self, factor: Fraction | int) -> "Degree":
        return Degree(self.rows * factor, self.replicas * factor)


NONE = Degree()
OF_REPLICAS = Degree(Fraction(0), Fraction(1))

_POWERS = {
    float(ROWS_FACTOR) ** float(i) * float(REPLICAS_FACTOR) ** float(j): Degree(i, j)
    for i, j in itertools.product(_HALVES, _HALVES)
}


def degree_of_numbers(first: float, second: float, tolerance: float = _TOLERANCE) -> Degree | None:
    """Returns the degree of a number, given its values in both traces; None if it is unknown.

    Args:
        first: The value in the first trace.
        second: The value in the second trace.
        tolerance: Relative error of their quotient.
    """
    if first == second:
        return NONE
    if not first or not second or not np.isfinite(first) or not np.isfinite(second):
        return None
    ratio = second / first
    return next((x for power, x in _POWERS.items() if abs(ratio / power - 1) < tolerance), None)


class Factor(NamedTuple):
    """A number that a value was multiplied by.

    Attributes:
        number: The number; 1 / d for a division by d.
        of_rows: Whether it multiplies one number per row that is not constant: it may belong to the
            model rather than to the loss.
        divides: Whether it comes from a division.
    """

    number: float
    of_rows: bool = False
    divides: bool = False


class Value(NamedTuple):
    """The properties of one value of a replica.

    Attributes:
        degree: The degree; None if it is not known.
        is_zero: Whether it is zero, infinite or NaN, which have any degree.
        is_literal: Whether it is a number in the program.
        is_constant: Whether it is computed only from numbers in the program.
        is_equal: Whether it is equal on all replicas.
        is_global: Whether it is equal and a function of all rows, with an unknown degree.
        sources: The state inputs that it depends on, as bits.
        state_addends: The state inputs that are addends of it, as bits.
        faults: The faults that it depends on, as bits.
        number: The number, if it is computed from numbers in the program.
        factors: The numbers that it was multiplied by since its last sum over replicas.
        before_sum: The numbers that it was multiplied by before that sum.
        counted: The line that last divided by a number of rows or replicas.
        summed: The line that last summed it over replicas.
        averaged: The line of a mean over the rows of each replica that was summed over replicas.
        positions: The degree of the dim along which it counts the positions, as `iota` does.
        mixed: The line that added a replica's share and a value of all replicas; see
            `degree_walk`.
        addend: The other addend, if it is a sum of one state input and another value.
    """

    degree: Degree | None = NONE
    is_zero: bool = False
    is_literal: bool = False
    is_constant: bool = False
    is_equal: bool = True
    is_global: bool = False
    sources: int = 0
    state_addends: int = 0
    faults: int = 0
    number: float | None = None
    factors: tuple[Factor, ...] = ()
    before_sum: tuple[Factor, ...] = ()
    counted: str = ""
    summed: str = ""
    averaged: str = ""
    positions: Degree = NONE
    mixed: str = ""
    addend: "Value | None" = None

    @property
    def excess(self) -> Fraction:
        """The power of the number of replicas by which it is too large; 0 if that is unknown."""
        return Fraction(0) if self.degree is None else self.degree.excess

    @property
    def is_right(self) -> bool:
        """Whether one device with all rows certainly computes the same."""
        if not self.is_equal:
            return False
        return (
            self.is_zero or self.is_global or (self.degree is not None and not self.degree.excess)
        )

    @property
    def is_wrong(self) -> bool:
        """Whether one device with all rows certainly computes another value."""
        if not self.is_equal or self.is_zero or self.degree is None:
            return False
        return self.degree.excess != 0


UNKNOWN = Value(None, is_equal=False)


def of_literal(first: ArrayLike, second: ArrayLike) -> Value:
    """Returns the properties of a literal or constant, given its values in both traces."""
    try:
        a, b = (np.asarray(x).astype(np.float64) for x in (first, second))
    except Exception:  # random keys, and other values that are not numbers, do not grow
        return Value(is_literal=True, is_constant=True)
    if (
        not a.size
        or not (a.any() or b.any())
        or not (np.isfinite(a).all() and np.isfinite(b).all())
    ):
        return Value(is_zero=True, is_literal=True, is_constant=True)
    if a.shape == b.shape and np.array_equal(a, b):
        number = float(a.flat[0]) if (a == a.flat[0]).all() else None
        return Value(is_literal=True, is_constant=True, number=number)
    if (a == a.flat[0]).all() and (b == b.flat[0]).all():
        is_short = np.asarray(first).dtype.itemsize <= 2
        tolerance = _TOLERANCE_OF_16_BITS if is_short else _TOLERANCE
        return Value(
            degree_of_numbers(a.flat[0], b.flat[0], tolerance), is_literal=True, is_constant=True
        )
    # An array with other elements in the second trace. A mask of 0 and 1 does not grow.
    is_mask = np.isin(b, (0, 1)).all()
    return Value(NONE if is_mask else None, is_literal=True, is_constant=True)


def combine(values: Sequence[Value], degree: Degree | None, **changed: Any) -> Value:
    """Returns the properties of the result of an operation on `values`.

    Args:
        values: The operands.
        degree: Degree of the result. If it is None, the result is global if all operands are right.
        **changed: Properties that replace the combined ones.
    """
    known = {
        "sources": functools.reduce(operator.or_, (x.sources for x in values), 0),
        "faults": functools.reduce(operator.or_, (x.faults for x in values), 0),
        "counted": next((x.counted for x in values if x.counted), ""),
        "summed": next((x.summed for x in values if x.summed), ""),
        "averaged": next((x.averaged for x in values if x.averaged), ""),
        "mixed": next((x.mixed for x in values if x.mixed), ""),
        "factors": tuple(f for x in values for f in x.factors)[:_MAX_FACTORS],
        "before_sum": tuple(f for x in values for f in x.before_sum)[:_MAX_FACTORS],
        "is_equal": all(x.is_equal for x in values),
        "is_constant": bool(values) and all(x.is_constant for x in values),
        "is_global": degree is None and bool(values) and all(x.is_right for x in values),
    }
    return Value(degree, **(known | changed))


def combine_either(values: Sequence[Value], degree: Degree | None, **changed: Any) -> Value:
    """Returns the same for a sum or a choice, which has the factors that all of `values` have."""
    counted = [x for x in values if not (x.is_zero or x.is_literal)] or values
    factors = {
        "factors": _common([x.factors for x in counted]),
        "before_sum": _common([x.before_sum for x in counted]),
    }
    return combine(values, degree, **(factors | changed))


def _common(factors: Sequence[tuple[Factor, ...]]) -> tuple[Factor, ...]:
    if not all(factors):  # nearly always
        return ()
    counters = map(collections.Counter, factors)
    return tuple(functools.reduce(operator.and_, counters).elements())
