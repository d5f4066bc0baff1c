"""Moves host values onto a mesh of replicas, as global arrays.

A value is *replicated* (every device has a full copy), *stacked* (`[num_replicas, ...]`, each
replica has its own part), or *sharded* by a partition spec. The functions also work if a process
addresses only some of the devices. `replica_parts` reads the part of one replica.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tpudist.array_types import PyTree, Shape
from tpudist.processes import process_agreement
from tpudist.programs import program_digest
from tpudist.xla import integers, internals, random_keys, tree_depth
from tpudist.xla.array_attributes import dtype_of
from tpudist.xla.mesh import ReplicaMesh

_NO_MESH = Mesh(np.empty((), object), ())
_HOST = jax.memory.Space.Host


def replicate(mesh: ReplicaMesh, value: PyTree, *, memory_kind: str | None = None) -> PyTree:
    """Copies every leaf of `value` to every device of the mesh; see `shard`."""
    if memory_kind is None and _is_on_the_only_device(mesh, value):
        # Same array as from `device_put`, in a third of the time.
        return jax.make_array_from_single_device_arrays(value.shape, mesh.replicated, [value])
    return shard(mesh, value, PartitionSpec(), memory_kind=memory_kind)


def shard(
    mesh: ReplicaMesh, value: PyTree, spec: PartitionSpec, *, memory_kind: str | None = None
) -> PyTree:
    """Puts every leaf of `value` on the mesh, split according to `spec`.

    With several processes, all must pass the same value. They compare it before it is placed.

    Args:
        mesh: The replicas.
        value: Pytree of host values or arrays.
        spec: Mesh axes for the leading dims of each leaf.
        memory_kind: Memory of the devices, such as `pinned_host`; their default memory if None.

    Raises:
        ValueError: If the devices have no such memory.
        ProcessesDifferError: If the processes place different values, or call something else.
    """
    tree_depth.check_depth(value, "A value to be replicated")
    leaves = jax.tree.leaves(value)
    for x in leaves:
        integers.check_fit(x, "A value to be replicated")
    sharding = NamedSharding(mesh.mesh, spec)
    if memory_kind is not None:
        sharding = sharding.with_memory_kind(check_memory_kind(mesh, memory_kind))
    if not process_agreement.is_needed(mesh) or not any(map(_is_local, leaves)):
        return jax.device_put(value, sharding)
    # Only the first value of each signature (spec, shapes and dtypes) is compared here. This also
    # catches a process that places something else. `device_put` compares later values of the same
    # signature, which is cheaper; it does not compare values that are already on the mesh.
    # A leaf without a dtype is a Python number.
    signature = tuple((np.shape(x), dtype_of(x, type(x))) for x in leaves)
    process_agreement.agree_once(mesh, (spec, signature), lambda: _describe_values(value, spec))
    try:
        return jax.device_put(value, sharding)
    except AssertionError:
        # JAX raises this in every process if their values differ, so every process arrives here
        # and can take part in the exchange that finds out which value it is.
        process_agreement.agree(mesh, _describe_values(value, spec))
        raise


def _is_on_the_only_device(mesh: ReplicaMesh, value: PyTree) -> bool:
    if mesh.mesh.size != 1 or not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    sharding, device = value.sharding, mesh.mesh.devices.flat[0]
    return (
        isinstance(sharding, SingleDeviceSharding)
        and sharding.device_set == {device}
        and sharding.memory_kind == mesh.replicated.memory_kind
    )


def _is_local(value: object) -> bool:
    """Whether a value belongs to this process only, so that another process may have another."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or program_digest.is_readable(value)


def _describe_values(value: PyTree, spec: PartitionSpec) -> process_agreement.Intention:
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    facts = {
        f"the value{jax.tree_util.keystr(path)}": program_digest.write_value(x)
        for path, x in leaves
    }
    layout = f"split as {tuple(spec)}" if any(spec) else "whole"
    return process_agreement.Intention(f"{len(leaves)} value(s) to all devices, {layout}", facts)


def memory_kinds(mesh: ReplicaMesh) -> tuple[str, ...]:
    """Returns the memories that the mesh's devices can address, their default memory first."""
    device = mesh.mesh.devices.flat[0]
    default = device.default_memory().kind
    return (default, *(m.kind for m in device.addressable_memories() if m.kind != default))


def check_memory_kind(mesh: ReplicaMesh, memory_kind: str) -> str:
    """Returns `memory_kind`.

    Raises:
        ValueError: If the mesh's devices cannot address that memory.
    """
    known = memory_kinds(mesh)
    if memory_kind not in known:
        raise ValueError(
            f"Memory {memory_kind!r} does not exist on {mesh.platform} devices here, which have "
            f"{', '.join(map(repr, known))}. Use one of these, or omit memory_kind."
        )
    return memory_kind


