"""Moves host values onto a mesh of replicas, as global arrays.

A value is *replicated* (every device holds it whole), *stacked* (`[num_replicas, ...]`, each
replica holds its own part), or *sharded* as a partition spec says. Nothing here assumes that a
process can see all of an array.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tpudist.array_types import PyTree
from tpudist.processes import process_agreement
from tpudist.programs import program_digest
from tpudist.xla import integers, internals, random_keys, tree_depth
from tpudist.xla.mesh import ReplicaMesh

_NO_MESH = Mesh(np.empty((), object), ())
_HOST = jax.memory.Space.Host


def replicate(mesh: ReplicaMesh, value: PyTree, *, memory_kind: str | None = None) -> PyTree:
    """Puts every leaf of `value` whole on every device of the mesh; see `shard`."""
    if memory_kind is None and _is_on_the_only_device(mesh, value):
        # What `device_put` would give, in a third of the time.
        return jax.make_array_from_single_device_arrays(value.shape, mesh.replicated, [value])
    return shard(mesh, value, PartitionSpec(), memory_kind=memory_kind)


def shard(
    mesh: ReplicaMesh, value: PyTree, spec: PartitionSpec, *, memory_kind: str | None = None
) -> PyTree:
    """Puts every leaf of `value` on the mesh, split as `spec` says.

    In several processes all must hold the same value, and agree that they do.

    Args:
        mesh: Where to.
        value: Pytree of host values or arrays.
        spec: Mesh axes for the leading dims of each leaf.
        memory_kind: Which of the devices' memories, such as `pinned_host`; by default their own.

    Raises:
        ValueError: The devices have no such memory.
        ProcessesDifferError: The processes place different values, or do something else.
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
    # Later values of this kind JAX compares itself, but for those that are on the mesh already.
    kinds = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
    process_agreement.agree_once(mesh, (spec, kinds), lambda: _describe_values(value, spec))
    try:
        return jax.device_put(value, sharding)
    except AssertionError:  # JAX's, in all processes: their values differ
        process_agreement.agree(mesh, _describe_values(value, spec))
        raise


def _is_on_the_only_device(mesh: ReplicaMesh, value: Any) -> bool:
    if mesh.mesh.size != 1 or not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    sharding, device = value.sharding, mesh.mesh.devices.flat[0]
    return (
        isinstance(sharding, SingleDeviceSharding)
        and sharding.device_set == {device}
        and sharding.memory_kind == mesh.replicated.memory_kind
    )


def _is_local(value: Any) -> bool:
    """Whether a value may be this process's alone: all the others must hold the same."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or program_digest.is_readable(value)


def _describe_values(value: PyTree, spec: PartitionSpec) -> process_agreement.Intention:
    found = jax.tree_util.tree_flatten_with_path(value)[0]
    facts = {
        f"the value{jax.tree_util.keystr(path)}": program_digest.write_value(x) for path, x in found
    }
    how = f"split as {tuple(spec)}" if any(spec) else "whole"
    return process_agreement.Intention(f"{len(found)} value(s) to all devices, {how}", facts)


def memory_kinds(mesh: ReplicaMesh) -> tuple[str, ...]:
    """The memories that the mesh's devices can address, their own first."""
    device = mesh.mesh.devices.flat[0]
    own = device.default_memory().kind
    return (own, *(m.kind for m in device.addressable_memories() if m.kind != own))


def check_memory_kind(mesh: ReplicaMesh, memory_kind: str) -> str:
    """`memory_kind`, if the mesh's devices can address it.

    Raises:
        ValueError: They cannot.
    """
    known = memory_kinds(mesh)
    if memory_kind not in known:
        raise ValueError(
            f"Memory {memory_kind!r} does not exist on {mesh.platform} devices here, which have "
            f"{', '.join(map(repr, known))}. Use one of these, or omit memory_kind."
        )
    return memory_kind


def is_on_host(value: Any) -> bool:
    """Whether an array, or the shape of one, lives in another memory than its devices' own."""
    kind = getattr(getattr(value, "sharding", None), "memory_kind", None)
    return kind is not None and kind.endswith("host")


