"""Finds numbers of rows that JAX has multiplied by the number of replicas during a trace.

`jax.lax.psum` of a Python number does not communicate: it multiplies by the size of the axis. For
`x.shape[0]` the product is the total number of rows only if all replicas have the same number of
rows. A trace on more replicas with the same rows changes such a product, and no other number.
"""

from collections.abc import Iterator

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.rows.labels import (
    LabelledEquation,
    LabelledProgram,
    bodies_of,
    depends_on_rows,
    find_difference,
)


def find_line(labelled: LabelledProgram, larger: Program) -> str | None:
    """Returns the line that uses a product of the numbers of rows and of replicas.

    None if there is no such product; empty if a result is one.

    Args:
        labelled: The program.
        larger: The trace of the same function on more replicas, for the rows of the first trace.
    """
    if find_difference(labelled.jaxpr, larger) is not None:
        return None
    return next(_lines(labelled, larger), None)


def _lines(labelled: LabelledProgram, larger: Program) -> Iterator[str]:
    opened = jaxprs.open_jaxpr(larger)
    for equation, eqn in zip(labelled.equations, opened.eqns, strict=True):
        if _has_other_numbers(equation, eqn):
            yield equation.line
        for body, (_, larger_body) in zip(equation.all_bodies, bodies_of(eqn), strict=True):
            yield from (line or equation.line for line in _lines(body, larger_body))
    for i, value in labelled.out_literals.items():
        if depends_on_rows(value) and _differ(labelled.jaxpr.outvars[i], opened.outvars[i]):
            yield ""


def _has_other_numbers(equation: LabelledEquation, eqn: core.JaxprEqn) -> bool:
    return any(
        depends_on_rows(value) and _differ(equation.eqn.invars[i], eqn.invars[i])
        for i, value in equation.literals.items()
    )


def _differ(literal: Atom, other: Atom) -> bool:
    first, second = jaxprs.literal_value(literal), jaxprs.literal_value(other)
    return not np.array_equal(np.asarray(first), np.asarray(second))
