"""Evaluates the operations of a flat program one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from tpudist.programs.flat_program import FlatProgram, Operation

_PLACEMENT = ("sharding_constraint", "mesh_cast", "reshard")
"""Operations that change only the placement of an array."""


def bind(
    eqn: core.JaxprEqn, values: Sequence[Any], changed: Mapping[str, Any] | None = None
) -> list[Any]:
    """Returns the results of one equation for `values`.

    Args:
        eqn: The equation.
        values: Values for its operands.
        changed: Parameters that replace those of the equation.
    """
    primitive = eqn.primitive
    # Primitives of custom derivatives need their functions: jax 0.10 returns these apart from the
    # parameters, later versions among them.
    bound: Any = primitive.get_bind_params({**eqn.params, **(changed or {})})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        result = primitive.bind(*functions, *values, **params)
    return list(result) if primitive.multiple_results else [result]


def evaluate(
    program: FlatProgram,
    inputs: Sequence[Any],
    compute: Callable[[Operation, Sequence[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Returns all values of a program, by number.

    Arrays keep their placement: a program that was traced for a mesh may run on one device.

    Args:
        program: The program.
        inputs: The inputs of the program.
        compute: Called with each operation and its inputs; returns its results. Default:
            `compute_operation`.
    """
    compute = compute or compute_operation
    values: list[Any] = [None] * program.num_values
    for number, value in (*program.constants.items(), *zip(program.inputs, inputs, strict=True)):
        values[number] = value
    for step in program.steps:
        results = compute(step, [values[i] for i in step.inputs])
        for number, value in zip(step.outputs, results, strict=True):
            values[number] = value
    return values


def compute_operation(step: Operation, values: Sequence[Any]) -> list[Any]:
    """Returns the results of one operation for `values`."""
    if step.adds:
        return [jax.numpy.add(*values)]
    if step.eqn.primitive.name in _PLACEMENT:
        return list(values)
    return bind(step.eqn, values)
