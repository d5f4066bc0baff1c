"""Makes one value of what the replicas hold: reduce, gather, local parts.

Each works on a PerReplica outside of replica functions, as a small compiled program on the mesh,
and on the part of one replica inside the trace of `merge_call`. Padding rows count nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import shorten
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops, eager_programs
from tpudist.reductions.gather import capture_in_trace, gather
from tpudist.values import indexed_slices, loss_shares
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import LocalPart, PerReplica
from tpudist.values.stacked_values import stack_parts
from tpudist.xla import internals
from tpudist.xla.communication_options import CommunicationOptions
from tpudist.xla.mesh import ReplicaMesh


def reduce(
    strategy: StrategyBase,
    op: ReduceOp,
    value: Any,
    axis: Any,
    options: CommunicationOptions | None = None,
) -> jax.Array:
    """Combines one leaf over replicas and, with `axis`, over dims of each replica's part."""
    mesh = strategy.replica_mesh
    if isinstance(value, IndexedSlices):
        return _reduce_slices(mesh, op, value, axis)  # type: ignore[return-value]
    value = capture_in_trace(value)
    axis = _parse_axis(axis, value)
    n = mesh.num_replicas
    if isinstance(value, LocalPart):
        return _reduce_part(op, value.array, axis, None, options)
    if not isinstance(value, PerReplica):
        with internals.place_explicitly():
            return _reduce_equal(op, jnp.asarray(value), axis, n)
    if op is ReduceOp.MEAN and axis is None:
        loss_shares.warn_of_mean(value, n)
    array, real = value.array, None
    if value.is_padded:
        array, axis = _rows_first(value, axis)
        real = placement.stack_counts(mesh, value.rows)  # type: ignore[arg-type]
    if n > 1 and (strategy.cross_device_ops is not None or mesh.block is not None):
        return _reduce_by_choice(strategy, op, array, axis, real, options)
    eager_programs.agree(mesh, "Strategy.reduce", array, op, axis, real is not None)
    return _reduce_stacked(op, axis, mesh.replicated)(array, real)


def _rows_first(value: PerReplica, axis: tuple[int, ...] | None) -> tuple[jax.Array, tuple]:
    """The stacked array with the dim of the real rows first, and the dims to reduce over."""
    dim = value.dim
    if value.other_rows:
        raise ValueError(
            f"reduce received {value!r}, in which several dims count examples, and replicas hold "
            "different numbers of examples. Reduce it in the replica function (jnp.sum(value)), "
            "and reduce the sums of the replicas here."
        )
    if axis is None or dim not in axis:
        raise ValueError(
            f"Replicas hold {value.rows} real rows along dim {dim}, as in a partial batch, so "
            "their values have no common shape. Also reduce over that dim: reduce(op, value, "
            f"axis={dim})."
        )
    if not dim:
        return value.array, axis
    # The dims that were before it are one further now.
    moved = tuple(0 if a == dim else a + (a < dim) for a in axis)
    return jnp.moveaxis(value.array, 1 + dim, 1), moved


def reduce_all(
    strategy: StrategyBase, op: ReduceOp, values: list[Any], options: CommunicationOptions | None
) -> list[Any]:
    """As `reduce` without an axis, of several leaves: what can travel together does."""
    values = [capture_in_trace(x) for x in values]
    ops = strategy.cross_device_ops
    together = [
        i
        for i, x in enumerate(values)
        if isinstance(x, LocalPart) or (isinstance(x, PerReplica) and ops is not None)
    ]
    results: list[Any] = [
        None if i in together else reduce(strategy, op, x, None, options)
        for i, x in enumerate(values)
    ]
    if together:
        some = [values[i] for i in together]
        if ops is None or isinstance(some[0], LocalPart):
            done = cross_device_ops.all_reduce(op, [x.array for x in some], options)
        else:
            done = ops.batch_reduce(op, [(x, x) for x in some], options)
        for i, x in zip(together, done, strict=True):
            results[i] = x
    return results


def _reduce_by_choice(
    strategy: StrategyBase,
    op: ReduceOp,
    stacked: jax.Array,
    axis: Any,
    real: Any,
    options: CommunicationOptions | None,
) -> jax.Array:
    """As `_reduce_stacked`, by the strategy's cross-device ops, or in the order that it keeps."""

    def function(x, *real):
        with context.enter(context.Mode(context.ContextKind.SCOPE, strategy)):
            return [_reduce_part(op, x, axis, real[0] if real else None, options)]

    ops = strategy.cross_device_ops or strategy
    arrays = [stacked] if real is None else [stacked, real]
    key = strategy.replica_mesh, op, axis, options
    return eager_programs.run(ops, key, function, strategy.replica_mesh, arrays)[0]


