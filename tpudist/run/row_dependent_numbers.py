"""Python numbers in the result of a function that depend on its rows, such as `x.shape[0]`.

`PartialBatch` traces the function for several numbers of rows. This file fits a formula to the
numbers that it returns, and confirms it for the numbers of rows that occur.
"""

import math
from collections.abc import Mapping

import numpy as np

from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_program import MIN_TRACED_ROWS
from tpudist.programs.rows.row_sizes import (
    Piece,
    Piecewise,
    Point,
    RowNumber,
    RowSize,
    fit_number,
    fit_size,
)
from tpudist.run.outputs.results import CallOutputs, LeafKind

# Formulas are computed in float64, and the function may round to float32.
_TOLERANCE = 1e-5


def find_numbers(
    outputs: Mapping[Point, CallOutputs], points: tuple[Point, ...], num_batches: int
) -> dict[int, Piecewise]:
    """Returns the leaves of the result that are such numbers, as functions of the rows.

    Args:
        outputs: The outputs of all traces so far, by their numbers of rows.
        points: The numbers of rows at which formulas are fitted.
        num_batches: Number of batches, whose rows are first in a point.

    Raises:
        RowsError: If the result depends on the rows in another way.
    """
    formulas: dict[int, Piecewise] = {}
    for i, (kind, first) in enumerate(outputs[points[0]].result):
        values = [outputs[p].result[i][1] for p in points]
        if kind is not LeafKind.VALUE or all(x is first or are_equal(x, first) for x in values):
            continue
        formula = None
        if all(type(x) is int for x in values):
            formula = fit_size(tuple(values), points)
        elif all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
            formula = fit_number([float(x) for x in values], points)
        if not isinstance(formula, RowSize | RowNumber):
            other = next(
                k for k, x in enumerate(values) if x is not first and not are_equal(x, first)
            )
            raise RowsError(
                f"it returns {first!r} with {points[0][:num_batches]} rows and {values[other]!r} "
                f"with {points[other][:num_batches]} rows: this value is not a JAX array, but "
                "depends on the number of rows"
            )
        formulas[i] = Piecewise(formula, _find_pieces(outputs, i, formula))
    return formulas


def _find_pieces(
    outputs: Mapping[Point, CallOutputs], result: int, formula: RowSize | RowNumber
) -> tuple[Piece, ...]:
    """Returns the values that replace a formula below `MIN_TRACED_ROWS` rows."""
    pieces = []
    for point, found in outputs.items():
        kind, actual = found.result[result]
        few = tuple((i, count) for i, count in enumerate(point) if count < MIN_TRACED_ROWS)
        if few and kind is LeafKind.VALUE and type(actual) in (int, float):
            if not _follows(actual, formula.at(point)):
                pieces.append(Piece(few, actual))
    # The most specific piece comes first: it fixes the most numbers of rows.
    return tuple(sorted(pieces, key=lambda piece: -len(piece.counts)))


def confirm_numbers(
    outputs: Mapping[Point, CallOutputs],
    first: CallOutputs,
    formulas: Mapping[int, Piecewise],
    point: Point,
) -> None:
    """Raises RowsError if the result at `point` does not follow from other numbers of rows.

    Args:
        first: The outputs at the first point.
        formulas: Result of `find_numbers`.
        point: Numbers of rows of one replica.
    """
    if point not in outputs:
        return
    for i, (kind, actual) in enumerate(outputs[point].result):
        formula, expected = formulas.get(i), first.result[i][1]
        if formula is not None:
            follows = _follows(actual, formula.at(point))
        else:
            follows = kind is LeafKind.ARRAY or actual is expected or are_equal(actual, expected)
        if not follows:
            raise RowsError(
                f"it returns {actual!r} with {point} rows, which does not follow from other "
                "numbers of rows"
            )


def are_equal(a: object, b: object) -> bool:
    """Whether two results are equal, or both NaN; False for objects that cannot be compared."""
    try:
        # Only NumPy's own class: an array of a subclass may have more than its numbers.
        if type(a) is np.ndarray and type(b) is np.ndarray:
            return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        return bool(a == b) or (a != a and b != b)
    except Exception:
        return False


def _follows(actual: float, predicted: object) -> bool:
    # `isclose` is False for two NaNs. Infinity is close to itself only.
    is_close = math.isclose(actual, float(predicted), rel_tol=_TOLERANCE)  # type: ignore[arg-type]
    return is_close or are_equal(actual, predicted)
