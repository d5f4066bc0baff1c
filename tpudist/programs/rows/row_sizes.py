"""Sizes and numbers that depend on the number of rows of a batch, fitted over several traces.

Each batch has a *symbol*, its number of rows. A size is a polynomial of the symbols with a degree
of at most 2 (all pairs of rows). `row_program` makes more traces than determine the polynomial, so
a size with another formula, such as ceil(n / 2), is rejected.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

Point = tuple[int, ...]
"""A number of rows for each symbol."""
Count = int | jax.Array
"""A number of rows: an int, or a traced scalar."""
Scalar = float | np.ndarray | np.generic | jax.Array

TOLERANCE = 3e-6
"""Largest relative difference of equal numbers.

A float32 constant has an error of up to 6e-8, and a user's formula rounds several times. Constants
of bfloat16 have larger errors: a formula fits them only if they are exact, as small integers are.
"""
_ROUNDING = 2.5e-7  # relative error of a float32 constant after `_FORMS`, which about triple it
_NEGLIGIBLE = 1e-6  # below `TOLERANCE`: a term that is dropped must not change the number
# Forms of a number: one of these functions makes it a polynomial, and the second one undoes the
# first. They are what users write: n, 1 / n, sqrt(n), 1 / sqrt(n), log(n), and their negatives. A
# square has two roots, so `fit_number` accepts a form only if it returns the values.
_FORMS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda v: v, lambda p: p),
    (lambda v: 1 / v, lambda p: 1 / p),
    (lambda v: v * v, lambda p: _numpy_of(p).sqrt(p)),
    (lambda v: v * v, lambda p: -_numpy_of(p).sqrt(p)),
    (lambda v: 1 / (v * v), lambda p: 1 / _numpy_of(p).sqrt(p)),
    (lambda v: 1 / (v * v), lambda p: -1 / _numpy_of(p).sqrt(p)),
    (np.exp, lambda p: _numpy_of(p).log(p)),
    (lambda v: np.exp(-v), lambda p: -_numpy_of(p).log(p)),
)


@dataclasses.dataclass(frozen=True)
class RowSize:
    """A size, or an integer in the program, that depends on numbers of rows: a polynomial.

    Attributes:
        coefficients: Coefficients of the monomials, in the order of `_monomials`.
        num_symbols: Number of symbols of the program.
    """

    coefficients: tuple[Fraction, ...]
    num_symbols: int

    def at(self, counts: Sequence[Count]) -> Any:
        """Returns the value for these counts, rounded down.

        Unlike `size_at` it may be negative, as the integer `x.shape[0] - 5` is.
        """
        # In integers: n (n - 1) / 2 must be exact, also for a traced int32. The numerator must fit
        # into it, too.
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
        """Returns the size for a program with only the first `num_symbols` symbols.

        The size must not depend on the others.
        """
        assert max(self.symbols, default=0) < num_symbols, self
        coefficients = dict(zip(_monomials(self.num_symbols), self.coefficients, strict=True))
        padding = (0,) * (self.num_symbols - num_symbols)
        kept = tuple(coefficients[p + padding] for p in _monomials(num_symbols))
        return RowSize(kept, num_symbols)

    @property
    def symbols(self) -> frozenset[int]:
        """The symbols that the size depends on."""
        return frozenset(
            i
            for c, powers in zip(self.coefficients, _monomials(self.num_symbols), strict=True)
            for i, power in enumerate(powers)
            if c and power
        )

    def __add__(self, other: "Dim") -> "Dim":
        addends = other.coefficients if isinstance(other, RowSize) else (Fraction(other),)
        padded = itertools.zip_longest(self.coefficients, addends, fillvalue=Fraction(0))
        total = tuple(a + b for a, b in padded)
        return RowSize(total, self.num_symbols) if any(total[1:]) else int(total[0])

    __radd__ = __add__

    def quotient(self, other: "Dim") -> "Dim | None":
        """Returns the size `self / other`; None if it has remainders, or is a ratio of two sizes.

        At least one of `other` and the result is a fixed number.
        """
        if isinstance(other, RowSize):
            # All coefficients must have one ratio.
            ratios = {
                a / b for a, b in zip(self.coefficients, other.coefficients, strict=True) if b
            }
            ratio = ratios.pop() if len(ratios) == 1 else Fraction(0)
            is_multiple = tuple(ratio * c for c in other.coefficients) == self.coefficients
            return int(ratio) if is_multiple and ratio.denominator == 1 else None
        parts = tuple(c / other for c in self.coefficients)
        is_whole = all(c.denominator == 1 for c in parts)
        return RowSize(parts, self.num_symbols) if is_whole else None

    def __sub__(self, other: "Dim") -> "Dim":
        if isinstance(other, RowSize):
            negative = tuple(-c for c in other.coefficients)
            return self + RowSize(negative, self.num_symbols)
        return self + -other


Dim = int | RowSize


@dataclasses.dataclass(frozen=True)
class RowNumber:
    """A float that depends on numbers of rows.

    Attributes:
        compute: Called with the counts; returns the number.
    """

    compute: Callable[[Sequence[Count]], Any]

    def at(self, counts: Sequence[Count]) -> Any:
        """Returns the number for these counts."""
        return self.compute(counts)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The value of a number for small counts.

    Attributes:
        counts: Pairs of a symbol and its number of rows, which must all hold.
        value: The number, an int, a float or a bool.
    """

    counts: tuple[tuple[int, int], ...]
    value: int | float | bool


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """A number with another formula for batches of one row or none, such as `max(n, 1)`.

    Attributes:
        general: The number for all other counts: a value, `RowSize` or `RowNumber`.
        pieces: The exceptions. If several apply, the first one wins.
    """

    general: Any
    pieces: tuple[Piece, ...]

    def at(self, counts: Sequence[Count]) -> Any:
        """Returns the number for these counts."""
        value = self.general
        if isinstance(value, RowSize | RowNumber):
            value = value.at(counts)
        for piece in reversed(self.pieces):
            holds: Any = True
            for i, count in piece.counts:
                holds = holds & (counts[i] == count)
            if isinstance(holds, bool):
                value = piece.value if holds else value
            else:
                value = jnp.where(holds, piece.value, value)
        return value


