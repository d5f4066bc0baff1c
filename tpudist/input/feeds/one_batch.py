"""Places one batch that is in memory on the replicas, for `Strategy.distribute_batch`."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from tpudist.array_types import PyTree
from tpudist.input.feeds import batch_agreement, split_batches
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.input.transfer.to_devices import Parts
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla.mesh import ReplicaMesh

_Array: TypeAlias = jax.Array | np.ndarray

_LABEL = "The batch"  # in errors


def split_rows(mesh: ReplicaMesh, batch: PyTree, global_batch_size: int | None) -> PyTree:
    """Splits the rows of a batch over the replicas; see `Strategy.distribute_batch`."""
    # JAX arrays that need no padding go from device to device, without a copy in host memory.
    # The other processes receive an error here as this process's message in the round of
    # `require_same`.
    flat = batch_agreement.call_and_report(mesh, lambda: host_batch.flatten(batch, _LABEL))
    leaves, names, treedef = flat
    if mesh.num_processes == 1 and _are_on_devices(leaves):
        (num_rows,) = _common_sizes(leaves, names, 1)
        rows_per_replica, remainder = divmod(num_rows, mesh.num_replicas)
        is_full = global_batch_size in (None, num_rows)
        if rows_per_replica and not remainder and is_full:
            return _put(mesh, leaves, treedef, rows_per_replica)
    # Through host memory.
    host, size = batch_agreement.call_and_report(
        mesh, lambda: _read_whole(*flat, global_batch_size)
    )
    batch_agreement.require_same(mesh, (host.num_rows, size), lambda: _kinds(names, host.leaves, 1))
    if mesh.num_replicas == 1 and size == host.num_rows:
        leaves = host.take(np.arange(size), copy=False)
        return to_devices.place(mesh, Parts(leaves, host.treedef, None))
    rows, positions = split_batches.rows_and_positions(host.num_rows, size, mesh)
    return to_devices.place(mesh, Parts(host.take(positions, copy=False), host.treedef, rows))


def _read_whole(
    leaves: Sequence[Any], names: list[str], treedef: PyTreeDef, global_batch_size: int | None
) -> tuple[HostBatch, int]:
    """Returns a batch in host memory, and the rows of a full batch."""
    arrays = [host_batch.as_array(x, _LABEL + n) for x, n in zip(leaves, names, strict=True)]
    num_rows = host_batch.common_rows(arrays, names, _LABEL)
    size = num_rows if global_batch_size is None else global_batch_size
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < num_rows:
        raise ValueError(
            f"distribute_batch(global_batch_size={global_batch_size!r}): the batch has {num_rows} "
            "rows. Pass the number of rows of a full batch, or omit global_batch_size if this "
            "batch is full."
        )
    return HostBatch(arrays, treedef, num_rows), int(size)


def split_device_parts(mesh: ReplicaMesh, parts: PyTree) -> PyTree:
    """Splits arrays `[devices, rows, ...]` of `jax.pmap`; see `Strategy.distribute_batch`."""
    leaves, names, treedef, num_rows = batch_agreement.call_and_report(
        mesh, lambda: _read_parts(mesh, parts)
    )
    if mesh.num_processes == 1 and _are_on_devices(leaves):
        return _put(mesh, leaves, treedef, num_rows, num_leading=2)
    rows = batch_agreement.exchange_rows(mesh, num_rows, lambda: _kinds(names, leaves, 2))
    if mesh.num_replicas == 1:
        local = [x.reshape(num_rows, *x.shape[2:]) for x in leaves]
        return to_devices.place(mesh, Parts(local, treedef, None))
    local = [x.reshape(len(mesh.local_replicas), num_rows, *x.shape[2:]) for x in leaves]
    # Parts of other processes may have more rows. Padding repeats a real row.
    positions = np.minimum(np.arange(max(rows)), num_rows - 1)
    local = [x if num_rows == max(rows) else x[:, positions] for x in local]
    return to_devices.place(mesh, Parts(local, treedef, rows))


def _read_parts(mesh: ReplicaMesh, parts: PyTree) -> tuple[list[Any], list[str], PyTreeDef, int]:
    """Returns the arrays, their names and structure, and the rows of each replica here."""
    leaves, names, treedef = host_batch.flatten(parts, _LABEL)
    num_parts, num_rows = _common_sizes(leaves, names, 2)
    num_local = len(mesh.local_replicas)
    if not num_parts or num_parts % num_local:
        raise ValueError(
            f"distribute_batch(has_device_dim=True): the arrays have {num_parts} parts, but this "
            f"process has {num_local} replicas, which take equal numbers of parts. Pass arrays "
            f"[{num_local}, rows, ...], or arrays [rows, ...] without has_device_dim."
        )
    if not num_rows:
        raise ValueError(f"{_LABEL} has no rows. Skip batches without examples.")
    if mesh.num_processes > 1 or not _are_on_devices(leaves):
        leaves = [
            host_batch.to_jax_dtype(host_batch.as_array(x, _LABEL), _LABEL, copy=False)
            for x in leaves
        ]
    return leaves, names, treedef, num_parts // num_local * num_rows


def _are_on_devices(leaves: Sequence[object]) -> bool:
    """Whether all leaves are JAX arrays, which need no copy in host memory."""
    return bool(leaves) and all(isinstance(x, jax.Array) for x in leaves)


def _kinds(names: list[str], arrays: Sequence[_Array], num_dims: int) -> list[str]:
    """Returns descriptions of arrays without their first dims, to compare with other processes."""
    examples = [(x.shape[num_dims:], host_batch.jax_dtype(x.dtype)) for x in arrays]
    described = map(split_batches.describe, examples)
    return [f"{name} {text}".strip() for name, text in zip(names, described, strict=True)]


def _common_sizes(leaves: Sequence[_Array], names: list[str], num_dims: int) -> tuple[int, ...]:
    """Returns the sizes of the first dims; raises `ValueError` if the arrays differ in them."""
    shapes = [np.shape(x) for x in leaves]
    sizes = {shape[:num_dims] for shape in shapes}
    if len(sizes) != 1 or len(next(iter(sizes))) < num_dims:
        listed = [f"{n or 'the array'} {list(s)}" for n, s in zip(names, shapes, strict=True)]
        dims = "the rows" if num_dims == 1 else "devices and rows"
        raise ValueError(
            f"The first {num_dims} dim(s) of the arrays of a batch count {dims}, the same in all, "
            f"but there are: {', '.join(listed) or 'no arrays'}. For values that are not rows, "
            f"such as a number for each replica, use "
            f"strategy.experimental_distribute_values_from_function."
        )
    return sizes.pop()


def _put(
    mesh: ReplicaMesh,
    leaves: Sequence[jax.Array],
    treedef: PyTreeDef,
    num_rows: int,
    *,
    num_leading: int = 1,
) -> PyTree:
    """Places JAX arrays with `num_rows` rows per replica, in one `device_put`.

    `num_leading` is the number of leading dims of the arrays that contain the rows.
    """
    # One replica gets plain arrays `[rows, ...]`, several a leading dim of replicas. Arrays that
    # have these dims already (of `jax.pmap`) are not reshaped: that would be a program of its own.
    replica_dim = () if mesh.num_replicas == 1 else (mesh.num_replicas,)
    parts = leaves
    if num_leading == 1 or leaves[0].shape[:2] != (*replica_dim, num_rows):
        with placement.without_mesh():
            parts = [x.reshape(*replica_dim, num_rows, *x.shape[num_leading:]) for x in leaves]
    if not replica_dim:
        shardings = [to_devices.whole_sharding(mesh, x.shape) for x in parts]
        return treedef.unflatten(jax.device_put(parts, shardings))
    shardings = [placement.sharding_of_stack(mesh, x.shape, split_rows=True) for x in parts]
    rows = (num_rows,) * mesh.num_replicas
    return treedef.unflatten([PerReplica(x, rows) for x in jax.device_put(parts, shardings)])
