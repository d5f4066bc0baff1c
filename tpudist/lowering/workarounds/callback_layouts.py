"""Calls back into Python from replicas of several devices, once for each replica.

JAX lowers `jax.debug.print`, `pure_callback` and `io_callback` where all mesh axes are manual, or
none: in a replica of several devices it refuses them, or fails over two axes. So here each is in a
part of its own in which all axes are manual: the first device of a replica calls, and hands on what
it was told; what is pure each device calls, and has the whole of its operands for it.

XLA fails over a part without operands, as of `jax.debug.print("here")`: it gets a zero. It also
fails over callbacks in a program of replicas that computes nothing else; see `run.outputs.results`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of

_PURE = "pure_callback"
_DEBUG = ("debug_callback", "debug_print")
_CALLBACKS = (_PURE, "io_callback", *_DEBUG)


def lower_callbacks(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """A jaxpr with its callbacks as XLA takes them, those in loops, branches and calls too."""
    return jaxpr_rewrite.rewrite(closed, _is_wanted, _lower)


def _is_wanted(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in _CALLBACKS:
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))


def _lower(eqn: core.JaxprEqn, *operands: jax.Array) -> list[jax.Array]:
    axes = axes_of(AxisType.Auto)

    def call(*operands: jax.Array) -> list[jax.Array]:
        if eqn.invars:
            return list(eqn.primitive.bind(*operands, **eqn.params) or ())
        if eqn.primitive.name in _DEBUG:
            jax.debug.callback(lambda _: eqn.primitive.bind(**eqn.params) and None, *operands)
            return []
        avals: list[Any] = [x.aval for x in eqn.outvars]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        ask = jax.pure_callback if eqn.primitive.name == _PURE else io_callback
        return ask(lambda _: list(eqn.primitive.bind(**eqn.params)), results, *operands)

    def call_once(*operands: jax.Array) -> list[jax.Array]:
        results: list[Any] = [x.aval for x in eqn.outvars]

        def wait(*_: jax.Array) -> list[jax.Array]:
            return [jnp.zeros(x.shape, x.dtype) for x in results]

        found = jax.lax.cond(jax.lax.axis_index(axes) == 0, call, wait, *operands)
        return [_sum_of_one(x, axes) for x in found]

    if not eqn.invars:
        operands = (jnp.zeros(1),)
    return jax.shard_map(
        call if eqn.primitive.name == _PURE else call_once,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=frozenset(axes),
        check_vma=False,
    )(*operands)


def _sum_of_one(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What the first device has, on all of them; the others have zeros."""
    if x.dtype == jnp.bool_:
        return jax.lax.psum(x.astype(jnp.int8), axes).astype(jnp.bool_)
    return jax.lax.psum(x, axes)