def match_memory(value: Any, sharding: NamedSharding) -> NamedSharding:
    """`sharding`, in the memory that an array lives in."""
    return sharding.with_memory_kind(value.sharding.memory_kind) if is_on_host(value) else sharding


def to_device(value: jax.Array) -> jax.Array:
    """A traced array that lives in host memory, brought to its devices; any other one as it is."""
    space = getattr(jax.typeof(value), "memory_space", None)
    return jax.device_put(value, jax.memory.Space.Device) if space is _HOST else value


def to_memory_of(value: jax.Array, before: jax.Array) -> jax.Array:
    """A traced array, brought to host memory if that is where the one lived that it replaces."""
    space = getattr(jax.typeof(before), "memory_space", None)
    return jax.device_put(value, _HOST) if space is _HOST else value


def prepare_step_input(mesh: ReplicaMesh, value: Any, *, is_stacked: bool, abstract: bool) -> Any:
    """An input of a step where the step has it: on the mesh, and placed by it.

    A value of NumPy's is not moved (JAX does it with the call), nor a traced one. In a mesh with
    Explicit axes, JAX's default, the type of an array says how it is split, and a replica function
    would be traced for that: the array keeps its place, and loses the type. Where a replica is one
    device, it has all of what is not its own part of something: an array that is split over devices
    is copied to each.

    Args:
        mesh: That of the step.
        value: Any input.
        is_stacked: Whether it may hold one part per replica, and so belong where it is.
        abstract: Whether to give the shape of what is out of reach, rather than to move it.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    sharding = value.sharding
    if sharding.device_set != mesh.device_set:
        if abstract:
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return replicate_from_host(mesh, value)
    if is_stacked or not isinstance(sharding, NamedSharding):
        return value
    if AxisType.Explicit in sharding.mesh.axis_types:
        names = sharding.mesh.axis_names
        kinds = (AxisType.Auto,) * len(names)
        same = Mesh(sharding.mesh.devices, names, axis_types=kinds)  # type: ignore[attr-defined]
        sharding = NamedSharding(same, sharding.spec, memory_kind=sharding.memory_kind)
        value = jax.device_put(value, sharding)
    if mesh.devices_per_replica == 1 and not sharding.is_fully_replicated:
        value = jax.device_put(value, match_memory(value, mesh.replicated))
    return value


def mesh_of(array: jax.Array) -> ReplicaMesh:
    """The mesh of replicas that holds a stacked array."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding), sharding
    mesh = ReplicaMesh(sharding.mesh)  # type: ignore[arg-type]
    replicas = array.shape[0]
    return (
        mesh if replicas == mesh.num_replicas else dataclasses.replace(mesh, deterministic=replicas)
    )


def stack(mesh: ReplicaMesh, local: np.ndarray, *, split_rows: bool = False) -> jax.Array:
    """Gives each replica its part of a stacked host value; returns before the copy has ended.

    Args:
        mesh: Where to.
        local: `[num_local_replicas, ...]`: the parts of this process's replicas, in order.
        split_rows: Also split dim 1 over the mesh's batch axes, if it divides.

    Returns:
        `[num_replicas, ...]`, sharded over the replica axis.
    """
    integers.check_fit(local, "A value for each replica")
    sharding = sharding_of_stack(mesh, local.shape, split_rows=split_rows)
    return from_local(sharding, (mesh.num_replicas, *local.shape[1:]), local, mesh.local_replicas)


def from_local(
    sharding: NamedSharding, shape: tuple[int, ...], local: np.ndarray, positions: tuple[int, ...]
) -> jax.Array:
    """A global array of `shape`, whose rows at `positions` of dim 0 are this process's `local`.

    Its devices take no other rows. They share the memory of `local` where they can; otherwise it is
    being read until the array is ready.
    """
    # A third faster than `make_array_from_process_local_data` and `device_put`, which on 8 devices
    # spend more time in Python than on a batch of 100 KB.
    if len(positions) == shape[0]:
        return make_array(shape, sharding, local.__getitem__)

    def part(index: Any) -> np.ndarray:
        where = positions.index(index[0].start)
        return local[(slice(where, where + index[0].stop - index[0].start), *index[1:])]

    return make_array(shape, sharding, part)


