"""Copies the parts of a batch to the devices, one part for each replica of this process."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.array_types import PyTree, Shape
from tpudist.input.transfer import host_batch, reused_memory
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla.mesh import ReplicaMesh


class Parts(NamedTuple):
    """The parts of a batch in host memory.

    Attributes:
        leaves: Arrays `[num_local_replicas, ...]`; for one replica, the arrays of the batch.
        treedef: Structure of the batch.
        rows: Number of real rows of every replica. None if dim 0 does not count rows, or all rows
            of the only replica are real.
        borrowed: Whether the source may overwrite the memory when it makes the next batch.
    """

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    rows: tuple[int, ...] | None
    borrowed: bool = False

    def keep(self) -> "Parts":
        """Returns the parts in memory that the source does not overwrite."""
        if not self.borrowed:
            return self
        return self._replace(leaves=list(map(reused_memory.copy_of, self.leaves)), borrowed=False)


def place(mesh: ReplicaMesh, parts: Parts) -> PyTree:
    """Returns the batch with PerReplica arrays; plain arrays for one replica without padding.

    Returns before the copy has ended, unless the memory is borrowed.
    """
    arrays = parts.leaves
    if mesh.platform == "cpu":
        arrays = [reused_memory.align_for_parts(x, mesh.mesh.size) for x in arrays]
    if mesh.num_replicas == 1 and parts.rows is None:
        leaves = [
            placement.make_array(x.shape, whole_sharding(mesh, x.shape), x.__getitem__)
            for x in arrays
        ]
    else:
        rows, split = parts.rows, parts.rows is not None
        leaves = [PerReplica(placement.stack(mesh, x, split_rows=split), rows) for x in arrays]
    if parts.borrowed:
        jax.block_until_ready(leaves)
    return parts.treedef.unflatten(leaves)


def whole_sharding(mesh: ReplicaMesh, shape: Shape) -> NamedSharding:
    """Returns the sharding of a batch `[rows, ...]` of the only replica: split over batch axes."""
    return _whole_sharding(mesh, shape[:1])


@functools.lru_cache(maxsize=256)
def _whole_sharding(mesh: ReplicaMesh, rows: Shape) -> NamedSharding:
    stacked = placement.sharding_of_stack(mesh, (1, *rows), split_rows=True)
    return NamedSharding(mesh.mesh, PartitionSpec(*stacked.spec[1:]))


def part_spec(
    mesh: ReplicaMesh, shape: Shape, dtype: np.dtype, rows: tuple[int, ...] | None
) -> PerReplica | jax.ShapeDtypeStruct:
    """Returns the abstract result of `place` for parts with this shape."""
    dtype = host_batch.jax_dtype(dtype) or dtype
    if mesh.num_replicas == 1 and rows is None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole_sharding(mesh, shape))
    shape = (mesh.num_replicas, *shape)
    sharding = placement.sharding_of_stack(mesh, shape, split_rows=rows is not None)
    return PerReplica(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), rows)