def is_on_host(value: object) -> bool:
    """Whether an array, or the shape of one, is in host memory rather than on its devices."""
    return _host_memory_kind(value) is not None


def _host_memory_kind(value: object) -> str | None:
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return None
    kind = None if value.sharding is None else value.sharding.memory_kind
    return kind if kind is not None and kind.endswith("host") else None


def match_memory(value: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """Returns `sharding` with the memory kind of an array."""
    kind = _host_memory_kind(value)
    return sharding if kind is None else sharding.with_memory_kind(kind)


def to_device(value: jax.Array) -> jax.Array:
    """Copies a traced array from host memory to its devices; returns any other array unchanged."""
    return jax.device_put(value, jax.memory.Space.Device) if _is_traced_on_host(value) else value


def to_memory_of(value: jax.Array, before: jax.Array) -> jax.Array:
    """Moves a traced array to host memory if `before`, the array that it replaces, was there."""
    return jax.device_put(value, _HOST) if _is_traced_on_host(before) else value


def _is_traced_on_host(value: jax.Array) -> bool:
    aval = jax.typeof(value)
    return isinstance(aval, ShapedArray) and aval.memory_space is _HOST


def prepare_step_input(
    mesh: ReplicaMesh, value: PyTree, *, is_stacked: bool, abstract: bool
) -> PyTree:
    """Returns one input of a step, moved to the mesh if it is a `jax.Array` elsewhere.

    Returns NumPy values unchanged, because JAX moves them with the call. Also returns traced
    values unchanged.

    Args:
        mesh: Mesh of the step.
        value: An input.
        is_stacked: Whether the input may have one part per replica and so stays where it is.
        abstract: Whether to return only the shape of an array that is not on the mesh.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    sharding = value.sharding
    if sharding.device_set != mesh.device_set:
        if abstract:
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return copy_to_mesh(mesh, value)
    if is_stacked or not isinstance(sharding, NamedSharding):
        return value
    # With Explicit axes, JAX's default, the split of an array is part of its type, and a replica
    # function would be traced for that type. So the same devices get a mesh with Auto axes: the
    # data stays in place and only the type changes.
    if AxisType.Explicit in sharding.mesh.axis_types:
        assert isinstance(sharding.mesh, Mesh)  # the mesh of a concrete array is not abstract
        names = sharding.mesh.axis_names
        auto = (AxisType.Auto,) * len(names)
        auto_mesh = Mesh(sharding.mesh.devices, names, axis_types=auto)
        sharding = NamedSharding(auto_mesh, sharding.spec, memory_kind=sharding.memory_kind)
        value = jax.device_put(value, sharding)
    # A replica of one device sees complete arrays, so an array that is split is copied to each.
    if mesh.devices_per_replica == 1 and not sharding.is_fully_replicated:
        value = jax.device_put(value, match_memory(value, mesh.replicated))
    return value


def mesh_of(array: jax.Array) -> ReplicaMesh:
    """Returns the mesh of replicas of a stacked array."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding), sharding
    assert isinstance(sharding.mesh, Mesh), sharding
    mesh = ReplicaMesh(sharding.mesh)
    # More rows than places along the replica axis: several replicas share each device.
    if array.shape[0] != mesh.num_replicas:
        return dataclasses.replace(mesh, deterministic=array.shape[0])
    return mesh


def stack(mesh: ReplicaMesh, local: np.ndarray, *, split_rows: bool = False) -> jax.Array:
    """Sends each replica its part of a stacked host value; returns before the copy has ended.

    Args:
        mesh: The replicas.
        local: Parts of this process's replicas, in order: `[num_local_replicas, ...]`.
        split_rows: Whether to split dim 1 over the mesh's batch axes too, if they divide it.

    Returns:
        Array `[num_replicas, ...]`, sharded over the replica axis.
    """
    integers.check_fit(local, "A value for each replica")
    sharding = sharding_of_stack(mesh, local.shape, split_rows=split_rows)
    return from_local(sharding, (mesh.num_replicas, *local.shape[1:]), local, mesh.local_replicas)


def from_local(
    sharding: NamedSharding, shape: Shape, local: np.ndarray, positions: tuple[int, ...]
) -> jax.Array:
    """Returns a global array of `shape` whose rows at `positions` of dim 0 come from `local`.

    The devices of this process read no other rows. They share the memory of `local` if they can.
    Otherwise do not change `local` before the array is ready, because it is still being read.
    """
    # A third faster than `make_array_from_process_local_data` and `device_put`, which on 8 devices
    # spend more time in Python than on a batch of 100 KB.
    if len(positions) == shape[0]:
        return make_array(shape, sharding, local.__getitem__)

    # `positions` is sorted and a device has consecutive rows, so they are consecutive in `local`.
    def read(index: tuple[slice, ...]) -> np.ndarray:
        first = positions.index(index[0].start)
        return local[(slice(first, first + index[0].stop - index[0].start), *index[1:])]

    return make_array(shape, sharding, read)


def make_array(shape: Shape, sharding: NamedSharding, read: Callable[..., np.ndarray]) -> jax.Array:
    """Returns a global array of the parts that `read` returns for their tuples of slices.

    Same as `jax.make_array_from_callback`, but `jax.transfer_guard` treats it as `jax.device_put`.
    """
    with internals.place_explicitly():
        return internals.make_array(shape, sharding, read)


def sharding_of_stack(
    mesh: ReplicaMesh, shape: Shape, *, split_rows: bool = False
) -> NamedSharding:
    """Returns the sharding of a stacked array of `shape`; see `stack` for `split_rows`."""
    if split_rows and len(shape) > 1:
        return _sharding_of_rows(mesh, shape[1])
    return mesh.stacked


@functools.lru_cache(maxsize=256)
def _sharding_of_rows(mesh: ReplicaMesh, num_rows: int) -> NamedSharding:
    parts = math.prod(mesh.mesh.shape[axis] for axis in mesh.batch_axes)
    if not mesh.batch_axes or num_rows % parts:
        return mesh.stacked
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.replica_axis, mesh.batch_axes))


