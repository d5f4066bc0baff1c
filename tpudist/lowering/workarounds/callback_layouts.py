"""Calls back into Python from replicas of several devices.

In a replica of several devices, JAX raises an error for `pure_callback` and `io_callback`, because
some mesh axes are manual and others are not. It also raises one for `jax.debug.print` if a replica
has two mesh axes, and XLA rejects a print without operands. So each callback gets an inner
shard_map in which all axes are manual. The first device of a replica calls Python and sends the
result to the others. A pure callback has no effects, so it runs on every device, each with the
complete operands, and its result is not sent.

XLA also fails if a program of replicas has only callbacks; see `TracedStep._finish` in
`run/outputs/results.py`.
"""

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.array_attributes import array_aval
from tpudist.xla.axis_constraint import axes_of

_PURE = "pure_callback"
_DEBUG = ("debug_callback", "debug_print")
_CALLBACKS = (_PURE, "io_callback", *_DEBUG)


def lower_callbacks(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Puts each callback into a fully manual shard_map, at all depths."""
    return jaxpr_rewrite.rewrite(closed, _needs_lowering, _lower)


def _needs_lowering(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in _CALLBACKS:
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))


def _lower(eqn: core.JaxprEqn, *operands: jax.Array) -> list[jax.Array]:
    axes = axes_of(AxisType.Auto)
    avals = [array_aval(x) for x in eqn.outvars]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]

    # XLA fails for a shard_map without operands, as for `jax.debug.print("here")`. So the shard_map
    # gets a zero, and calls a new callback, which ignores the zero and binds the original one.
    def print_original(_: jax.Array) -> None:
        eqn.primitive.bind(**eqn.params)

    def bind_original(_: jax.Array) -> list[jax.Array]:
        return list(eqn.primitive.bind(**eqn.params))

    def call(*operands: jax.Array) -> list[jax.Array]:
        if eqn.invars:
            return list(eqn.primitive.bind(*operands, **eqn.params) or ())
        if eqn.primitive.name in _DEBUG:
            jax.debug.callback(print_original, *operands)
            return []
        callback = jax.pure_callback if eqn.primitive.name == _PURE else io_callback
        return callback(bind_original, shapes, *operands)

    def call_once(*operands: jax.Array) -> list[jax.Array]:
        def skip(*_: jax.Array) -> list[jax.Array]:
            return [jnp.zeros(x.shape, x.dtype) for x in shapes]

        results = jax.lax.cond(jax.lax.axis_index(axes) == 0, call, skip, *operands)
        return [_broadcast_from_first(x, axes) for x in results]

    if not eqn.invars:
        operands = (jnp.zeros(1),)
    return jax.shard_map(
        call if eqn.primitive.name == _PURE else call_once,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=frozenset(axes),
        check_vma=False,
    )(*operands)


def _broadcast_from_first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # All devices but the first contribute zeros, so the sum is the first device's value. All axes
    # are manual here, so XLA:CPU accepts sums of 16-bit and complex numbers.
    if x.dtype == jnp.bool_:
        return jax.lax.psum(x.astype(jnp.int8), axes).astype(jnp.bool_)
    return jax.lax.psum(x, axes)
