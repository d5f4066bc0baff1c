"""Sums over replicas in an order that no mesh changes: the pairs of neighbours, their pairs, ...

Floating-point numbers added in another order give another sum. XLA adds in one that depends on the
number of devices. Here the replicas are the leaves of one tree, in the order of their numbers: a
device adds the subtree of its own, and what is left is added the same way wherever it happens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Below this, in bytes, a sum is added on all devices: one collective in place of two.
_SMALL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Block:
    """The replicas of each device: as many on all, in order, a power of two.

    Attributes:
        axis: The mesh axis over which the devices communicate.
        num_devices: Its size.
        size: How many replicas a device has.
    """

    axis: str
    num_devices: int
    size: int

    @property
    def num_replicas(self) -> int:
        """Of all devices."""
        return self.num_devices * self.size

    def first(self) -> jax.Array:
        """The number of the first replica of this device, int32."""
        device = lax.axis_index(self.axis) if self.num_devices > 1 else 0
        return jnp.int32(device * self.size)

    def gather(self, stacked: jax.Array) -> jax.Array:
        """The parts `[size, ...]` of a device as those of all replicas, `[num_replicas, ...]`."""
        if self.num_devices == 1:
            return stacked
        return lax.all_gather(stacked, self.axis, axis=0, tiled=True)

    def local_part(self, of_all: jax.Array) -> jax.Array:
        """The parts of this device of those of all replicas."""
        return lax.dynamic_slice_in_dim(of_all, self.first(), self.size, axis=0)


def reduce(block: Block, name: str, stacked: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums (`psum`), minima (`pmin`) or maxima (`pmax`) over all replicas, on every device.

    Args:
        block: The replicas.
        name: The primitive that asks for it.
        stacked: The parts of this device, `[size, ...]` each.
    """
    if name != "psum":
        local = jnp.min if name == "pmin" else jnp.max
        across = lax.pmin if name == "pmin" else lax.pmax
        reduced = [local(x, axis=0) for x in stacked]
        return [across(x, block.axis) for x in reduced] if block.num_devices > 1 else reduced
    sums: list[Any] = [add_pairs(x) for x in stacked]
    if block.num_devices == 1:
        return sums
    dtypes = dict.fromkeys(x.dtype for x in sums)
    for dtype in dtypes:
        where = [i for i, x in enumerate(sums) if x.dtype == dtype]
        for i, x in zip(where, _sum_of(block, [sums[i] for i in where]), strict=True):
            sums[i] = x
    return sums


def add_pairs(stacked: jax.Array) -> jax.Array:
    """The sum over dim 0, of a power of two: pairs of neighbours, then pairs of their sums."""
    while stacked.shape[0] > 1:
        stacked = stacked[0::2] + stacked[1::2]
    return stacked[0]


def _sum_of(block: Block, arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums over devices of arrays of one dtype: small ones together, large ones each by itself."""
    dtype = arrays[0].dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return list(lax.psum(tuple(arrays), block.axis))  # exact in any order
    results: list[Any] = [None] * len(arrays)
    small = [i for i, x in enumerate(arrays) if x.nbytes < _SMALL]
    if small:
        flat = jnp.concatenate([arrays[i].ravel() for i in small])
        add = _add_gathered if flat.nbytes < _SMALL else _add_scattered
        parts = jnp.split(add(block, flat), _ends([arrays[i].size for i in small]))
        for i, part in zip(small, parts, strict=True):
            results[i] = part.reshape(arrays[i].shape)
    for i in set(range(len(arrays))) - set(small):
        results[i] = _add_scattered(block, arrays[i].ravel()).reshape(arrays[i].shape)
    return results


def _ends(sizes: Sequence[int]) -> list[int]:
    ends, end = [], 0
    for size in sizes[:-1]:
        end += size
        ends.append(end)
    return ends


def _add_gathered(block: Block, flat: jax.Array) -> jax.Array:
    return add_pairs(lax.all_gather(flat, block.axis, axis=0))


def _add_scattered(block: Block, flat: jax.Array) -> jax.Array:
    """Each device adds a part for all: it sends and receives what an all-reduce would."""
    n = block.num_devices
    padded = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    parts = lax.all_to_all(padded, block.axis, 0, 0, tiled=True)
    return lax.all_gather(add_pairs(parts), block.axis, axis=0, tiled=True)[: flat.size]


def permute(block: Block, stacked: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """To each replica of this device what another one sends it, or zeros.

    Args:
        block: The replicas.
        stacked: The parts of this device, `[size, ...]`.
        pairs: Who sends, and who receives that; some may do neither.
    """
    senders = dict.fromkeys(range(block.num_replicas), block.num_replicas)  # beyond all: zeros
    senders |= {receiver: sender for sender, receiver in pairs}
    order = jnp.asarray(list(senders.values()))
    return block.local_part(
        jnp.take(block.gather(stacked), order, axis=0, mode="fill", fill_value=0)
    )


def evaluate_for_all(
    block: Block,
    bind: Callable[..., Sequence[Any]],
    stacked: Sequence[jax.Array],
    axis: str,
    groups: Sequence[Sequence[int]] | None,
) -> list[jax.Array]:
    """Any collective, for the replicas of this device: computed from the parts of all of them.

    Args:
        block: The replicas.
        bind: Asks for the collective over `axis`, of one replica's operands.
        stacked: The parts of this device, `[size, ...]` each.
        axis: A name that no mesh has.
        groups: The replicas that communicate with each other; None for all with all.
    """
    of_all = [block.gather(x) for x in stacked]
    groups = groups or [range(block.num_replicas)]
    found: list[list[Any]] = [[] for _ in range(block.num_replicas)]
    for group in groups:
        members = jnp.asarray(group)
        every = jax.vmap(bind, axis_name=axis, axis_size=len(group))(*(x[members] for x in of_all))
        for position, replica in enumerate(group):
            found[replica] = [x[position] for x in every]
    return [block.local_part(jnp.stack(x)) for x in zip(*found, strict=True)]
