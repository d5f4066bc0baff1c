"""Sizes and numbers that depend on how many rows a batch has, learnt from several traces.

Each batch has a *symbol*, its number of rows. A size is a polynomial of the symbols, of degree 2 at
most (all pairs of rows). It is fitted in exact fractions: more traces are made than determine it,
so that what is no polynomial does not pass for one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Point = tuple[int, ...]
"""A number of rows for each symbol."""

_TOLERANCE = 3e-6  # float32 constants are rounded
# A number is a polynomial after one of these: as it is, its inverse, square, and so on. The second
# function undoes the first.
_FORMS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda v: v, lambda p: p),
    (lambda v: 1 / v, lambda p: 1 / p),
    (lambda v: v * v, lambda p: _numpy_of(p).sqrt(p)),
    (lambda v: 1 / (v * v), lambda p: 1 / _numpy_of(p).sqrt(p)),
    (np.exp, lambda p: _numpy_of(p).log(p)),
)


@dataclasses.dataclass(frozen=True)
class RowSize:
    """A size that depends on numbers of rows.

    Attributes:
        coefficients: Of the monomials of the symbols, in the order of `_monomials`.
        num_symbols: How many symbols there are.
    """

    coefficients: tuple[Fraction, ...]
    num_symbols: int

    def at(self, counts: Sequence[Any]) -> Any:
        """The size for these counts, which are ints or traced scalars; rounded down."""
        denominator = math.lcm(*(c.denominator for c in self.coefficients))
        total: Any = 0
        for c, powers in zip(self.coefficients, _monomials(self.num_symbols), strict=True):
            term: Any = int(c * denominator)
            if not term:
                continue
            for count, power in zip(counts, powers, strict=True):
                for _ in range(power):
                    term = term * count
            total = total + term
        return total if denominator == 1 else total // denominator

    def with_symbols(self, num_symbols: int) -> "RowSize":
        """The same size, of the first symbols alone; it depends on no others."""
        found = dict(zip(_monomials(self.num_symbols), self.coefficients, strict=True))
        padding = (0,) * (self.num_symbols - num_symbols)
        return RowSize(tuple(found[p + padding] for p in _monomials(num_symbols)), num_symbols)

    @property
    def symbols(self) -> frozenset[int]:
        """The symbols that it depends on."""
        return frozenset(
            i
            for c, powers in zip(self.coefficients, _monomials(self.num_symbols), strict=True)
            for i, power in enumerate(powers)
            if c and power
        )

    def __add__(self, other: "Dim") -> "Dim":
        theirs = other.coefficients if isinstance(other, RowSize) else (Fraction(other),)
        padded = itertools.zip_longest(self.coefficients, theirs, fillvalue=Fraction(0))
        total = tuple(a + b for a, b in padded)
        return RowSize(total, self.num_symbols) if any(total[1:]) else int(total[0])

    __radd__ = __add__

    def quotient(self, other: "Dim") -> "Dim | None":
        """The size that gives this one times `other`, if one of the two depends on no rows."""
        if isinstance(other, RowSize):
            ratios = {
                a / b for a, b in zip(self.coefficients, other.coefficients, strict=True) if b
            }
            times = ratios.pop() if len(ratios) == 1 else Fraction(0)
            same = tuple(times * c for c in other.coefficients) == self.coefficients
            return int(times) if same and times.denominator == 1 else None
        parts = tuple(c / other for c in self.coefficients)
        whole = all(c.denominator == 1 for c in parts)
        return RowSize(parts, self.num_symbols) if whole else None

    def __sub__(self, other: "Dim") -> "Dim":
        if isinstance(other, RowSize):
            negative = tuple(-c for c in other.coefficients)
            return self + RowSize(negative, self.num_symbols)
        return self + -other


Dim = int | RowSize


@dataclasses.dataclass(frozen=True)
class RowNumber:
    """A scalar that depends on numbers of rows.

    Attributes:
        compute: Gives it for the counts, traced or not.
    """

    compute: Callable[[Sequence[Any]], Any]

    def at(self, counts: Sequence[Any]) -> Any:
        """The number for these counts."""
        return self.compute(counts)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a number is where some batches have few rows.

    Attributes:
        counts: The symbols that it takes, each with its number of rows.
        value: The number then, an int, a float or a bool.
    """

    counts: tuple[tuple[int, int], ...]
    value: Any


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """A number that is another one where batches have one row or none, as `max(n, 1)` is.

    Attributes:
        general: What it is else: a value, `RowSize` or `RowNumber`.
        pieces: Where it is something else; of several the first holds.
    """

    general: Any
    pieces: tuple[Piece, ...]

    def at(self, counts: Sequence[Any]) -> Any:
        """The number for these counts, which are ints or traced scalars."""
        value = self.general
        if isinstance(value, RowSize | RowNumber):
            value = value.at(counts)
        for piece in reversed(self.pieces):
            here: Any = True
            for i, count in piece.counts:
                here = here & (counts[i] == count)
            if isinstance(here, bool):
                value = piece.value if here else value
            else:
                value = jnp.where(here, piece.value, value)
        return value


def is_rows(dim: Any) -> bool:
    """Whether a size depends on a number of rows."""
    return isinstance(dim, RowSize)


