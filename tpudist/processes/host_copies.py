"""Copies arrays to the host. Devices copy at once, so that a step may overwrite the originals."""

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tpudist.processes import generations


def begin(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Starts copies of arrays, each complete in every process; returns at once.

    If an array is spread over processes, they gather it: all must call this with the same arrays.
    """
    shardings = [_copy_sharding(x) for x in arrays]
    indices_by_group: dict[Hashable, list[int]] = {}
    for i, sharding in enumerate(shardings):
        indices_by_group.setdefault(_device_group(sharding), []).append(i)
    copies: dict[int, jax.Array] = {}
    for indices in indices_by_group.values():
        copy = _copy_program(tuple(shardings[i] for i in indices))
        copies |= zip(indices, copy(*(arrays[i] for i in indices)), strict=True)
    return [copies[i] for i in range(len(arrays))]


def finish(copy: jax.Array) -> np.ndarray:
    """Waits for a copy and returns it in host memory of its own.

    Raises:
        jax.errors.JaxRuntimeError: If the original could not be computed.
    """
    # Not `asarray`, which on CPUs would share the memory of the device.
    return np.array(copy if copy.is_fully_addressable else copy.addressable_data(0))


def _copy_sharding(array: jax.Array) -> Sharding:
    """Returns the sharding of a copy that this process can read in full."""
    sharding = array.sharding
    if array.is_fully_addressable or array.is_fully_replicated:
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"The array {array.dtype}{list(array.shape)} is spread over processes by "
            f"{type(sharding).__name__}, so it cannot be copied to all of them. Create it with a "
            f"NamedSharding, as strategies do."
        )
    return NamedSharding(sharding.mesh, PartitionSpec())


def _device_group(sharding: Sharding) -> Hashable:
    """Returns a key that is equal for arrays that one program can copy."""
    # A compiled program has one list of devices, in one order. Shardings of a mesh share it.
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    return frozenset(sharding.device_set)


@generations.cache
def _copy_program(
    shardings: tuple[Sharding, ...],
) -> Callable[..., tuple[jax.Array, ...]]:
    @functools.partial(jax.jit, out_shardings=shardings)
    def tpudist_copy(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.copy, arrays))

    return tpudist_copy
