"""One batch that is in memory, on the replicas at once: without a dataset, in one transfer."""

from typing import Any

import jax
import numpy as np

from tpudist.input.feeds import split_batches
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.input.transfer.to_devices import Parts
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla import tree_depth
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any
_WHAT = "The batch"


def split(mesh: ReplicaMesh, batch: PyTree, global_batch_size: int | None) -> PyTree:
    """Splits the rows of a batch over the replicas; see `Strategy.distribute_batch`."""
    tree_depth.check_depth(batch, _WHAT)
    leaves, treedef = jax.tree.flatten(batch)
    if _are_on_devices(mesh, leaves):
        (num_rows,) = _common_sizes(leaves, treedef, 1)
        each, left_over = divmod(num_rows, mesh.num_replicas)
        if each and not left_over and global_batch_size in (None, num_rows):
            return _put(mesh, leaves, treedef, each)
    arrays, names, treedef = host_batch.as_arrays(batch, _WHAT)
    num_rows = host_batch.common_rows(arrays, names, _WHAT)
    size = num_rows if global_batch_size is None else global_batch_size
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < num_rows:
        raise ValueError(
            f"distribute_batch(global_batch_size={global_batch_size!r}) was called with a batch of "
            f"{num_rows} rows. Give the number of rows of a full batch, or leave it out if this "
            f"batch is full."
        )
    host = HostBatch(arrays, treedef, num_rows)
    if mesh.num_replicas == 1 and size == num_rows:
        leaves = host.take(np.arange(num_rows), copy=False)
        return to_devices.place(mesh, Parts(leaves, treedef, None))
    rows, positions = split_batches.shares(num_rows, int(size), mesh)
    return to_devices.place(mesh, Parts(host.take(positions, copy=False), treedef, rows))


def split_parts(mesh: ReplicaMesh, parts: PyTree) -> PyTree:
    """Splits arrays `[devices, rows, ...]` of `jax.pmap`; see `Strategy.distribute_batch`."""
    leaves, treedef = jax.tree.flatten(parts)
    num_parts, num_rows = _common_sizes(leaves, treedef, 2)
    num_local = len(mesh.local_replicas)
    if not num_parts or num_parts % num_local:
        raise ValueError(
            f"distribute_batch(has_device_dim=True) was called with arrays of {num_parts} parts, "
            f"but this process has {num_local} replicas, which take equal numbers of parts. Give "
            f"arrays [{num_local}, rows, ...], or arrays [rows, ...] without has_device_dim."
        )
    each = num_parts // num_local * num_rows
    if _are_on_devices(mesh, leaves):
        return _put(mesh, leaves, treedef, each, num_leading=2)
    arrays = [
        host_batch.to_jax_dtype(host_batch.as_array(x, _WHAT), _WHAT, copy=False) for x in leaves
    ]
    if mesh.num_replicas == 1:
        local = [x.reshape(each, *x.shape[2:]) for x in arrays]
        return to_devices.place(mesh, Parts(local, treedef, None))
    local = [x.reshape(num_local, each, *x.shape[2:]) for x in arrays]
    return to_devices.place(mesh, Parts(local, treedef, (each,) * mesh.num_replicas))


def _are_on_devices(mesh: ReplicaMesh, leaves: list[Any]) -> bool:
    """Whether all are arrays of JAX, which need not be read in host memory."""
    return (
        mesh.num_processes == 1 and bool(leaves) and all(isinstance(x, jax.Array) for x in leaves)
    )


def _common_sizes(leaves: list[Any], treedef: Any, num_dims: int) -> tuple[int, ...]:
    """The sizes of the first dims, which all arrays have alike."""
    shapes = [np.shape(x) for x in leaves]
    found = {shape[:num_dims] for shape in shapes}
    if len(found) != 1 or len(next(iter(found))) < num_dims:
        names = split_batches.names_of(treedef)
        listed = [f"{n or 'the array'} {list(s)}" for n, s in zip(names, shapes, strict=True)]
        dims = "the rows" if num_dims == 1 else "devices and rows"
        raise ValueError(
            f"The first {num_dims} dim(s) of the arrays of a batch count {dims}, the same in all, "
            f"but there are: {', '.join(listed) or 'no arrays'}. For values that are not rows, "
            f"such as a number for each replica, use "
            f"strategy.experimental_distribute_values_from_function."
        )
    return found.pop()


def _put(
    mesh: ReplicaMesh, leaves: list[Any], treedef: Any, each: int, *, num_leading: int = 1
) -> PyTree:
    """Arrays of JAX with `each` rows for every replica, in one `device_put`."""
    of_all = () if mesh.num_replicas == 1 else (mesh.num_replicas,)
    parts = leaves
    if num_leading == 1 or leaves[0].shape[:2] != (*of_all, each):
        with placement.without_mesh():
            parts = [x.reshape(*of_all, each, *x.shape[num_leading:]) for x in leaves]
    if not of_all:
        shardings = [to_devices.whole_sharding(mesh, x.shape) for x in parts]
        return treedef.unflatten(jax.device_put(parts, shardings))
    shardings = [placement.sharding_of_stack(mesh, x.shape, split_rows=True) for x in parts]
    rows = (each,) * mesh.num_replicas
    return treedef.unflatten([PerReplica(x, rows) for x in jax.device_put(parts, shardings)])
