"""Reduces values over replicas and over dims, for `Strategy.reduce` and `reduce_to`.

A PerReplica outside of replica functions is reduced by a small compiled program on the mesh. Inside
a trace (of `merge_call` or `tpudist.function`), the program reduces the part of one replica with
the others. Padding rows of partial batches do not count.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import shorten
from tpudist.options.member_names import format_counts
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
    value: PerReplica | IndexedSlices | ArrayLike,
    axis: int | Sequence[int] | None,
    options: CommunicationOptions | None = None,
) -> jax.Array | IndexedSlices:
    """Combines one leaf over replicas and, with `axis`, over dims of each replica's part."""
    mesh = strategy.replica_mesh
    if isinstance(value, IndexedSlices):
        return _reduce_slices(mesh, op, value, axis)
    value = capture_in_trace(value)
    dims = _parse_axis(axis, value)
    n = mesh.num_replicas
    if isinstance(value, LocalPart):
        return _reduce_part(op, value.array, dims, None, options)
    if not isinstance(value, PerReplica):
        with internals.place_explicitly():
            return _reduce_equal(op, jnp.asarray(value), dims, n)
    if op is ReduceOp.MEAN and dims is None:
        loss_shares.warn_of_mean(value, n)
    array, real = value.array, None
    if value.is_padded:
        assert value.rows is not None
        array, dims = _rows_first(value, dims)
        real = placement.stack_counts(mesh, value.rows)
    if n > 1 and (strategy.cross_device_ops is not None or mesh.block is not None):
        return _reduce_by_ops(strategy, op, array, dims, real, options)
    eager_programs.agree(mesh, "Strategy.reduce", array, op, dims, real is not None)
    return _reduce_stacked(op, dims, mesh.replicated)(array, real)


def _rows_first(
    value: PerReplica, axis: tuple[int, ...] | None
) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns the stacked array with the dim of the real rows first, and the dims to reduce."""
    dim = value.dim
    if value.other_rows:
        raise ValueError(
            f"reduce received {value!r}, in which several dims count examples, and replicas hold "
            "different numbers of examples. Reduce it in the replica function (jnp.sum(value)), "
            "and reduce the sums of the replicas here."
        )
    if axis is None or dim not in axis:
        raise ValueError(
            f"Replicas hold {format_counts(value.rows or ())} real rows along dim {dim}, as in a "
            "partial batch, so their values have no common shape. Also reduce over that dim: "
            f"reduce(op, value, axis={dim})."
        )
    if not dim:
        return value.array, axis
    # The dims that were before it are one later now.
    moved = tuple(0 if a == dim else a + (a < dim) for a in axis)
    return jnp.moveaxis(value.array, 1 + dim, 1), moved


def reduce_all(
    strategy: StrategyBase,
    op: ReduceOp,
    values: Sequence[PerReplica | IndexedSlices | ArrayLike],
    options: CommunicationOptions | None,
) -> list[jax.Array | IndexedSlices]:
    """Reduces several leaves without an axis; see `reduce`. They share collectives if possible."""
    values = [capture_in_trace(x) for x in values]
    ops = strategy.cross_device_ops
    # Concrete values without `ops` run one program each, which JAX caches by shape.
    batch = {
        i: x
        for i, x in enumerate(values)
        if isinstance(x, LocalPart) or (isinstance(x, PerReplica) and ops is not None)
    }
    reduced: dict[int, jax.Array | IndexedSlices] = {
        i: reduce(strategy, op, x, None, options) for i, x in enumerate(values) if i not in batch
    }
    parts = list(batch.values())
    if parts and (ops is None or isinstance(parts[0], LocalPart)):
        arrays = cross_device_ops.all_reduce(op, [x.array for x in parts], options)
        reduced.update(zip(batch, arrays, strict=True))
    elif ops is not None and parts:
        arrays = ops.batch_reduce(op, [(x, x) for x in parts], options)
        reduced.update(zip(batch, arrays, strict=True))
    return [reduced[i] for i in range(len(values))]


def _reduce_by_ops(
    strategy: StrategyBase,
    op: ReduceOp,
    stacked: jax.Array,
    axis: tuple[int, ...] | None,
    real: jax.Array | None,
    options: CommunicationOptions | None,
) -> jax.Array:
    """Reduces like `_reduce_stacked`, by the strategy's cross-device ops or in its fixed order."""

    def function(x: jax.Array, *real: jax.Array) -> list[jax.Array]:
        with context.enter(context.Mode(context.ContextKind.SCOPE, strategy)):
            return [_reduce_part(op, x, axis, real[0] if real else None, options)]

    ops = strategy.cross_device_ops or strategy
    arrays = [stacked] if real is None else [stacked, real]
    key = strategy.replica_mesh, op, axis, options
    return eager_programs.run(ops, key, function, strategy.replica_mesh, arrays)[0]