def make_array(
    shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Any], np.ndarray]
) -> jax.Array:
    """Makes a global array of the parts that `read` returns for their indices.

    Same as `jax.make_array_from_callback`, but `jax.transfer_guard` treats it as `jax.device_put`.
    """
    with internals.place_explicitly():
        return jax.make_array_from_callback(shape, sharding, read)


def sharding_of_stack(
    mesh: ReplicaMesh, shape: tuple[int, ...], *, split_rows: bool = False
) -> NamedSharding:
    """The sharding of a stacked array of `shape`; with `split_rows`, see `stack`."""
    if split_rows and len(shape) > 1:
        return _sharding_of_rows(mesh, shape[1])
    return mesh.stacked


@functools.lru_cache(maxsize=256)
def _sharding_of_rows(mesh: ReplicaMesh, num_rows: int) -> NamedSharding:
    parts = int(np.prod([mesh.mesh.shape[axis] for axis in mesh.batch_axes]))
    if not mesh.batch_axes or num_rows % parts:
        return mesh.stacked
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.replica_axis, mesh.batch_axes))


@functools.lru_cache(maxsize=4096)
def stack_counts(mesh: ReplicaMesh, counts: tuple[int, ...]) -> jax.Array:
    """`counts`, one number per replica, as a stacked int32 array `[num_replicas]`."""
    local = np.asarray([counts[i] for i in mesh.local_replicas], np.int32)
    return stack(mesh, local)


def abstract_counts(mesh: ReplicaMesh) -> jax.ShapeDtypeStruct:
    """What `stack_counts` gives, without the numbers."""
    return jax.ShapeDtypeStruct((mesh.num_replicas,), np.int32, sharding=mesh.stacked)


def replicate_from_host(mesh: ReplicaMesh, array: jax.Array) -> jax.Array:
    """Puts an array that lives elsewhere (on one device, as a rule) whole on every device.

    The result shares no memory with `array`, and may be donated.
    """
    if mesh.num_processes > 1 and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return replicate(mesh, np.asarray(array))
    # `device_put` shares memory on the devices that have the array already, may_alias or not.
    return replicate(mesh, array).copy()


def without_mesh() -> contextlib.AbstractContextManager:
    """Takes the mesh in scope out of force: JAX refuses to compute there on other devices."""
    return jax.set_mesh(_NO_MESH)


def value_of_chief(mesh: ReplicaMesh, what: str, value: jax.Array) -> jax.Array:
    """What the first process of the mesh holds as `value`: of one shape and dtype on all.

    Args:
        mesh: The replicas.
        what: Of which it is the value, for people.
        value: This process's own.

    Raises:
        ProcessesDifferError: The others hold another shape or dtype, or do something else.
    """
    if not process_agreement.is_needed(mesh):
        return value
    if not (value.is_fully_addressable or value.is_fully_replicated):
        return value  # in parts, which are each process's own
    value = program_digest.addressable_copy(value)  # of any size: it is done once
    facts = {"its type": f"{value.dtype}[{','.join(map(str, value.shape))}]"}
    intention = process_agreement.Intention(what, facts)
    said = process_agreement.exchange(mesh, intention, program_digest.write_value(value))
    if len(set(said)) == 1:
        return value
    is_key = random_keys.is_key(value)
    local = np.asarray(jax.random.key_data(value) if is_key else value)
    devices = NamedSharding(mesh.mesh, PartitionSpec(mesh.mesh.axis_names))
    shape = (mesh.mesh.size, *local.shape)
    every = make_array(shape, devices, lambda _: local[None])
    first = jax.jit(lambda x: x[0], out_shardings=mesh.replicated)(every)
    chiefs = jax.numpy.asarray(first.addressable_shards[0].data)
    return jax.random.wrap_key_data(chiefs, impl=jax.random.key_impl(value)) if is_key else chiefs
