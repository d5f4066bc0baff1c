"""Places the shapes of arrays on a mesh of other devices, without their data.

The planner and `Strategy.on` use this to compile a step for devices that this process lacks.
"""

from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from tpudist.array_types import Shape
from tpudist.xla import random_keys
from tpudist.xla.mesh import ReplicaMesh


class _Variable(Protocol):
    """A Variable or a captured PerReplica; their classes are in a higher layer."""

    _value: jax.Array

    @property
    def name(self) -> str: ...
    @property
    def on_read(self) -> bool: ...


def array_on(
    mesh: ReplicaMesh,
    x: jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic,
    name: str,
    home: ReplicaMesh | None = None,
) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array with a sharding on `mesh`.

    An array that was split keeps its partition spec; any other is replicated. An array that is
    not on the devices of `home` is replicated too, because `run` would copy it to all devices.
    """
    if isinstance(x, np.ndarray | np.generic):
        # Without a sharding: JAX moves the value with the call to where the program wants it.
        # The kinds are bool, int, uint, float and complex: not "V" of bfloat16 and similar types.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype.kind in "biufc" else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype)
    sharding: Sharding | None = x.sharding
    if isinstance(x, jax.Array) and home is not None and sharding is not None:
        if sharding.device_set not in (home.device_set, mesh.device_set):
            sharding = None
    placed = mesh.replicated
    if isinstance(sharding, NamedSharding):
        placed = sharding_on(mesh, sharding, name)
        check_divides(placed, x.shape, name)
    weak = not random_keys.is_key(x) and bool(x.weak_type)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=weak)


def sharding_on(mesh: ReplicaMesh, sharding: NamedSharding, name: str) -> NamedSharding:
    """Returns the same partition spec on `mesh`, in the same kind of memory.

    Raises:
        ValueError: If the spec has an axis that `mesh` does not have.
    """
    named = {axis for part in sharding.spec if part for axis in np.atleast_1d(part)}
    unknown = sorted(named - set(mesh.mesh.axis_names))
    if unknown:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.mesh.shape.items())
        raise ValueError(
            f"'{name}' is split over {', '.join(unknown)}, but the mesh of the plan has the axes "
            f"{axes}. Make it with this strategy, or with strategy.on(devices)."
        )
    # The default memory has another name on other platforms ("device" on a TPU), so a sharding in
    # the default memory gets no memory kind.
    assert isinstance(sharding.mesh, jax.sharding.Mesh)
    default = sharding.mesh.devices.flat[0].default_memory().kind
    kind = None if sharding.memory_kind == default else sharding.memory_kind
    return NamedSharding(mesh.mesh, sharding.spec, memory_kind=kind)


def check_divides(sharding: Sharding, shape: Shape, name: str) -> None:
    """Raises an error if a sharding does not divide the dims of an array.

    Raises:
        ValueError: If it does not.
    """
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError as error:
        assert isinstance(sharding, NamedSharding)
        raise ValueError(
            f"'{name}' of shape {list(shape)} does not split as {sharding.spec} on the mesh "
            f"{dict(sharding.mesh.shape)}: the size of a dim must be a multiple of the devices of "
            "its axes. Use other sizes, axes, or logical_axis_rules."
        ) from error


def value_on(mesh: ReplicaMesh, variable: _Variable, home: ReplicaMesh) -> jax.ShapeDtypeStruct:
    """Returns the shape and sharding that a Variable or PerReplica of `home` has on `mesh`."""
    value, name = variable._value, variable.name
    if not variable.on_read:
        return array_on(mesh, value, name, home)
    placed = mesh.stacked
    if isinstance(value.sharding, NamedSharding):
        placed = sharding_on(mesh, value.sharding, name)
    shape = (mesh.num_replicas, *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, value.dtype, sharding=placed)
