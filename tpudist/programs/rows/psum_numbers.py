"""Finds numbers of rows that JAX has multiplied by the number of replicas during a trace.

`jax.lax.psum` of a Python number does not communicate: it multiplies by the size of the axis. Of
`x.shape[0]` that is the number of all rows only if every replica has the same number of rows. A
trace on more replicas for the same rows tells such a number from one that depends on rows alone.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.rows.labels import (
    LabelledEquation,
    LabelledProgram,
    bodies_of,
    find_difference,
    varies,
)


def find_line(labelled: LabelledProgram, larger: Any) -> str | None:
    """Returns the line that uses a product of the numbers of rows and of replicas; None if no line.

    Args:
        labelled: The program.
        larger: The trace of the same function on more replicas, for the rows of the first trace.
    """
    if find_difference(labelled.jaxpr, larger) is not None:
        return None
    return next(_lines(labelled, larger), None)


def _lines(labelled: LabelledProgram, larger: Any) -> Iterator[str]:
    others = jaxprs.open_jaxpr(larger)
    for equation, other in zip(labelled.equations, others.eqns, strict=True):
        if _has_other_numbers(equation, other):
            yield equation.line
        bodies = [body for held in equation.bodies.values() for body in held]
        for body, (_, other_body) in zip(bodies, bodies_of(other), strict=True):
            yield from (line or equation.line for line in _lines(body, other_body))
    for i, value in labelled.out_literals.items():
        if varies(value) and _differ(labelled.jaxpr.outvars[i], others.outvars[i]):
            yield ""


def _has_other_numbers(equation: LabelledEquation, other: core.JaxprEqn) -> bool:
    return any(
        varies(value) and _differ(equation.eqn.invars[i], other.invars[i])
        for i, value in equation.literals.items()
    )


def _differ(atom: Any, other: Any) -> bool:
    return not np.array_equal(np.asarray(atom.val), np.asarray(other.val))
