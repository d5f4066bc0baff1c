"""Converts between values as they are stored and values as the objects have them."""

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.checkpoint import entries
from tpudist.checkpoint.entries import Entry
from tpudist.lowering import placement


def target(entry: Entry) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding with which to read the value of an entry."""
    shape, dtype, sharding = entry.shape, entry.dtype, entry.sharding
    if entry.kind == entries.KEY:
        impl = jax.random.key(0, impl=dtype)
        shape, dtype = (*shape, *jax.random.key_data(impl).shape), "uint32"
    # An array that only this process has was saved as a NumPy array; Orbax cannot read it into a
    # sharding that the other processes do not know.
    if sharding is not None and jax.process_count() > 1 and sharding.is_fully_addressable:
        sharding = None
    if entry.on_host:
        sharding = None
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)


def place(
    entry: Entry, value: jax.Array | np.ndarray, *, is_shared: bool = False
) -> jax.Array | np.ndarray:
    """Returns a stored value as its entry has it: on its devices, and keys as keys.

    Args:
        entry: Entry of the value.
        value: Value that was read.
        is_shared: Whether another entry has this value already, so that this one needs a copy.
    """
    if entry.on_host:
        return np.array(value) if is_shared else value
    with placement.without_mesh():
        if is_shared and entry.sharding is not None:
            value = jax.device_put(value, target(entry).sharding).copy()
        if not isinstance(value, jax.Array):
            # `jnp.array` copies. On CPUs `device_put` may use the memory of a NumPy array as it is,
            # and a step could donate memory that belongs to the reader or to a copy of the state.
            value = jnp.array(value) if entry.sharding is None else _put(entry, value)
        if entry.kind == entries.KEY:
            value = jax.random.wrap_key_data(value, impl=entry.dtype)
    return value


def empty(entry: Entry) -> jax.Array | np.ndarray:
    """Returns the value of an entry without elements, which is not stored."""
    if entry.on_host:
        return np.zeros(entry.shape, np.dtype(entry.dtype))
    value = np.zeros(target(entry).shape, target(entry).dtype)
    return place(entry, value)


def _put(entry: Entry, value: np.ndarray) -> jax.Array:
    return jax.device_put(jnp.array(value), entry.sharding)
