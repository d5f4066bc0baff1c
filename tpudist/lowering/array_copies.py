"""Copies global arrays to host memory, and to a mesh of one device."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from tpudist.xla import random_keys
from tpudist.xla.mesh import ReplicaMesh


def fetch(x: ArrayLike) -> np.ndarray:
    """Returns a global array in host memory.

    With several processes, all must call this: an array that is split is gathered first.
    """
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            assert isinstance(x.sharding, NamedSharding), x.sharding
            replicated = NamedSharding(x.sharding.mesh, PartitionSpec())
            x = jax.jit(lambda value: value, out_shardings=replicated)(x)
            assert isinstance(x, jax.Array)
        x = x.addressable_data(0)
    # Explicit for `jax.transfer_guard`.
    return np.asarray(jax.device_get(x))


def put(mesh: ReplicaMesh, x: ArrayLike) -> jax.Array:
    """Returns a copy of an array on the device of a mesh of one device.

    The copy shares no memory with `x`, so it may be donated.
    """
    # `device_put` does not accept key arrays with `may_alias`.
    if isinstance(x, jax.Array) and random_keys.is_key(x):
        data = put(mesh, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and x.is_fully_addressable:
        return jax.device_put(x, mesh.replicated, may_alias=False)
    return jax.device_put(fetch(x), mesh.replicated, may_alias=False)