# A loop passes the same counts in every step. The cached arrays are small.
@functools.lru_cache(maxsize=4096)
def stack_counts(mesh: ReplicaMesh, counts: tuple[int, ...]) -> jax.Array:
    """Returns `counts`, one number per replica, as a stacked int32 array `[num_replicas]`."""
    local = np.asarray([counts[i] for i in mesh.local_replicas], np.int32)
    return stack(mesh, local)


def abstract_counts(mesh: ReplicaMesh) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of the result of `stack_counts`."""
    return jax.ShapeDtypeStruct((mesh.num_replicas,), np.int32, sharding=mesh.stacked)


def copy_to_mesh(mesh: ReplicaMesh, array: jax.Array) -> jax.Array:
    """Copies an array from elsewhere (usually from one device) to every device of the mesh.

    The result shares no memory with `array`, so it may be donated.
    """
    # JAX cannot copy an array of this process's devices to those of other processes. But each can
    # place its own host copy, except of a random key, which has no NumPy form.
    if mesh.num_processes > 1 and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return replicate(mesh, np.asarray(array))
    # `device_put` shares memory on devices that have the array already, even with may_alias=False.
    return replicate(mesh, array).copy()


def without_mesh() -> contextlib.AbstractContextManager:
    """Returns a context without a mesh; in the context of a mesh, JAX rejects other devices."""
    return jax.set_mesh(_NO_MESH)


def value_of_chief(mesh: ReplicaMesh, owner: str, value: jax.Array) -> jax.Array:
    """Returns the `value` of the first process of the mesh, in every process.

    Args:
        mesh: The replicas.
        owner: Text for errors, such as the name of the Variable that has the value.
        value: Value of this process. All processes must pass the same shape and dtype.

    Raises:
        ProcessesDifferError: If shapes or dtypes differ, or a process calls something else.
    """
    if not process_agreement.is_needed(mesh):
        return value
    if not (value.is_fully_addressable or value.is_fully_replicated):
        return value  # split over processes, so there is no other copy of a part
    value = program_digest.addressable_copy(value)  # even of a large array: this happens once
    facts = {"its type": f"{value.dtype}[{','.join(map(str, value.shape))}]"}
    intention = process_agreement.Intention(owner, facts)
    # The exchange compares digests. Only if they differ do the processes send the value itself,
    # and all take the same branch because all see the same digests.
    digests = process_agreement.exchange(mesh, intention, program_digest.write_value(value))
    if len(set(digests)) == 1:
        return value
    is_key = random_keys.is_key(value)
    local = np.asarray(jax.random.key_data(value) if is_key else value)
    devices = NamedSharding(mesh.mesh, PartitionSpec(mesh.mesh.axis_names))
    shape = (mesh.mesh.size, *local.shape)
    values = make_array(shape, devices, lambda _: local[None])  # one row per device
    # Row 0 belongs to the first process, so this small program sends its value to all.
    first = jax.jit(lambda x: x[0], out_shardings=mesh.replicated)(values)
    chosen = jnp.asarray(first.addressable_shards[0].data)
    return jax.random.wrap_key_data(chosen, impl=jax.random.key_impl(value)) if is_key else chosen
