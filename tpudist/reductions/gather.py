"""Concatenates the parts of all replicas (`gather`), and returns them one by one (`local_parts`).

Padding rows of partial batches are removed. The functions work on one leaf; `Strategy.gather` and
`Strategy.experimental_local_results` apply them to pytrees.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.lowering import replica_parts
from tpudist.options import shorten
from tpudist.options.member_names import format_counts
from tpudist.reductions import eager_programs
from tpudist.values import gathered_rows, indexed_slices
from tpudist.values.per_replica import LocalPart, PerReplica
from tpudist.xla.mesh import ReplicaMesh, mesh_of_mirrored
from tpudist.xla.traces import is_traced

_T = TypeVar("_T")


def capture_in_trace(value: _T) -> _T | LocalPart:
    """Returns the LocalPart of a PerReplica that a traced function captures; else `value`."""
    frame = context.current().frame
    if frame is None or not isinstance(value, PerReplica) or isinstance(value, LocalPart):
        return value
    return LocalPart(frame.capture(value))


def is_on_every_replica(mesh: ReplicaMesh, value: object) -> bool:
    """Whether `value` is an array that is equal on the replicas of `mesh`, and counts on each.

    Outside of traces, these are the arrays with a copy on every device of the mesh. In a trace,
    they are the results of replica functions, `reduce` and `gather`, and values of
    Variables. A plain value, such as an array of NumPy or of one device, belongs to no replica.

    Raises:
        ValueError: If a trace computes the value in another way.
    """
    if not isinstance(value, jax.Array):
        return False
    frame = context.current().frame
    if frame is None or not is_traced(value):
        return mesh_of_mirrored(value, of_several=mesh.block is None) == mesh.mesh
    # Outside of the trace, such a value counts on each replica if the arrays that it is computed
    # from do. The trace cannot know that, because one program serves both cases.
    if mesh.num_replicas > 1 and not frame.is_equal_result(value):
        raise ValueError(
            f"gather or experimental_local_results received {jax.typeof(value).str_short()} that a "
            "tpudist.function or merge_call computes, or takes as an argument. It may be one "
            f"value, or one for each of the {mesh.num_replicas} replicas. Pass a result of "
            "strategy.run, reduce or gather, a PerReplica or a Variable; if it is one value, use "
            "it as it is."
        )
    return True


def gather(mesh: ReplicaMesh, value: object, axis: int) -> jax.Array:
    """Concatenates one leaf's parts along dim `axis`, in replica order, without padding rows."""
    indexed_slices.refuse_slices(value, "gather")
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"gather(axis={shorten(axis)}): axis must be one int.")
    value = capture_in_trace(value)
    if not isinstance(value, PerReplica):
        if not is_on_every_replica(mesh, value):
            return value if isinstance(value, jax.Array) else jnp.asarray(value)
        assert isinstance(value, jax.Array)
        dim = _check_dim(value.shape, axis)
        eager_programs.agree(mesh, "Strategy.gather", value, dim)
        return _gather_equal(dim, mesh.num_replicas, mesh.replicated)(value)
    dim = _check_dim(value.shape, axis)
    if isinstance(value, LocalPart):
        return gathered_rows.all_gather(value.array, dim)
    extents = value.extents if value.is_padded else {}
    for other, rows in extents.items():
        if other != dim and len(set(rows)) > 1:
            raise ValueError(
                f"gather along axis {axis} needs parts of equal shape in the other dims, but the "
                f"replicas hold {format_counts(rows)} real rows along dim {other}. Gather along "
                "that dim."
            )
    eager_programs.agree(mesh, "Strategy.gather", value.array, dim, tuple(extents.items()))
    return _gather(dim, tuple(extents.items()), mesh.replicated)(value.array)


def _check_dim(shape: Sequence[int], axis: int) -> int:
    """Returns `axis` as a dim from 0."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"gather(axis={axis}): each replica holds {list(shape)}, which has {len(shape)} "
            "dim(s). Use an axis of the value. A scalar has no dim to concatenate along: add one "
            "in the replica function, with x[None]."
        )
    return int(axis) % len(shape)


@functools.lru_cache(maxsize=1024)
def _gather_equal(dim: int, times: int, sharding: jax.sharding.Sharding):
    """Returns a program that repeats a value, once for each replica."""

    def program(value):
        return jnp.concatenate([value] * times, dim)

    return jax.jit(program, out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _gather(
    dim: int, extents: tuple[tuple[int, tuple[int, ...]], ...], sharding: jax.sharding.Sharding
):
    def program(stacked):
        n, size = stacked.shape[0], stacked.shape[1 + dim]
        # [replica, ..., size, ...] to [..., replica, size, ...]: joins parts in replica order.
        moved = jnp.moveaxis(stacked, 0, dim)
        joined = moved.reshape(*moved.shape[:dim], n * size, *moved.shape[dim + 2 :])
        for other, rows in extents:
            if other == dim:
                joined = _select_real(joined, rows, size, dim)
            else:
                joined = jax.lax.slice_in_dim(joined, 0, rows[0], axis=other)
        return joined

    return jax.jit(program, out_shardings=sharding)


def _select_real(joined: jax.Array, rows: tuple[int, ...], size: int, dim: int) -> jax.Array:
    """Returns the first `rows[i]` of the `size` places of replica i along a dim."""
    real = np.concatenate([i * size + np.arange(r) for i, r in enumerate(rows)])
    return jnp.take(joined, jnp.asarray(real, jnp.int32), axis=dim)


def local_parts(mesh: ReplicaMesh, value: PerReplica) -> tuple[jax.Array, ...]:
    """Returns the parts of this process's replicas, in order, without padding rows."""
    if context.current().frame is not None:
        return _parts_in_trace(mesh, value)
    parts = []
    for i in mesh.local_replicas:
        part = replica_parts.component(mesh, value.array, i)
        for dim, rows in value.extents.items() if value.is_padded else ():
            part = jax.lax.slice_in_dim(part, 0, rows[i], axis=dim)
        parts.append(part)
    return tuple(parts)


def _parts_in_trace(mesh: ReplicaMesh, value: PerReplica) -> tuple[jax.Array, ...]:
    # Processes trace one common program, so a result that depends on the process is impossible.
    if mesh.num_processes > 1:
        raise RuntimeError(
            f"experimental_local_results of {value!r} was called in a function that is traced once "
            "for all replicas (by merge_call or tpudist.function), which is one program for all "
            "processes. Combine the values with strategy.reduce, or return the value and read its "
            "parts after the call."
        )
    return value.values
