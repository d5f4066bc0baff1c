"""Copies the parts of a batch to the devices: one part for each replica of this process."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.array_types import PyTree
from tpudist.input.transfer import host_batch, reused_memory
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla.mesh import ReplicaMesh


class Parts(NamedTuple):
    """The parts of a batch in host memory, `[num_local_replicas, ...]`, or whole for one replica.

    `rows` counts the real rows of every replica, None if dim 0 counts none, or all of the only
    replica's are real; if the memory is
    `borrowed`, the source may fill it with something else as soon as it is asked for more.
    """

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    rows: tuple[int, ...] | None
    borrowed: bool = False


def place(mesh: ReplicaMesh, parts: Parts) -> PyTree:
    """Gives each replica its part of every array; the only one plain arrays, if all is real.

    Returns before the copy has ended, unless the memory is borrowed.
    """
    given = parts.leaves
    if mesh.platform == "cpu":
        given = [reused_memory.align_for_parts(x, mesh.mesh.size) for x in given]
    if mesh.num_replicas == 1 and parts.rows is None:
        leaves = [
            placement.make_array(x.shape, whole_sharding(mesh, x.shape), x.__getitem__)
            for x in given
        ]
    else:
        rows, split = parts.rows, parts.rows is not None
        leaves = [PerReplica(placement.stack(mesh, x, split_rows=split), rows) for x in given]
    if parts.borrowed:
        jax.block_until_ready(leaves)
    return parts.treedef.unflatten(leaves)


def whole_sharding(mesh: ReplicaMesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where a batch `[rows, ...]` of the only replica lives: split over the batch axes."""
    return _whole_sharding(mesh, shape[:1])


@functools.lru_cache(maxsize=256)
def _whole_sharding(mesh: ReplicaMesh, rows: tuple[int, ...]) -> NamedSharding:
    stacked = placement.sharding_of_stack(mesh, (1, *rows), split_rows=True)
    return NamedSharding(mesh.mesh, PartitionSpec(*stacked.spec[1:]))


def part_spec(
    mesh: ReplicaMesh, shape: tuple[int, ...], dtype: np.dtype, rows: tuple[int, ...] | None
) -> PerReplica | jax.ShapeDtypeStruct:
    """What `place` gives for parts of this shape."""
    dtype = host_batch.jax_dtype(dtype) or dtype
    if mesh.num_replicas == 1 and rows is None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole_sharding(mesh, shape))
    shape = (mesh.num_replicas, *shape)
    sharding = placement.sharding_of_stack(mesh, shape, split_rows=rows is not None)
    return PerReplica(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), rows)
