"""Copies the parts of a batch to the devices: one part for each replica of this process."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.values import PerReplica
from tpudist.xla import placement
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


class Parts(NamedTuple):
    """The parts of a batch in host memory, `[num_local_replicas, ...]`, or whole for one replica.

    `rows` counts the real rows of every replica, None if dim 0 counts none; if the memory is
    `borrowed`, the source may fill it with something else as soon as it is asked for more.
    """

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    rows: tuple[int, ...] | None
    borrowed: bool = False


def place(mesh: ReplicaMesh, parts: Parts) -> PyTree:
    """Gives each replica its part of every array; plain arrays if it is the only replica.

    Returns before the copy has ended, unless the memory is borrowed.
    """
    if mesh.num_replicas == 1:
        leaves = [
            jax.make_array_from_process_local_data(whole_sharding(mesh, x.shape), x, x.shape)
            for x in parts.leaves
        ]
    else:
        rows, split = parts.rows, parts.rows is not None
        leaves = [
            PerReplica(placement.stack(mesh, x, split_rows=split), rows) for x in parts.leaves
        ]
    if parts.borrowed:
        jax.block_until_ready(leaves)
    return parts.treedef.unflatten(leaves)


def whole_sharding(mesh: ReplicaMesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where a batch `[rows, ...]` of the only replica lives: split over the batch axes."""
    stacked = placement.stacked_sharding(mesh, (1, *shape), split_rows=True)
    return NamedSharding(mesh.mesh, PartitionSpec(*stacked.spec[1:]))


def part_spec(
    mesh: ReplicaMesh, shape: tuple[int, ...], dtype: np.dtype, rows: tuple[int, ...] | None
) -> PerReplica | jax.ShapeDtypeStruct:
    """What `place` gives for parts of this shape."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if mesh.num_replicas == 1:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole_sharding(mesh, shape))
    shape = (mesh.num_replicas, *shape)
    sharding = placement.stacked_sharding(mesh, shape, split_rows=rows is not None)
    return PerReplica(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), rows)
