"""Adds errors of the size of rounding to the sums of a program, to measure their effect.

Errors in the inputs do not show the effect on sums of equal numbers, because equal addends change
together. An example is a variance that is computed from a mean of squares.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpudist.programs import flat_program, inner_programs, jaxprs
from tpudist.programs.flat_program import Operation
from tpudist.programs.jaxprs import Program

_SUMS = ("reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "reduce_window_sum", "psum")


@functools.cache
def disturb(compute: inner_programs.Compute, seed: int) -> Callable[[Program], Callable[..., Any]]:
    """Returns a rewrite of programs in which each sum has an error as large as its rounding.

    The error of a sum of N numbers grows with the square root of N.

    Args:
        compute: Called with each operation and its inputs; returns its results.
        seed: Seed of the signs of the errors.
    """

    def rewrite(closed: Program) -> Callable[..., Any]:
        random = np.random.default_rng(seed)

        def compute_disturbed(step: Operation, values: Sequence[Any]) -> list[Any]:
            if programs := inner_programs.find_programs(step.eqn):
                return inner_programs.evaluate_inside(step.eqn, programs, values, compute_disturbed)
            results = compute(step, values)
            if step.adds or step.eqn.primitive.name not in _SUMS:
                return results
            # One sign for each equation, drawn while the program is traced.
            num_roundings = math.sqrt(_count_addends(step.eqn)) * random.choice((-1, 1))
            return [_with_error(x, num_roundings) for x in results]

        program = flat_program.flatten(closed, inline_calls=True)
        return inner_programs.make_function(program, compute_disturbed)

    return rewrite


def _with_error(x: jax.Array, num_roundings: float) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * jnp.asarray(1 + num_roundings * float(jnp.finfo(x.dtype).eps), x.dtype)


def _count_addends(eqn: core.JaxprEqn) -> float:
    """Returns the number of addends in one element of the result."""
    shapes = list(map(jaxprs.shape_of, eqn.invars))
    name = eqn.primitive.name
    if name == "dot_general":
        (dims, _), _ = eqn.params["dimension_numbers"]
        return math.prod(shapes[0][i] for i in dims)
    if name == "conv_general_dilated":
        return math.prod(shapes[1][i] for i in eqn.params["dimension_numbers"].rhs_spec[1:])
    if name == "reduce_sum":
        return math.prod(shapes[0][i] for i in eqn.params["axes"])
    if name == "cumsum":
        return shapes[0][eqn.params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(eqn.params["window_dimensions"])
    return 1  # `psum`: few replicas
