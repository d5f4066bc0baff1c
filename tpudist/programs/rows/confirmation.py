"""Confirms that a labelled program is what the function is for a given number of rows.

A program that fits a few traces may still be another one for other numbers of rows: code may ask
`if x.shape[0] == 100`. So the function is traced at each number that occurs, and this trace must be
the one that the labels predict: the same structure, sizes, parameters and numbers. No compile, and
nothing is left to chance.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from tpudist.programs import jaxprs
from tpudist.programs.rows.labels import (
    NOT_COMPARED,
    Corner,
    LabelledProgram,
    Varies,
    are_equal,
    bodies_of,
    find_difference,
    is_corner,
    predict,
)
from tpudist.programs.rows.row_sizes import Piecewise, Point, RowNumber, RowSize, size_at
from tpudist.programs.user_lines import users_line_of

_TOLERANCE = 3e-6


def find_deviation(labelled: LabelledProgram, program: Any, counts: Point) -> str | None:
    """Where the trace for `counts` is another one than predicted, in words; None where it is not.

    Args:
        labelled: The labelled program.
        program: The trace of the function with so many rows.
        counts: How many rows each batch has.
    """
    difference = find_difference(labelled.jaxpr, program)
    if difference is not None:
        return difference
    return _Confirmation(counts).program(labelled, program)


class _Confirmation:
    def __init__(self, counts: Point):
        self._counts = counts
        self._done: set[tuple[int, int]] = set()

    def program(self, labelled: LabelledProgram, program: Any) -> str | None:
        if (id(labelled), id(program)) in self._done:
            return None
        opened = jaxprs.open_jaxpr(program)
        for value, const in zip(labelled.consts, getattr(program, "consts", ()), strict=True):
            if not self._is_predicted(value, const):
                return "a constant"
        for equation, eqn in zip(labelled.equations, opened.eqns, strict=True):
            wrong = self._equation(equation, eqn)
            if wrong is not None:
                line = users_line_of(eqn)
                if line and not wrong.endswith(")"):
                    return f"{wrong} ({line})"
                return wrong
        if not self._have_dims(labelled.out_dims, opened.outvars):
            return "the shape of a result"
        for i, value in labelled.out_literals.items():
            literal: Any = opened.outvars[i]
            if not self._is_predicted(value, literal.val):
                return "a result"
        self._done.add((id(labelled), id(program)))
        return None

    def _equation(self, equation: Any, eqn: Any) -> str | None:
        if not self._have_dims(equation.in_dims, eqn.invars):
            return f"the shape of an operand of {eqn.primitive.name}"
        if not self._have_dims(equation.out_dims, eqn.outvars):
            return f"the shape of a result of {eqn.primitive.name}"
        for i, value in equation.literals.items():
            if not self._is_predicted(value, eqn.invars[i].val):
                return f"the number {eqn.invars[i].val} in {eqn.primitive.name}"
        for name, value in equation.params.items():
            if name in NOT_COMPARED:
                continue
            if name not in eqn.params or not self._is_parameter(value, eqn.params[name]):
                return f"the parameter {name} of {eqn.primitive.name}"
        own: dict[str, list[Any]] = {}
        for name, body in bodies_of(eqn):
            own.setdefault(name, []).append(body)
        for name, bodies in equation.bodies.items():
            for body, program in zip(bodies, own[name], strict=True):
                wrong = self.program(body, program)
                if wrong is not None:
                    return wrong
        return None

    def _have_dims(self, dims: Any, variables: Any) -> bool:
        return all(
            tuple(size_at(dim, self._counts) for dim in each)
            == tuple(getattr(variable.aval, "shape", ()))
            for each, variable in zip(dims, variables, strict=True)
        )

    def _is_parameter(self, value: Any, actual: Any) -> bool:
        if isinstance(value, Varies) or callable(value):
            return True  # refused where it matters, or compared by what it holds
        if isinstance(value, RowSize):
            return predict(value, self._counts) == actual
        if type(value) is tuple and isinstance(actual, tuple) and len(value) == len(actual):
            return all(map(self._is_parameter, value, actual))
        return are_equal(value, actual)

    def _is_predicted(self, value: Any, actual: Any) -> bool:
        if isinstance(value, Varies) or isinstance(actual, Tracer):
            return True
        if value is actual:
            return True
        if isinstance(value, Piecewise):
            predicted = predict(value, self._counts)
            return bool(np.isclose(predicted, float(actual), rtol=_TOLERANCE, atol=0))
        if isinstance(value, RowSize):
            return predict(value, self._counts) == int(actual)
        if isinstance(value, RowNumber):
            return bool(
                np.isclose(predict(value, self._counts), float(actual), rtol=_TOLERANCE, atol=0)
            )
        try:
            if isinstance(value, Corner):
                return is_corner(np.asarray(actual), np.asarray(value.value))
            return are_equal(np.asarray(value), np.asarray(actual))
        except Exception:  # random keys and the like, of which JAX makes new objects
            return False
