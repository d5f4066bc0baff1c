"""Evaluates the programs inside scans and branches one operation after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from tpudist.programs import equation_layouts, flat_program, jaxprs, operations
from tpudist.programs.flat_program import FlatProgram, Operation
from tpudist.programs.jaxpr_structure import Cond, Scan

Compute = Callable[[Operation, Sequence[Any]], list[Any]]


def find_programs(eqn: core.JaxprEqn) -> list[FlatProgram]:
    """Returns the programs of a scan or branch; nothing for another operation."""
    structure = equation_layouts.structure_of(eqn)
    if not isinstance(structure, Scan | Cond):
        return []
    bodies = [structure.body] if isinstance(structure, Scan) else structure.bodies
    programs = jaxprs.programs_of(eqn.params.values())
    closed = {id(jaxprs.open_jaxpr(x)): x for x in programs}
    return [flat_program.flatten(closed[id(x)], inline_calls=True) for x in bodies]


def make_function(program: FlatProgram, compute: Compute) -> Callable[..., list[Any]]:
    """Returns a function of the inputs of a program that evaluates it with `compute`."""

    def run(*inputs: jax.Array) -> list[Any]:
        values = operations.evaluate(program, inputs, compute)
        return [values[i] for i in program.outputs]

    return run


def evaluate_inside(
    eqn: core.JaxprEqn, programs: Sequence[FlatProgram], values: Sequence[Any], compute: Compute
) -> list[Any]:
    """Returns the results of a scan or branch.

    Args:
        eqn: The scan or branch.
        programs: The result of `find_programs`.
        values: Values of the operands.
        compute: Called with each operation and its inputs; returns its results.
    """
    functions = [make_function(x, compute) for x in programs]
    structure = equation_layouts.structure_of(eqn)
    if isinstance(structure, Cond):
        return list(jax.lax.switch(values[0], functions, *values[1:]))
    assert isinstance(structure, Scan), "`find_programs` returns no others"
    first = structure.num_consts
    last = first + structure.num_carry

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = functions[0](*values[:first], *carry, *xs)
        return results[: structure.num_carry], results[structure.num_carry :]

    carry, ys = jax.lax.scan(
        step,
        list(values[first:last]),
        list(values[last:]),
        structure.length,
        eqn.params["reverse"],
    )
    return [*carry, *ys]
