"""Calls of a linear function whose transpose is another function than JAX would derive."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

ADJOINT_CALL = "adjoint_call"
"""The name of the primitive. Its parameters are two programs: `callee`, and `transposed`."""


def adjoint_call(function: Callable, transposed: Callable, x: jax.Array) -> jax.Array:
    """Returns `function(x)`. Its transpose is `transposed`, and the transpose of that `function`.

    Derivatives of any order, forward or reverse, and `jax.vmap` are possible.

    Args:
        function: A linear function of one array.
        transposed: A linear function from the result of `function` to its argument.
        x: The argument.
    """
    callee = jax.make_jaxpr(function)(x)
    (result,) = callee.out_avals
    return _primitive.bind(x, callee=callee, transposed=jax.make_jaxpr(transposed)(result))


def _run(x: jax.Array, *, callee: Any, transposed: Any) -> jax.Array:
    (result,) = core.jaxpr_as_fun(callee)(x)
    return result


def _transpose(upstream: Any, x: Any, *, callee: Any, transposed: Any) -> list[Any]:
    if type(upstream) is ad.Zero:
        return [ad.Zero(x.aval)]
    return [_primitive.bind(upstream, callee=transposed, transposed=callee)]


def _batch(values: Any, dims: Any, *, callee: Any, transposed: Any) -> tuple[Any, int]:
    (x,), (dim,) = values, dims

    def each(program: Any) -> Callable:
        return jax.vmap(lambda one: core.jaxpr_as_fun(program)(one)[0])

    return adjoint_call(each(callee), each(transposed), jnp.moveaxis(x, dim, 0)), 0


_primitive = core.Primitive(ADJOINT_CALL)
_primitive.def_impl(_run)
_primitive.def_effectful_abstract_eval(
    lambda x, *, callee, transposed: (callee.out_avals[0], callee.effects)
)
ad.deflinear2(_primitive, _transpose)
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=False))
