"""The degree of a value in the rows of each replica and in the number of replicas.

Give each replica twice as many rows: a value of degree k in the rows becomes 2**k times as large.
Use twice as many replicas: a value of degree k in the replicas becomes 2**k times as large. A value
for which both degrees are equal depends only on the number of rows in all. If the degree in the
replicas is larger by one, the value is as many times too large as there are replicas.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

ROWS_FACTOR = 3
"""Rows of the second trace, divided by the rows of the first."""

REPLICAS_FACTOR = 2
"""Replicas of the second trace, divided by the replicas of the first."""

_HALVES = tuple(Fraction(i, 2) for i in range(-4, 5))
_MOST_FACTORS = 8


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
        return Degree(self.rows + other.rows, self.replicas + other.replicas)

    def __sub__(self, other: "Degree") -> "Degree":
        return Degree(self.rows - other.rows, self.replicas - other.replicas)

    def __mul__(self, factor: Fraction | int) -> "Degree":
        return Degree(self.rows * factor, self.replicas * factor)


NONE = Degree()
OF_REPLICAS = Degree(Fraction(0), Fraction(1))

_POWERS = {
    float(ROWS_FACTOR) ** float(i) * float(REPLICAS_FACTOR) ** float(j): Degree(i, j)
    for i, j in itertools.product(_HALVES, _HALVES)
}


def degree_of_numbers(first: float, second: float, tolerance: float = 1e-5) -> Degree | None:
    """Returns the degree of a number that differs between the two traces; None if unknown."""
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


@dataclasses.dataclass(frozen=True)
class Value:
    """The properties of one value of a replica.

    Attributes:
        degree: The degree; None if it is not known.
        is_zero: Whether it is zero, infinite or NaN, and so of any degree.
        is_literal: Whether it is a number in the program.
        is_constant: Whether it is computed only from numbers in the program.
        is_equal: Whether it is equal on all replicas.
        is_global: Whether it is equal and a function of all rows, whose degree is not known.
        sources: The state inputs that it depends on, as bits.
        carries: The state inputs that it is a sum of, with other addends, as bits.
        faults: The faults that it depends on, as bits.
        number: The value, if it is computed from numbers in the program.
        factors: The numbers that it was multiplied by, since it was last summed over replicas.
        before_sum: The same, before that sum.
        counted: The line at which rows or replicas were divided by, last.
        summed: The line at which it was summed over replicas, last.
        averaged: The line of a mean over the rows of each replica that was summed over replicas.
        positions: The degree of the dim along which it is the position, `iota`.
        mixed: The line at which a part for each replica and a value of all were added; see
            `degree_walk`.
        addend: The value that was added to it, if it is a sum of state and of one other value.
    """

    degree: Degree | None = NONE
    is_zero: bool = False
    is_literal: bool = False
    is_constant: bool = False
    is_equal: bool = True
    is_global: bool = False
    sources: int = 0
    carries: int = 0
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
    def is_right(self) -> bool:
        """Whether it is known to be the same on one device with all rows."""
        if not self.is_equal:
            return False
        return (
            self.is_zero or self.is_global or (self.degree is not None and not self.degree.excess)
        )

    @property
    def is_wrong(self) -> bool:
        """Whether it is known to be another one on one device with all rows."""
        if not self.is_equal or self.is_zero or self.degree is None:
            return False
        return self.degree.excess != 0


UNKNOWN = Value(None, is_equal=False)


def of_literal(first: Any, second: Any) -> Value:
    """Returns the properties of a number in the program, or of a constant."""
    try:
        a, b = (np.asarray(x).astype(np.float64) for x in (first, second))
    except Exception:  # random keys, and other values that are not numbers
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
        tolerance = 1e-5 if np.asarray(first).dtype.itemsize > 2 else 1e-2
        return Value(
            degree_of_numbers(a.flat[0], b.flat[0], tolerance), is_literal=True, is_constant=True
        )
    is_mask = np.isin(b, (0, 1)).all()
    return Value(NONE if is_mask else None, is_literal=True, is_constant=True)


def combine(values: Sequence[Value], degree: Degree | None, **changed: Any) -> Value:
    """The result of an operation on `values`, of this degree.

    If the degree is unknown, and all the values are right and equal, the result is a function of
    all rows.
    """
    sources = faults = 0
    for x in values:
        sources |= x.sources
        faults |= x.faults
    known: dict[str, Any] = {
        name: next((getattr(x, name) for x in values if getattr(x, name)), "")
        for name in ("counted", "summed", "averaged", "mixed")
    }
    for name in ("factors", "before_sum"):
        known[name] = tuple(f for x in values for f in getattr(x, name))[:_MOST_FACTORS]
    known["is_equal"] = all(x.is_equal for x in values)
    known["is_constant"] = bool(values) and all(x.is_constant for x in values)
    known["is_global"] = degree is None and bool(values) and all(x.is_right for x in values)
    return Value(degree, sources=sources, faults=faults, **(known | changed))


def combine_either(values: Sequence[Value], degree: Degree | None, **changed: Any) -> Value:
    """The same for a sum or a choice: it has the factors that all of `values` have."""
    counted = [x for x in values if not (x.is_zero or x.is_literal)] or values

    def common(name: str) -> tuple[Factor, ...]:
        found = collections.Counter(getattr(counted[0], name))
        for x in counted[1:]:
            found &= collections.Counter(getattr(x, name))
        return tuple(found.elements())

    factors = {"factors": common("factors"), "before_sum": common("before_sum")}
    return combine(values, degree, **(factors | changed))