def is_rows(dim: object) -> TypeGuard[RowSize]:
    """Returns whether a size depends on a number of rows."""
    return isinstance(dim, RowSize)


def size_at(dim: Dim, counts: Sequence[Count]) -> Any:
    """Returns the size of a dim for these counts; never negative, unlike `RowSize.at`."""
    if not isinstance(dim, RowSize):
        return dim
    size = dim.at(counts)
    if all(c >= 0 for c in dim.coefficients):
        return size
    # `x[1:]` of no rows has no rows, not -1.
    return max(size, 0) if isinstance(size, int) else jnp.maximum(size, 0)


def symbol(i: int, num_symbols: int) -> RowSize:
    """Returns the size that equals the number of rows of symbol `i`."""
    own_powers = tuple(int(k == i) for k in range(num_symbols))
    coefficients = (Fraction(int(powers == own_powers)) for powers in _monomials(num_symbols))
    return RowSize(tuple(coefficients), num_symbols)


@functools.lru_cache(maxsize=4096)
def fit_size(values: tuple[int, ...], points: tuple[Point, ...]) -> Dim | None:
    """Returns the size with these values at these points; None if it is not a polynomial."""
    if len(set(values)) == 1:
        return values[0]
    if are_two(points):
        return _fit_multiple(values, points)
    # The first points determine the coefficients. The others only confirm them.
    coefficients = tuple(
        sum((c * v for c, v in zip(row, values, strict=False)), Fraction(0))
        for row in _inverse(points)
    )
    size = RowSize(coefficients, len(points[0]))
    # In fractions: `at` rounds down, and would accept a parabola through ceil(n / 2).
    if all(_exact_value_at(size, p) == v for p, v in zip(points, values, strict=True)):
        return size
    return None


def are_two(points: Sequence[Point]) -> bool:
    """Returns whether the points are two numbers of rows of a single batch.

    They do not determine a polynomial. One determines a multiple of n, or of its square, and the
    other confirms it.
    """
    return len(points) == 2 and len(points[0]) == 1


def _fit_multiple(values: tuple[int, ...], points: tuple[Point, ...]) -> RowSize | None:
    """Returns the positive whole multiple of n or n^2 with these values; None if there is none."""
    for power in (1, 2):
        factors = {Fraction(v, n**power) for v, (n,) in zip(values, points, strict=True)}
        factor = factors.pop()
        # The factor must be whole: n / 2 would be rounded if the number of rows is odd.
        if not factors and factor.denominator == 1 and factor > 0:
            return RowSize(tuple(factor * (k == power) for k in range(3)), num_symbols=1)
    return None


def fit_number(values: Sequence[float], points: tuple[Point, ...]) -> RowNumber | None:
    """Returns the float with these values at these points; None if it has no known form."""
    if not all(map(math.isfinite, values)):
        return None
    if are_two(points):
        return _fit_number_to_multiple(values, points)
    table = np.array([_powers_at(p) for p in points])
    for forward, back in _FORMS:
        with np.errstate(all="ignore"):
            coefficients = _fit(forward(np.asarray(values, np.float64)), points)
            if coefficients is not None and _are_close(back(table @ coefficients), values):
                return RowNumber(functools.partial(_number_at, coefficients, back))
    for i in range(len(points[0])):  # a polynomial divided by one number of rows: 1 - 1 / n
        coefficients = _fit(
            np.asarray([v * p[i] for v, p in zip(values, points, strict=True)]), points
        )
        if coefficients is not None:
            return RowNumber(functools.partial(_quotient_at, coefficients, i))
    return None


