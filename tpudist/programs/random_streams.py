"""Changes the random numbers of a program, so that it can be compared with one device.

`share` gives all replicas the random numbers of the first one, so that replicas with the same rows
compute the same. Other uses of the replica id, such as a choice of rows, stay as they are. `fix`
replaces all random bits by a constant, also in loops, so that one device with all rows draws the
same for each row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tpudist.programs import equation_layouts, flat_program, inner_programs, jaxprs, operations
from tpudist.programs.flat_program import FlatProgram, Operation, is_collective
from tpudist.programs.jaxprs import Program

# Primitives that draw numbers. In `share`, they and all `random_...` read the first replica's keys.
_RANDOM = ("threefry2x32", "rng_bit_generator", "rng_uniform")
_DRAWS = ("random_bits", "random_gamma", *_RANDOM)
# The uniform number that `fix` draws: with it, dropout keeps or drops all elements.
_CONSTANT = 0.1


def draws_random_numbers(closed: Program) -> bool:
    """Returns whether a program draws random numbers, at any depth."""
    return any(eqn.primitive.name in _DRAWS for eqn in jaxprs.walk(closed))


def can_be_fixed(closed: Program) -> bool:
    """Returns whether `fix` replaces all random numbers of a program.

    `fix` supports scans and branches, but not `while` loops: with constant bits a loop such as
    rejection sampling might never end.
    """
    # Equal numbers: `compute_fixed` meets each draw.
    draws = [eqn for eqn in jaxprs.walk(closed) if eqn.primitive.name in _DRAWS]
    return _count_fixed(flat_program.flatten(closed, inline_calls=True)) == len(draws)


def _count_fixed(program: FlatProgram) -> int:
    count = 0
    for step in program.steps:
        count += step.eqn.primitive.name == "random_bits"
        count += sum(map(_count_fixed, inner_programs.find_programs(step.eqn)))
    return count


def fix(closed: Program) -> Callable[..., list[jax.Array]]:
    """Returns a function of the inputs of `closed`, in which all random bits are a constant."""
    program = flat_program.flatten(closed, inline_calls=True)
    return inner_programs.make_function(program, compute_fixed)


def compute_fixed(step: Operation, values: Sequence[Any]) -> list[Any]:
    """Returns the results of one operation; all random bits stand for one uniform number."""
    eqn = step.eqn
    if eqn.primitive.name == "random_bits":
        result = eqn.outvars[0]
        bits = int(_CONSTANT * 2 ** eqn.params["bit_width"])
        return [jnp.full(jaxprs.shape_of(result), bits, jaxprs.dtype_of(result))]
    programs = inner_programs.find_programs(eqn)
    if any(map(_count_fixed, programs)):
        return inner_programs.evaluate_inside(eqn, programs, values, compute_fixed)
    return operations.compute_operation(step, values)


def share(closed: Program) -> Callable[..., list[jax.Array]]:
    """Returns a function of the inputs of `closed`, in which all replicas draw the same numbers."""
    program = flat_program.flatten(closed, inline_calls=True)
    sources = _find_sources(program)

    def run(*inputs: jax.Array) -> list[Any]:
        # `values` are the replica's own. `shared` are the values on the first replica, where these
        # differ and random numbers depend on them: the replica id is 0 there. Only random
        # operations read them.
        values: dict[int, Any] = dict(program.constants)
        values.update(zip(program.inputs, inputs, strict=True))
        shared: dict[int, Any] = {}
        for step in program.steps:
            own = [values[i] for i in step.inputs]
            of_first = [shared.get(i, values[i]) for i in step.inputs]
            if _is_random(step.eqn):
                own = of_first
            results = operations.compute_operation(step, own)
            values.update(zip(step.outputs, results, strict=True))
            if not sources.intersection(step.outputs):
                continue
            if _is_replica_id(step.eqn):
                shared[step.outputs[0]] = jnp.zeros((), jnp.int32)
            elif not is_collective(step.eqn) and any(i in shared for i in step.inputs):
                results = operations.compute_operation(step, of_first)
                shared.update(zip(step.outputs, results, strict=True))
        return [values[i] for i in program.outputs]

    return run


def _find_sources(program: FlatProgram) -> set[int]:
    """Returns the values that random numbers are computed from."""
    sources: set[int] = set()
    for step in reversed(program.steps):
        if _is_random(step.eqn) or sources.intersection(step.outputs):
            sources.update(step.inputs)
    return sources


def _is_random(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation creates keys or random numbers, also in a loop or branch."""
    name = eqn.primitive.name
    if name.startswith("random_") or name in _RANDOM:
        return True
    structure = equation_layouts.structure_of(eqn)
    return structure is not None and any(
        _is_random(inner) for body in structure.bodies for inner in body.eqns
    )


def _is_replica_id(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "axis_index" and is_collective(eqn)
