"""Calls a linear function with a custom transpose, which JAX uses instead of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

# Name of the primitive. Its parameters are two programs: `callee` and `transposed`.
ADJOINT_CALL = "adjoint_call"

_Linear = Callable[[jax.Array], jax.Array]


def adjoint_call(function: _Linear, transposed: _Linear, x: jax.Array) -> jax.Array:
    """Returns `function(x)`. Its transpose is `transposed`, whose transpose is `function`.

    Supports derivatives of any order, forward or reverse, and `jax.vmap`.

    Args:
        function: Linear function of one array.
        transposed: Linear function from the result of `function` to its argument.
        x: Argument of `function`.
    """
    callee = jax.make_jaxpr(function)(x)
    (result,) = callee.out_avals
    return _primitive.bind(x, callee=callee, transposed=jax.make_jaxpr(transposed)(result))


# `callee` and `transposed` are results of `jax.make_jaxpr`, whose class depends on the version of
# JAX, so they are `Any` below.
def _run(x: jax.Array, *, callee: Any, transposed: Any) -> jax.Array:
    (result,) = core.jaxpr_as_fun(callee)(x)
    return result


def _transpose(
    upstream: jax.Array | ad.Zero, x: ad.UndefinedPrimal, *, callee: Any, transposed: Any
) -> list[jax.Array | ad.Zero]:
    if isinstance(upstream, ad.Zero):
        return [ad.Zero(x.aval)]
    return [_primitive.bind(upstream, callee=transposed, transposed=callee)]


def _batch(
    values: tuple[jax.Array], dims: tuple[int], *, callee: Any, transposed: Any
) -> tuple[jax.Array, int]:
    (x,), (dim,) = values, dims

    def vectorize(program: Any) -> _Linear:
        return jax.vmap(lambda x: core.jaxpr_as_fun(program)(x)[0])

    return adjoint_call(vectorize(callee), vectorize(transposed), jnp.moveaxis(x, dim, 0)), 0


_primitive = core.Primitive(ADJOINT_CALL)
_primitive.def_impl(_run)
_primitive.def_effectful_abstract_eval(
    lambda x, *, callee, transposed: (callee.out_avals[0], callee.effects)
)
ad.deflinear2(_primitive, _transpose)
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=False))
