"""Values of entries: what to read for one, and how it comes to its place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.checkpoint import entries
from tpudist.checkpoint.entries import Entry
from tpudist.lowering import placement


def target(entry: Entry) -> jax.ShapeDtypeStruct:
    """What to read for an entry: shape, dtype and sharding, if it is to have one."""
    shape, dtype, sharding = entry.shape, entry.dtype, entry.sharding
    if entry.kind == entries.KEY:
        impl = jax.random.key(0, impl=dtype)
        shape, dtype = (*shape, *jax.random.key_data(impl).shape), "uint32"
    if sharding is not None and jax.process_count() > 1 and sharding.is_fully_addressable:
        sharding = None
    if entry.on_host:
        sharding = None
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)


def place(entry: Entry, value: Any, *, again: bool = False) -> Any:
    """A value that was read, as the entry has it: on its devices, and of its kind.

    With `again` it is a copy, since another entry has the value itself.
    """
    if entry.on_host:
        return np.array(value) if again else value
    with placement.without_mesh():
        if again and entry.sharding is not None:
            value = jax.device_put(value, target(entry).sharding).copy()
        if not isinstance(value, jax.Array):
            value = jnp.array(value) if entry.sharding is None else _put(entry, value)
        if entry.kind == entries.KEY:
            value = jax.random.wrap_key_data(value, impl=entry.dtype)
    return value


def empty(entry: Entry) -> Any:
    """The value of an entry without elements."""
    if entry.on_host:
        return np.zeros(entry.shape, np.dtype(entry.dtype))
    value = np.zeros(target(entry).shape, target(entry).dtype)
    return place(entry, value)


def _put(entry: Entry, value: np.ndarray) -> jax.Array:
    return jax.device_put(jnp.array(value), entry.sharding)
