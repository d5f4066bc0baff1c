"""Confirms that a labelled program computes the function for a given number of rows.

A program that fits a few traces may be wrong for another number of rows: code may contain
`if x.shape[0] == 100`. So the function is traced once more for each number that occurs. The trace
must have the structure, sizes, parameters and numbers that the labels predict. Nothing is compiled.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.rows.compared_params import is_compared
from tpudist.programs.rows.labels import (
    Corner,
    Dims,
    LabelledEquation,
    LabelledProgram,
    UnfittedValue,
    are_close,
    is_corner,
    predict_number,
    predict_param,
)
from tpudist.programs.rows.row_sizes import Piecewise, Point, RowNumber, RowSize, size_at
from tpudist.programs.rows.trace_comparison import are_equal, bodies_of, find_difference
from tpudist.programs.user_lines import users_line_of


def find_deviation(labelled: LabelledProgram, program: Program, counts: Point) -> str | None:
    """Describes where the trace for `counts` is not the predicted one; None if it is.

    Args:
        labelled: The labelled program.
        program: The trace of the function with `counts` rows.
        counts: Number of rows of each batch.
    """
    difference = find_difference(labelled.jaxpr, program)
    if difference is not None:
        return difference
    return _Confirmation(counts).program(labelled, program)


class _Confirmation:
    def __init__(self, counts: Point):
        self._counts = counts
        # Pairs that agree, by id: a program that is called in several places is compared once.
        self._confirmed: set[tuple[int, int]] = set()

    def program(self, labelled: LabelledProgram, program: Program) -> str | None:
        if (id(labelled), id(program)) in self._confirmed:
            return None
        opened = jaxprs.open_jaxpr(program)
        for value, const in zip(labelled.consts, jaxprs.consts_of(program), strict=True):
            if not self._is_predicted(value, const):
                return "a constant"
        for equation, eqn in zip(labelled.equations, opened.eqns, strict=True):
            deviation = self._equation(equation, eqn)
            if deviation is not None:
                line = users_line_of(eqn)
                # A deviation inside the equation may have its own line already: "(train.py:3)".
                is_located = deviation.endswith(")")
                return f"{deviation} ({line})" if line and not is_located else deviation
        if not self._have_dims(labelled.out_dims, opened.outvars):
            return "the shape of a result"
        for i, value in labelled.out_literals.items():
            if not self._is_predicted(value, jaxprs.literal_value(opened.outvars[i])):
                return "a result"
        self._confirmed.add((id(labelled), id(program)))
        return None

    def _equation(self, equation: LabelledEquation, eqn: core.JaxprEqn) -> str | None:
        name = eqn.primitive.name
        if not self._have_dims(equation.in_dims, eqn.invars):
            return f"the shape of an operand of {name}"
        if not self._have_dims(equation.out_dims, eqn.outvars):
            return f"the shape of a result of {name}"
        for i, value in equation.literals.items():
            actual = jaxprs.literal_value(eqn.invars[i])
            if not self._is_predicted(value, actual):
                return f"the number {actual} in {name}"
        for key, value in equation.params.items():
            if not is_compared(eqn, key):
                continue
            if key not in eqn.params or not self._is_parameter(value, eqn.params[key]):
                return f"the parameter {key} of {name}"
        for body, (_, program) in zip(equation.all_bodies, bodies_of(eqn), strict=True):
            deviation = self.program(body, program)
            if deviation is not None:
                return deviation
        return None

    def _have_dims(self, dims: Sequence[Dims], atoms: Sequence[Atom]) -> bool:
        return all(
            tuple(size_at(dim, self._counts) for dim in each) == tuple(jaxprs.shape_of(atom))
            for each, atom in zip(dims, atoms, strict=True)
        )

    def _is_parameter(self, value: object, actual: object) -> bool:
        # The rules reject an unknown dependence where it matters. The programs inside a callable
        # are compared as bodies.
        if isinstance(value, UnfittedValue) or callable(value):
            return True
        if isinstance(value, RowSize):
            return predict_param(value, self._counts) == actual
        if type(value) is tuple and isinstance(actual, tuple) and len(value) == len(actual):
            return all(map(self._is_parameter, value, actual))
        return are_equal(value, actual)

    def _is_predicted(self, value: object, actual: Any) -> bool:
        """Returns whether a constant or literal is the labelled value for these counts."""
        # The evaluator raises an error if it reads an `UnfittedValue`.
        if value is actual or isinstance(value, UnfittedValue) or isinstance(actual, Tracer):
            return True
        if isinstance(value, Piecewise | RowNumber | RowSize):
            return are_close(predict_number(value, self._counts), actual)
        try:
            if isinstance(value, Corner):
                return is_corner(np.asarray(actual), np.asarray(value.value))
            return are_equal(np.asarray(value), np.asarray(actual))
        except Exception:  # random keys and the like: each trace has another object
            return False
