"""Copies of arrays for the host: made on the devices at once, so that a step may overwrite them."""

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tpudist.processes import generations


def begin(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies of arrays, each whole in every process; returns at once.

    Where an array is spread over processes, they gather it: all must call this with the same.
    """
    shardings = [_whole(x) for x in arrays]
    groups: dict[Hashable, list[int]] = {}
    for i, sharding in enumerate(shardings):
        groups.setdefault(_devices_of(sharding), []).append(i)
    found: dict[int, jax.Array] = {}
    for numbers in groups.values():
        copy = _copy_program(tuple(shardings[i] for i in numbers))
        found |= zip(numbers, copy(*(arrays[i] for i in numbers)), strict=True)
    return [found[i] for i in range(len(arrays))]


def finish(copy: jax.Array) -> np.ndarray:
    """The copy in memory of the host's own, when it has been computed.

    Raises:
        jax.errors.JaxRuntimeError: What was to be copied could not be computed.
    """
    return np.array(copy if copy.is_fully_addressable else copy.addressable_data(0))


def _whole(array: jax.Array) -> Sharding:
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


def _devices_of(sharding: Sharding) -> Hashable:
    """What arrays have in common that one program can copy."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    return frozenset(sharding.device_set)


@generations.cache
def _copy_program(shardings: tuple[Sharding, ...]):
    @functools.partial(jax.jit, out_shardings=shardings)
    def tpudist_copy(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.copy, arrays))

    return tpudist_copy
