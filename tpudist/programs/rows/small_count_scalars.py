"""Numbers that are others where a batch has one row or none, taken over from its trace there.

Real code divides by `max(x.shape[0], 1)`: n for one row and more, and another number for none. No
polynomial says that; the trace for no rows does. So where that trace is the program for more rows
but for some scalars, these are what it says for so few rows: a select on the number of rows. What
else differs is no matter of numbers, and left to `confirmation` and `small_counts`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.rows import small_counts
from tpudist.programs.rows.labels import (
    Corner,
    LabelledEquation,
    LabelledProgram,
    Varies,
    bodies_of,
    find_difference,
    predict,
)
from tpudist.programs.rows.row_sizes import Piece, Piecewise, Point

_TOLERANCE = 3e-6
Place = tuple[Any, str, int]
"""Where a scalar stands: an equation or a program, in which of its parts, and which one there."""


def take_over(
    labelled: LabelledProgram, program: Any, counts: Point, symbols: tuple[int, ...]
) -> LabelledProgram:
    """The labelled program with the scalars that the trace for few rows has.

    Args:
        labelled: The labelled program.
        program: The trace of the function for `counts`.
        counts: How many rows each batch has in it.
        symbols: Those of few rows, of which the scalars are taken to be others.
    """
    if find_difference(labelled.jaxpr, program) is None:
        places = _pair_all(labelled, program)
    else:
        places = _pair_at_sites(labelled, program, counts)
    found: dict[Place, Any] = {}
    for place, value, actual in places:
        if _is_other_number(value, actual, counts):
            # One that is called in two ways would be both.
            if found.setdefault(place, actual) is not actual and found[place] != actual:
                return labelled
    if not found:
        return labelled
    condition = tuple((i, counts[i]) for i in symbols)
    return _Replacement(found, condition).program(labelled)


def _pair_all(labelled: LabelledProgram, program: Any) -> Iterator[tuple[Place, Any, Any]]:
    """Each scalar of a program, and what it is in a trace of the same structure."""
    opened = jaxprs.open_jaxpr(program)
    for i, (value, const) in enumerate(
        zip(labelled.consts, getattr(program, "consts", ()), strict=True)
    ):
        yield (labelled.jaxpr, "consts", i), value, const
    for equation, eqn in zip(labelled.equations, opened.eqns, strict=True):
        for i, value in equation.literals.items():
            literal: Any = eqn.invars[i]
            yield (equation.eqn, "literals", i), value, literal.val
        own: dict[str, list[Any]] = {}
        for name, body in bodies_of(eqn):
            own.setdefault(name, []).append(body)
        for name, bodies in equation.bodies.items():
            for body, held in zip(bodies, own[name], strict=True):
                yield from _pair_all(body, held)
    yield from _pair_results(labelled, program)


def _pair_results(labelled: LabelledProgram, program: Any) -> Iterator[tuple[Place, Any, Any]]:
    outputs: list[Any] = jaxprs.open_jaxpr(program).outvars
    for i, value in labelled.out_literals.items():
        own: Any = labelled.jaxpr.outvars[i].aval
        if isinstance(outputs[i], core.Literal) and outputs[i].aval.dtype == own.dtype:
            yield (labelled.jaxpr, "out_literals", i), value, outputs[i].val


def _pair_at_sites(
    labelled: LabelledProgram, program: Any, counts: Point
) -> Iterator[tuple[Place, Any, Any]]:
    """The same where JAX has written some operations in another way, by the user's instructions."""
    for equation, eqn in small_counts.pair_equations(labelled, program, counts):
        for i, value in equation.literals.items():
            literal: Any = eqn.invars[i]
            yield (equation.eqn, "literals", i), value, literal.val
    yield from _pair_results(labelled, program)


def _is_other_number(value: Any, actual: Any, counts: Point) -> bool:
    """Whether a scalar is not what its label says, and one that can be written into a program."""
    predicted = predict(value, counts)
    if isinstance(predicted, Corner | Varies | Tracer) or isinstance(actual, Tracer):
        return False
    try:
        numbers = [np.asarray(x) for x in (predicted, actual)]
    except Exception:  # random keys and the like
        return False
    if any(x.ndim or x.dtype.kind not in "fiub" for x in numbers):
        return False
    return not np.isclose(*(float(x) for x in numbers), rtol=_TOLERANCE, atol=0, equal_nan=True)


@dataclasses.dataclass
class _Replacement:
    """Puts scalars into a labelled program."""

    found: Mapping[Place, Any]
    condition: tuple[tuple[int, int], ...]
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

    def _value(self, place: Place, value: Any) -> Any:
        if place not in self.found:
            return value
        piece = Piece(self.condition, np.asarray(self.found[place]).item())
        if isinstance(value, Piecewise):
            return Piecewise(value.general, (piece, *value.pieces))
        return Piecewise(value, (piece,))
