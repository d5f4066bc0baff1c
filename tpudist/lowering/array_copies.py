"""Global arrays in host memory, and copies of them on one device."""

from typing import Any

import jax
import numpy as np

from tpudist.xla import random_keys
from tpudist.xla.mesh import ReplicaMesh


def fetch(x: Any) -> np.ndarray:
    """Returns a global array in host memory, also in several processes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            where = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())  # type: ignore
            x = jax.jit(lambda value: value, out_shardings=where)(x)
        x = x.addressable_data(0)
    return np.asarray(jax.device_get(x))


def put(mesh: ReplicaMesh, x: Any) -> jax.Array:
    """Returns a copy of an array on the device of a mesh of one device."""
    if random_keys.is_key(x):
        data = put(mesh, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and x.is_fully_addressable:
        return jax.device_put(x, mesh.replicated, may_alias=False)
    return jax.device_put(fetch(x), mesh.replicated, may_alias=False)