def size_at(dim: Dim, counts: Sequence[Any]) -> Any:
    """The size of a dim for these counts, which are ints or traced scalars.

    All rows but the first, of none, are none: a size is not negative.
    """
    if not isinstance(dim, RowSize):
        return dim
    size = dim.at(counts)
    if all(c >= 0 for c in dim.coefficients):
        return size
    return max(size, 0) if isinstance(size, int) else jnp.maximum(size, 0)


def symbol(i: int, num_symbols: int) -> RowSize:
    """The size that is the number of rows of symbol `i` itself."""
    wanted = tuple(int(k == i) for k in range(num_symbols))
    return RowSize(
        tuple(Fraction(int(powers == wanted)) for powers in _monomials(num_symbols)), num_symbols
    )


@functools.lru_cache(maxsize=4096)
def fit_size(values: tuple[int, ...], points: tuple[Point, ...]) -> Dim | None:
    """The size that has these values at these points; None if it is no polynomial."""
    if len(set(values)) == 1:
        return values[0]
    num_symbols = len(points[0])
    rows = _inverse(points)
    size = RowSize(
        tuple(sum((c * v for c, v in zip(row, values, strict=False)), Fraction(0)) for row in rows),
        num_symbols,
    )
    # In fractions: `at` rounds down, and a parabola through ceil(n / 2) must not pass by that.
    if all(_evaluate(size, p) == v for p, v in zip(points, values, strict=True)):
        return size
    return None


def fit_number(values: Sequence[float], points: tuple[Point, ...]) -> RowNumber | None:
    """The float that has these values at these points; None if it is of no known form."""
    if not all(map(math.isfinite, values)):
        return None
    for forward, back in _FORMS:
        with np.errstate(all="ignore"):
            coefficients = _fit(forward(np.asarray(values, np.float64)), points)
        if coefficients is not None:
            return RowNumber(functools.partial(_number_at, coefficients, back))
    for i in range(len(points[0])):  # a polynomial over one number of rows, as 1 - 1 / n
        coefficients = _fit(
            np.asarray([v * p[i] for v, p in zip(values, points, strict=True)]), points
        )
        if coefficients is not None:
            return RowNumber(functools.partial(_share_at, coefficients, i))
    return None


def _fit(seen: np.ndarray, points: tuple[Point, ...]) -> tuple[float, ...] | None:
    """The coefficients of the polynomial that has these values; None if there is none."""
    if not np.isfinite(seen).all():
        return None
    table = np.array([_powers_at(p) for p in points])
    rounded = [float(Fraction(float(v)).limit_denominator(10**6)) for v in seen]
    known = rounded if np.allclose(rounded, seen, rtol=_TOLERANCE, atol=0) else seen
    coefficients = np.array(
        [sum(float(a) * v for a, v in zip(row, known, strict=False)) for row in _inverse(points)]
    )
    if not np.allclose(table @ coefficients, seen, rtol=_TOLERANCE, atol=0):
        return None
    largest = np.abs(table * coefficients).max(axis=0)
    coefficients[largest < 1e-6 * largest.max()] = 0
    return tuple(coefficients)


def _share_at(coefficients: tuple[float, ...], i: int, counts: Sequence[Any]) -> Any:
    return _number_at(coefficients, lambda p: p / _as_number(counts[i]), counts)


def _number_at(
    coefficients: tuple[float, ...], back: Callable[[Any], Any], counts: Sequence[Any]
) -> Any:
    real = [_as_number(count) for count in counts]
    total: Any = _as_number(0)
    for c, powers in zip(coefficients, _monomials(len(real)), strict=True):
        if c:
            factors = (x for x, power in zip(real, powers, strict=True) for _ in range(power))
            total = total + functools.reduce(lambda a, b: a * b, factors, _as_number(c))
    with np.errstate(all="ignore"):  # 1 / rows, where there are none
        return back(total)


def _as_number(value: Any) -> Any:
    """A traced scalar or one of NumPy's, of JAX's default dtype."""
    return _numpy_of(value).asarray(value, jnp.result_type(float))[()]


def _numpy_of(value: Any) -> Any:
    """JAX's for what is traced; a number of the host may be asked for where no device is."""
    return jnp if isinstance(value, jax.Array) else np


def _evaluate(size: RowSize, point: Point) -> Fraction:
    return sum(
        (c * int(power) for c, power in zip(size.coefficients, _powers_at(point), strict=True)),
        Fraction(0),
    )


@functools.cache
def _monomials(num_symbols: int) -> list[tuple[int, ...]]:
    """The powers of the symbols in each monomial of degree 2 at most; the constant is the first."""
    return [p for p in itertools.product(range(3), repeat=num_symbols) if sum(p) <= 2]


def num_determining(num_symbols: int) -> int:
    """How many points determine a polynomial."""
    return len(_monomials(num_symbols))


def _powers_at(point: Point) -> list[int]:
    return [
        math.prod(x**power for x, power in zip(point, powers, strict=True))
        for powers in _monomials(len(point))
    ]


@functools.lru_cache(maxsize=256)
def _inverse(points: tuple[Point, ...]) -> list[list[Fraction]]:
    """Of the matrix of monomials at the first points, exactly, by elimination."""
    n = num_determining(len(points[0]))
    rows = [
        [*map(Fraction, _powers_at(point)), *(Fraction(int(i == j)) for j in range(n))]
        for i, point in enumerate(points[:n])
    ]
    for i in range(n):
        pivot = next(k for k in range(i, n) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(n):
            if j != i and rows[j][i]:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[n:] for row in rows]
