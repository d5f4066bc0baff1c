"""Learns scalars with another value for batches of one row or none, from the traces with them.

Real code divides by `max(x.shape[0], 1)`, which is n for one row or more, and 1 for no rows. No
polynomial is that; the trace with no rows contains the number. If that trace is the labelled
program except for some scalars, the scalars become `Piecewise`: a select on the number of rows.
All other differences are left to `confirmation` and `small_counts`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Program
from tpudist.programs.rows import small_counts
from tpudist.programs.rows.labels import (
    Corner,
    LabelledEquation,
    LabelledProgram,
    UnfittedValue,
    are_close,
    predict_number,
)
from tpudist.programs.rows.row_sizes import Piece, Piecewise, Point
from tpudist.programs.rows.trace_comparison import bodies_of, find_difference

Place = tuple[core.JaxprEqn | core.Jaxpr, str, int]
"""The place of a scalar: an equation or a program, the part of it, and the number in that part."""


def learn_scalars(
    labelled: LabelledProgram, program: Program, counts: Point, symbols: tuple[int, ...]
) -> LabelledProgram:
    """Returns the labelled program with the scalars of a trace, as `Piecewise` for its counts.

    Args:
        labelled: The labelled program.
        program: The trace of the function for `counts`.
        counts: Number of rows of each batch in that trace.
        symbols: The symbols with small counts, which the scalars are assumed to depend on.
    """
    if find_difference(labelled.jaxpr, program) is None:
        places = _pair_all(labelled, program)
    else:
        places = _pair_at_sites(labelled, program, counts)
    actual_at: dict[Place, Any] = {}
    for place, value, actual in places:
        if _is_other_number(value, actual, counts):
            # A program that is called in two ways may have two values at one place: no select on
            # the number of rows can be both.
            known = actual_at.setdefault(place, actual)
            if known is not actual and known != actual:
                return labelled
    if not actual_at:
        return labelled
    condition = tuple((i, counts[i]) for i in symbols)
    return _Replacement(actual_at, condition).program(labelled)


def _pair_all(labelled: LabelledProgram, program: Program) -> Iterator[tuple[Place, Any, Any]]:
    """Yields each labelled scalar with its value in a trace of the same structure."""
    consts = zip(labelled.consts, jaxprs.consts_of(program), strict=True)
    for i, (value, const) in enumerate(consts):
        yield (labelled.jaxpr, "consts", i), value, const
    for equation, eqn in zip(labelled.equations, jaxprs.open_jaxpr(program).eqns, strict=True):
        yield from _pair_literals(equation, eqn)
        for body, (_, own) in zip(equation.all_bodies, bodies_of(eqn), strict=True):
            yield from _pair_all(body, own)
    yield from _pair_results(labelled, program)


def _pair_literals(
    equation: LabelledEquation, eqn: core.JaxprEqn
) -> Iterator[tuple[Place, Any, Any]]:
    for i, value in equation.literals.items():
        yield (equation.eqn, "literals", i), value, jaxprs.literal_value(eqn.invars[i])


def _pair_results(labelled: LabelledProgram, program: Program) -> Iterator[tuple[Place, Any, Any]]:
    outputs = jaxprs.open_jaxpr(program).outvars
    for i, value in labelled.out_literals.items():
        output, dtype = outputs[i], jaxprs.dtype_of(labelled.jaxpr.outvars[i])
        if isinstance(output, core.Literal) and jaxprs.dtype_of(output) == dtype:
            yield (labelled.jaxpr, "out_literals", i), value, output.val


def _pair_at_sites(
    labelled: LabelledProgram, program: Program, counts: Point
) -> Iterator[tuple[Place, Any, Any]]:
    """Yields the same for a trace in which JAX has written some operations differently."""
    for equation, eqn in small_counts.pair_equations(labelled, program, counts):
        yield from _pair_literals(equation, eqn)
    yield from _pair_results(labelled, program)


def _is_other_number(value: object, actual: object, counts: Point) -> bool:
    """Returns whether a scalar is a plain number, but not the number that its label predicts."""
    predicted = predict_number(value, counts)
    if isinstance(predicted, Corner | UnfittedValue | Tracer) or isinstance(actual, Tracer):
        return False
    try:
        numbers = [np.asarray(x) for x in (predicted, actual)]
    except Exception:  # random keys and the like
        return False
    if any(x.ndim or x.dtype.kind not in "fiub" for x in numbers):
        return False
    return not are_close(predicted, actual)


@dataclasses.dataclass
class _Replacement:
    """Puts scalars into a labelled program."""

    actual_at: Mapping[Place, Any]
    condition: tuple[tuple[int, int], ...]
    # By id: a program that is called in several places stays one program.
    known: dict[int, LabelledProgram] = dataclasses.field(default_factory=dict)

    def program(self, labelled: LabelledProgram) -> LabelledProgram:
        if id(labelled) not in self.known:
            self.known[id(labelled)] = dataclasses.replace(
                labelled,
                consts=tuple(
                    self._value((labelled.jaxpr, "consts", i), value)
                    for i, value in enumerate(labelled.consts)
                ),
                equations=tuple(map(self._equation, labelled.equations)),
                out_literals={
                    i: self._value((labelled.jaxpr, "out_literals", i), value)
                    for i, value in labelled.out_literals.items()
                },
            )
        return self.known[id(labelled)]

    def _equation(self, equation: LabelledEquation) -> LabelledEquation:
        return dataclasses.replace(
            equation,
            literals={
                i: self._value((equation.eqn, "literals", i), value)
                for i, value in equation.literals.items()
            },
            bodies={
                name: tuple(map(self.program, bodies)) for name, bodies in equation.bodies.items()
            },
        )

    def _value(self, place: Place, value: object) -> Any:
        if place not in self.actual_at:
            return value
        piece = Piece(self.condition, np.asarray(self.actual_at[place]).item())
        if isinstance(value, Piecewise):
            return Piecewise(value.general, (piece, *value.pieces))
        return Piecewise(value, (piece,))
