"""Where arrays would lie on the mesh of other devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tpudist.xla.mesh import ReplicaMesh


def array_on(
    mesh: ReplicaMesh, x: Any, name: str, home: ReplicaMesh | None = None
) -> jax.ShapeDtypeStruct:
    """An array without its data on `mesh`, split as it was; whole on all devices if it was not.

    `run` copies an array that lives elsewhere than on the mesh `home` to all devices, whole.
    """
    weak = bool(getattr(x, "weak_type", False))
    sharding = getattr(x, "sharding", None)
    if isinstance(x, np.ndarray | np.generic):
        # Where the program wants it: JAX moves it with the call.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype.kind in "biufc" else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype)
    if isinstance(x, jax.Array) and home is not None:
        if sharding.device_set not in (home.device_set, mesh.device_set):  # type: ignore[union-attr]
            sharding = None
    where = mesh.replicated
    if isinstance(sharding, NamedSharding):
        where = sharding_on(mesh, sharding, name)
        _check_divides(where, x.shape, name)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=weak)


def sharding_on(mesh: ReplicaMesh, sharding: NamedSharding, name: str) -> NamedSharding:
    """The same partition spec on `mesh`, in the same kind of memory.

    Raises:
        ValueError: It names an axis that the mesh does not have.
    """
    named = {axis for part in sharding.spec if part for axis in np.atleast_1d(part)}
    unknown = sorted(named - set(mesh.mesh.axis_names))
    if unknown:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.mesh.shape.items())
        raise ValueError(
            f"'{name}' is split over {', '.join(unknown)}, but the mesh of the plan has the axes "
            f"{axes}. Make it with this strategy, or with strategy.on(devices)."
        )
    # The devices' own memory has other names elsewhere.
    own = sharding.mesh.devices.flat[0].default_memory().kind  # type: ignore[union-attr]
    kind = None if sharding.memory_kind == own else sharding.memory_kind
    return NamedSharding(mesh.mesh, sharding.spec, memory_kind=kind)


def _check_divides(where: NamedSharding, shape: tuple[int, ...], name: str) -> None:
    try:
        where.shard_shape(tuple(shape))
    except ValueError as error:
        raise ValueError(
            f"'{name}' of shape {list(shape)} does not split as {where.spec} on the mesh of the "
            f"plan, {dict(where.mesh.shape)}: {error}"
        ) from error


def value_on(mesh: ReplicaMesh, variable: Any, home: ReplicaMesh) -> jax.ShapeDtypeStruct:
    """What a Variable (or a captured PerReplica) of `home` would hold on `mesh`."""
    value, name = variable._value, variable.name
    if not variable.on_read:
        return array_on(mesh, value, name, home)
    sharding = getattr(value, "sharding", None)
    where = mesh.stacked
    if isinstance(sharding, NamedSharding):
        where = sharding_on(mesh, sharding, name)
    shape = (mesh.num_replicas, *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, value.dtype, sharding=where)