def _fit_number_to_multiple(values: Sequence[float], points: tuple[Point, ...]) -> RowNumber | None:
    rows = np.array([n for (n,) in points], np.float64)
    for forward, back in _FORMS:
        with np.errstate(all="ignore"):
            formed = forward(np.asarray(values, np.float64))
            if not np.isfinite(formed).all():  # 1 / 0
                continue
            for power in (1, 2):
                factor = _simplify(float(formed[0])) / rows[0] ** power
                if math.isfinite(factor) and _are_close(back(factor * rows**power), values):
                    coefficients = tuple(factor * (k == power) for k in range(3))
                    return RowNumber(functools.partial(_number_at, coefficients, back))
    return None


def _fit(values: np.ndarray, points: tuple[Point, ...]) -> tuple[float, ...] | None:
    """Returns the coefficients of the polynomial with these values; None if there is none."""
    if not np.isfinite(values).all():
        return None
    table = np.array([_powers_at(p) for p in points])
    # The first points determine the coefficients. The others only confirm them.
    simple = [_simplify(float(v)) for v in values]
    coefficients = np.array(
        [sum(float(a) * v for a, v in zip(row, simple, strict=False)) for row in _inverse(points)]
    )
    if not _are_close(table @ coefficients, values):
        return None
    # A term that never matters at the points is rounding, and would grow beyond them.
    largest = np.abs(table * coefficients).max(axis=0)
    coefficients[largest < _NEGLIGIBLE * largest.max()] = 0
    return tuple(coefficients)


def _simplify(value: float) -> float:
    """Returns the fraction with the smallest denominator that float32 hardly tells from a value."""
    # A fit amplifies the rounding errors of float32, so it needs the numbers before rounding. These
    # are mostly simple fractions: 14.99999925 is 15.
    for exponent in range(7):
        simple = float(Fraction(value).limit_denominator(10**exponent))
        if math.isclose(simple, value, rel_tol=_ROUNDING):
            return simple
    return value


def _are_close(a: Any, b: Any) -> bool:
    return np.allclose(a, b, rtol=TOLERANCE, atol=0)


def _quotient_at(coefficients: tuple[float, ...], i: int, counts: Sequence[Count]) -> Scalar:
    return _number_at(coefficients, lambda p: p / _as_number(counts[i]), counts)


def _number_at(
    coefficients: tuple[float, ...], back: Callable[[Any], Any], counts: Sequence[Count]
) -> Scalar:
    real = [_as_number(count) for count in counts]
    total: Any = _as_number(0)
    for c, powers in zip(coefficients, _monomials(len(real)), strict=True):
        if c:
            factors = (x for x, power in zip(real, powers, strict=True) for _ in range(power))
            total = total + functools.reduce(lambda a, b: a * b, factors, _as_number(c))
    with np.errstate(all="ignore"):  # 1 / n for no rows
        return back(total)


def _as_number(value: Scalar) -> Any:
    """Returns a traced or a NumPy scalar of JAX's default float dtype."""
    return _numpy_of(value).asarray(value, jnp.result_type(float))[()]


def _numpy_of(value: object) -> Any:
    """Returns the module that computes with a value: `jnp` for traced values, else `np`."""
    # A number on the host may be needed where no device is: `jnp` would dispatch to a device.
    return jnp if isinstance(value, jax.Array) else np


def _exact_value_at(size: RowSize, point: Point) -> Fraction:
    return sum(
        (c * int(power) for c, power in zip(size.coefficients, _powers_at(point), strict=True)),
        Fraction(0),
    )


@functools.cache
def _monomials(num_symbols: int) -> tuple[tuple[int, ...], ...]:
    """Returns the powers of the symbols in each monomial up to degree 2; the constant is first."""
    return tuple(p for p in itertools.product(range(3), repeat=num_symbols) if sum(p) <= 2)


def num_determining(num_symbols: int) -> int:
    """Returns the number of points that determine a polynomial."""
    return len(_monomials(num_symbols))


def _powers_at(point: Point) -> list[int]:
    return [
        math.prod(x**power for x, power in zip(point, powers, strict=True))
        for powers in _monomials(len(point))
    ]


@functools.lru_cache(maxsize=256)
def _inverse(points: tuple[Point, ...]) -> tuple[tuple[Fraction, ...], ...]:
    """Returns the exact inverse of the matrix of monomials at the first points."""
    # Gauss-Jordan elimination in fractions: floats would accept almost-polynomials.
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
    return tuple(tuple(row[n:]) for row in rows)
