"""Evaluates the operations of a flat program one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from tpudist.programs.flat_program import FlatProgram, Operation

_PLACEMENT = ("sharding_constraint", "mesh_cast", "reshard")
"""Operations that change only where an array is."""


def bind(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of one equation for `values`."""
    primitive = eqn.primitive
    # Custom derivatives are bound with functions, in jax 0.10 as arguments of their own.
    found: Any = primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    with eqn.ctx.manager:
        result = primitive.bind(*functions, *values, **params)
    return list(result) if primitive.multiple_results else [result]


def evaluate(
    program: FlatProgram,
    inputs: Sequence[Any],
    compute: Callable[[Operation, Sequence[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Returns all values of a program, by number.

    Arrays stay where they are: the program may have been made for a mesh, and run on one device.

    Args:
        program: The program.
        inputs: The inputs of the program.
        compute: Called with each operation and its inputs; returns its results. By default
            `operations.compute`.
    """
    each = compute or _compute
    values: list[Any] = [None] * program.count
    for number, value in (*program.constants.items(), *zip(program.inputs, inputs, strict=True)):
        values[number] = value
    for step in program.steps:
        results = each(step, [values[i] for i in step.inputs])
        for number, value in zip(step.outputs, results, strict=True):
            values[number] = value
    return values


def compute(step: Operation, values: Sequence[Any]) -> list[Any]:
    """Returns the results of one operation for `values`."""
    if step.adds:
        return [jax.numpy.add(*values)]
    if step.eqn.primitive.name in _PLACEMENT:
        return list(values)
    return bind(step.eqn, values)


_compute = compute