def _reduce_slices(
    mesh: ReplicaMesh, op: ReduceOp, value: IndexedSlices, axis: object
) -> IndexedSlices:
    """Concatenates the slices of all replicas; see `indexed_slices.all_reduce`."""
    if axis is not None:
        raise ValueError(
            f"reduce(axis={shorten(axis)}) of IndexedSlices is not supported: slices are combined "
            "only over replicas. Use axis=None."
        )
    parts = [capture_in_trace(value.values), capture_in_trace(value.indices)]
    if context.current().frame is not None:
        values, indices = (x.array if isinstance(x, LocalPart) else x for x in parts)
        return indexed_slices.all_reduce(op, IndexedSlices(values, indices, value.dense_shape))
    n = indexed_slices.divisor_of(op, mesh.num_replicas)
    stacked = [
        x if isinstance(x, PerReplica) else stack_parts(mesh, [x] * len(mesh.local_replicas))
        for x in parts
    ]
    values, indices = (gather(mesh, x, 0) for x in stacked)
    return IndexedSlices(values if n == 1 else values / n, indices, value.dense_shape)


def _parse_axis(
    axis: int | Sequence[int] | None, value: PerReplica | ArrayLike
) -> tuple[int, ...] | None:
    if axis is None:
        return None
    sequence = axis if isinstance(axis, tuple | list) else (axis,)
    axes = [int(a) for a in sequence if isinstance(a, int | np.integer) and not isinstance(a, bool)]
    if len(axes) < len(sequence):
        raise TypeError(
            f"reduce(axis={shorten(axis)}): axis must be an int (the dim of the examples, usually "
            "0), a tuple of ints, or None to reduce only over replicas."
        )
    shape = value.shape if isinstance(value, PerReplica) else np.shape(value)
    for a in axes:
        if not -len(shape) <= a < len(shape):
            raise ValueError(
                f"`axis` = {a} out of range for `value` with rank {len(shape)}: each replica holds "
                f"{list(shape)}. Use axis=None to reduce only over replicas."
            )
    return tuple(a % len(shape) for a in axes)


@functools.lru_cache(maxsize=256)
def _reduce_stacked(op: ReduceOp, axis: tuple[int, ...] | None, sharding: jax.sharding.Sharding):
    def program(stacked, real):
        axes = (0,) if axis is None else (0, *(a + 1 for a in axis))
        where = None
        if real is not None:
            mask = jnp.arange(stacked.shape[1])[None] < real[:, None]
            where = mask.reshape(mask.shape + (1,) * (stacked.ndim - 2))
        return _reduce_dims(op, stacked, axes, where)

    program.__name__ = f"reduce_{op.name.lower()}"
    return jax.jit(program, out_shardings=sharding)


def _reduce_dims(
    op: ReduceOp, x: jax.Array, axes: tuple[int, ...], where: jax.Array | None
) -> jax.Array:
    if op is ReduceOp.SUM:
        # Narrow integers keep their dtype, which `jnp.sum` would widen; booleans are counted.
        dtype = None if x.dtype == jnp.bool_ else x.dtype
        return jnp.sum(x, axes, dtype=dtype, where=where)
    if op is ReduceOp.MEAN:
        if where is None:
            return jnp.mean(x, axes)
        # The sum is divided once, by the number of real rows on all replicas. It may be 0.
        count = jnp.sum(jnp.broadcast_to(where, x.shape), axes)
        return jnp.sum(x, axes, where=where) / jnp.maximum(count, 1)
    extreme = jnp.min if op is ReduceOp.MIN else jnp.max
    return extreme(x, axes, where=where, initial=None if where is None else _neutral(op, x.dtype))


def _neutral(op: ReduceOp, dtype: DTypeLike) -> bool | int | float:
    """Returns the neutral element of `MIN` or `MAX` for a dtype, for dims without real rows."""
    smallest = op is ReduceOp.MIN
    if dtype == jnp.bool_:
        return smallest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max if smallest else jnp.iinfo(dtype).min
    return jnp.inf if smallest else -jnp.inf


def _reduce_equal(op: ReduceOp, x: jax.Array, axis: tuple[int, ...] | None, n: int) -> jax.Array:
    """Reduces a value that is equal on n replicas, so that it counts n times."""
    if axis is not None:
        x = _reduce_dims(op, x, axis, None)
    if op is not ReduceOp.SUM:
        return x
    return x * (n if x.dtype == jnp.bool_ else jnp.asarray(n, x.dtype))


def _reduce_part(
    op: ReduceOp,
    x: jax.Array,
    axis: tuple[int, ...] | None,
    real: jax.Array | int | None,
    options: CommunicationOptions | None,
) -> jax.Array:
    """Combines the first `real` rows of the part `x` of each replica; None for all rows."""
    if axis is None:
        return cross_device_ops.reduce(op, x, options)
    if real is None:
        frame = context.current().frame
        if op is not ReduceOp.MEAN or frame is None or not frame.has_partial_batch:
            return cross_device_ops.reduce(op, _reduce_dims(op, x, axis, None), options)
        # In the trace of a partial batch, this number is found because it changes with the size of
        # the batch, and replaced by the real rows of each replica; see `programs/rows/labels`.
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