def _reduce_slices(mesh: ReplicaMesh, op: ReduceOp, value: IndexedSlices, axis: Any) -> Any:
    """The slices of all replicas behind each other; see `indexed_slices.all_reduce`."""
    if axis is not None:
        raise ValueError(
            f"reduce(axis={shorten(axis)}) of IndexedSlices is not supported: slices are combined "
            "only over replicas. Use axis=None."
        )
    parts = [capture_in_trace(value.values), capture_in_trace(value.indices)]
    if context.current().frame is not None:
        values, indices = (x.array if isinstance(x, LocalPart) else x for x in parts)
        return indexed_slices.all_reduce(op, IndexedSlices(values, indices, value.dense_shape))
    n = indexed_slices.check_op(op, mesh.num_replicas)
    stacked = [
        x if isinstance(x, PerReplica) else stack_parts(mesh, [x] * len(mesh.local_replicas))
        for x in parts
    ]
    values, indices = (gather(mesh, x, 0) for x in stacked)
    return IndexedSlices(values if n == 1 else values / n, indices, value.dense_shape)


def _parse_axis(axis: Any, value: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes):
        raise TypeError(
            f"reduce(axis={shorten(axis)}): axis must be an int (the dim of the examples, usually "
            "0), a tuple of ints, or None to reduce only over replicas."
        )
    shape = tuple(np.shape(value)) if not hasattr(value, "shape") else tuple(value.shape)
    for a in axes:
        if not -len(shape) <= a < len(shape):
            raise ValueError(
                f"`axis` = {a} out of range for `value` with rank {len(shape)}: each replica holds "
                f"{list(shape)}. Use axis=None to reduce only over replicas."
            )
    return tuple(int(a) % len(shape) for a in axes)


@functools.lru_cache(maxsize=256)
def _reduce_stacked(op: ReduceOp, axis: tuple[int, ...] | None, sharding: Any):
    def program(stacked, real):
        axes = (0,) if axis is None else (0, *(a + 1 for a in axis))
        where = None
        if real is not None:
            mask = jnp.arange(stacked.shape[1])[None] < real[:, None]
            where = mask.reshape(mask.shape + (1,) * (stacked.ndim - 2))
        return _reduce_dims(op, stacked, axes, where)

    program.__name__ = f"reduce_{op.name.lower()}"
    return jax.jit(program, out_shardings=sharding)


def _reduce_dims(op: ReduceOp, x: jax.Array, axes: tuple[int, ...], where) -> jax.Array:
    if op is ReduceOp.SUM:
        dtype = None if x.dtype == jnp.bool_ else x.dtype
        return jnp.sum(x, axes, dtype=dtype, where=where)
    if op is ReduceOp.MEAN:
        if where is None:
            return jnp.mean(x, axes)
        # Divided once at the end: the true number of rows, empty replicas included.
        count = jnp.sum(jnp.broadcast_to(where, x.shape), axes)
        return jnp.sum(x, axes, where=where) / jnp.maximum(count, 1)
    extreme = jnp.min if op is ReduceOp.MIN else jnp.max
    return extreme(x, axes, where=where, initial=None if where is None else _least(op, x.dtype))


def _least(op: ReduceOp, dtype: Any) -> Any:
    """Returns the neutral element of `MIN` or `MAX` for a dtype, for dims without real rows."""
    smallest = op is ReduceOp.MIN
    if dtype == jnp.bool_:
        return smallest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max if smallest else jnp.iinfo(dtype).min
    return jnp.inf if smallest else -jnp.inf


def _reduce_equal(op: ReduceOp, x: jax.Array, axis, n: int) -> jax.Array:
    """A value that is equal on n replicas counts n times."""
    if axis is not None:
        x = _reduce_dims(op, x, axis, None)
    if op is not ReduceOp.SUM:
        return x
    return x * (n if x.dtype == jnp.bool_ else jnp.asarray(n, x.dtype))


def _reduce_part(
    op: ReduceOp, x: jax.Array, axis, real: Any, options: CommunicationOptions | None
) -> jax.Array:
    """Combines the part `x` of one replica, of which `real` rows count, with the others."""
    if axis is None:
        return cross_device_ops.reduce(op, x, options)
    if real is None:
        frame = context.current().frame
        if op is not ReduceOp.MEAN or frame is None or not frame.has_partial_batch:
            return cross_device_ops.reduce(op, _reduce_dims(op, x, axis, None), options)
        real = x.shape[0]
    mask = (jnp.arange(x.shape[0]) < real).reshape(-1, *(1,) * (x.ndim - 1))
    if op is not ReduceOp.MEAN:
        return cross_device_ops.reduce(op, _reduce_dims(op, x, axis, mask), options)
    # A mean of the replicas' means is wrong if they have different numbers of real rows. So sums
    # and counts travel, in one collective, and are divided at the end.
    count = jnp.sum(jnp.broadcast_to(mask, x.shape), axis)
    total, count = cross_device_ops.all_reduce(
        ReduceOp.SUM, [_reduce_dims(ReduceOp.SUM, x, axis, mask), count], options
    )
    return total / jnp.maximum(count, 1)
