"""Reads and replaces what one replica has: its part of a stacked array, or its mirrored copy."""

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpudist.array_types import PyTree
from tpudist.lowering import placement
from tpudist.xla.mesh import ReplicaMesh, mesh_of_mirrored


def component(mesh: ReplicaMesh, stacked: jax.Array, replica: int) -> jax.Array:
    """Returns the part `[...]` of a stacked array of one replica of this process.

    The part is on that replica's devices. No other replica is read, nothing is communicated.
    """
    # The mesh in scope has more devices than one replica, and JAX rejects indexing its part there.
    with placement.without_mesh():
        return _component(mesh, stacked, replica)


def _component(mesh: ReplicaMesh, stacked: jax.Array, replica: int) -> jax.Array:
    by_device = {shard.device: shard.data for shard in stacked.addressable_shards}
    devices = mesh.devices_of(replica)
    if len(devices) == 1:
        shard = by_device[devices[0]]
        # A shard has one row, or the rows of the replicas that share the device, or all rows (a
        # replicated array may be used as a stacked one). In each case the remainder is the row:
        # replicas are spread over devices in order, in blocks of equal size.
        return shard[replica % shard.shape[0]]
    spec = _spec(stacked)
    # A shard of an array that is split over replicas has this replica's row only; one of a
    # replicated array has all rows.
    position = 0 if spec and spec[0] is not None else replica
    return jax.make_array_from_single_device_arrays(
        stacked.shape[1:],
        NamedSharding(_inner_mesh(mesh, replica), PartitionSpec(*spec[1:])),
        [by_device[device][position] for device in devices if device in by_device],
    )


def move_part(mesh: ReplicaMesh, part: PyTree) -> PyTree:
    """Moves a replica's part to the devices of this process's first replica, split as before.

    JAX computes only with arrays on the same devices. A part that is not fully addressable in
    this process stays where it is.
    """
    if not isinstance(part, jax.Array) or isinstance(part, Tracer):
        return part
    devices = mesh.devices_of(mesh.local_replicas[0])
    if not part.is_fully_addressable or part.sharding.device_set == set(devices):
        return part
    sharding = part.sharding
    if len(devices) == 1 or not isinstance(sharding, NamedSharding):
        return jax.device_put(part, devices[0])
    first = _inner_mesh(mesh, mesh.local_replicas[0])
    return jax.device_put(part, NamedSharding(first, sharding.spec))


def copy_of_first_replica(mesh: ReplicaMesh, value: PyTree) -> PyTree:
    """Returns the copy of a mirrored array on the devices to which `move_part` moves parts.

    Returns any other value unchanged.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    on_mesh = isinstance(value.sharding, NamedSharding) and value.sharding.mesh == mesh.mesh
    is_split = mesh.num_replicas > 1 and mesh_of_mirrored(value) is None
    return copy_of(mesh, value, mesh.local_replicas[0]) if on_mesh and not is_split else value


def copy_of(mesh: ReplicaMesh, array: jax.Array, replica: int) -> jax.Array:
    """Returns one replica's copy of a mirrored array, on its devices; it shares the memory."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    devices = mesh.devices_of(replica)
    if len(devices) == 1:
        return by_device[devices[0]]
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(_inner_mesh(mesh, replica), _spec(array)),
        [by_device[device] for device in devices if device in by_device],
    )


def replace_component(
    mesh: ReplicaMesh, stacked: jax.Array, replica: int, value: jax.Array
) -> jax.Array:
    """Returns a stacked array in which one replica of this process has another part."""
    with placement.without_mesh():
        inner = NamedSharding(_inner_mesh(mesh, replica), PartitionSpec(*_spec(stacked)[1:]))
        part = jax.device_put(value, inner)
        # Copies, because a step may donate the new array while the caller still uses the old one.
        old = {shard.device: shard.data.copy() for shard in stacked.addressable_shards}
        parts = {}
        for shard in part.addressable_shards:
            parts[shard.device] = shard.data[None]
            if mesh.block is not None:  # the device also has the parts of other replicas
                row = replica % mesh.block.size
                parts[shard.device] = old[shard.device].at[row].set(shard.data)
        return jax.make_array_from_single_device_arrays(
            stacked.shape, stacked.sharding, list((old | parts).values())
        )


def _inner_mesh(mesh: ReplicaMesh, replica: int) -> Mesh:
    names = mesh.inner_axes
    return Mesh(
        np.asarray(mesh.devices_of(replica)).reshape([mesh.mesh.shape[name] for name in names]),
        names,
        axis_types=(AxisType.Auto,) * len(names),
    )


def _spec(array: jax.Array) -> PartitionSpec:
    sharding = array.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
