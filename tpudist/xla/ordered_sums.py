"""Computes collectives over replicas in an order that does not depend on the mesh.

A sum of floating-point numbers depends on the order of the additions, and XLA's order depends on
the number of devices. Here the replicas are the leaves of a binary tree, in order. A device adds
the subtree of its own replicas: pairs of neighbors, then pairs of their sums. The rest of the tree
is added in the same order on any device.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

# Sums of fewer bytes are added on all devices, with one collective instead of two. Of small
# arrays, the latency of a collective matters more than the bytes (64 KiB is not measured).
_SMALL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Block:
    """A division of replicas among devices: each has `size` consecutive replicas.

    Attributes:
        axis: Mesh axis over which the devices communicate.
        num_devices: Size of the axis.
        size: Number of replicas per device, a power of two.
    """

    axis: str
    num_devices: int
    size: int

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all devices."""
        return self.num_devices * self.size

    def first_replica(self) -> jax.Array:
        """Returns the number of the first replica of this device, int32."""
        device = lax.axis_index(self.axis) if self.num_devices > 1 else 0
        return jnp.int32(device * self.size)

    def gather(self, stacked: jax.Array) -> jax.Array:
        """Returns the parts `[num_replicas, ...]` of all replicas, given `[size, ...]`."""
        if self.num_devices == 1:
            return stacked
        return lax.all_gather(stacked, self.axis, axis=0, tiled=True)

    def local_part(self, parts: jax.Array) -> jax.Array:
        """Returns the parts `[size, ...]` of this device, given `[num_replicas, ...]`."""
        return lax.dynamic_slice_in_dim(parts, self.first_replica(), self.size, axis=0)


def reduce(block: Block, name: str, stacked: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums, minima or maxima over all replicas, on every device.

    Args:
        block: The replicas.
        name: Primitive: `psum`, `pmin` or `pmax`.
        stacked: Arrays with the parts of this device, `[size, ...]` each.
    """
    if name != "psum":
        local = jnp.min if name == "pmin" else jnp.max
        across = lax.pmin if name == "pmin" else lax.pmax
        reduced = [local(x, axis=0) for x in stacked]
        return [across(x, block.axis) for x in reduced] if block.num_devices > 1 else reduced
    sums = [add_pairs(x) for x in stacked]
    if block.num_devices == 1:
        return sums
    dtypes = dict.fromkeys(x.dtype for x in sums)
    for dtype in dtypes:
        positions = [i for i, x in enumerate(sums) if x.dtype == dtype]
        added = _sum_over_devices(block, [sums[i] for i in positions])
        for i, x in zip(positions, added, strict=True):
            sums[i] = x
    return sums


def add_pairs(stacked: jax.Array) -> jax.Array:
    """Sums over dim 0, whose size is a power of two: pairs of neighbors, then of their sums."""
    while stacked.shape[0] > 1:
        stacked = stacked[0::2] + stacked[1::2]
    return stacked[0]


def _sum_over_devices(block: Block, arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums arrays of one dtype: small ones in one collective, large ones separately."""
    # Both ways add the same pairs in the same order, so the size of an array does not matter for
    # its sum.
    dtype = arrays[0].dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return list(lax.psum(tuple(arrays), block.axis))  # exact in any order
    results: dict[int, jax.Array] = {}
    small = [i for i, x in enumerate(arrays) if x.nbytes < _SMALL_BYTES]
    if small:
        flat = jnp.concatenate([arrays[i].ravel() for i in small])
        add = _add_gathered if flat.nbytes < _SMALL_BYTES else _add_scattered
        ends = list(itertools.accumulate(arrays[i].size for i in small))
        for i, part in zip(small, jnp.split(add(block, flat), ends[:-1]), strict=True):
            results[i] = part.reshape(arrays[i].shape)
    for i in [i for i in range(len(arrays)) if i not in results]:
        results[i] = _add_scattered(block, arrays[i].ravel()).reshape(arrays[i].shape)
    return [results[i] for i in range(len(arrays))]


def _add_gathered(block: Block, flat: jax.Array) -> jax.Array:
    return add_pairs(lax.all_gather(flat, block.axis, axis=0))


def _add_scattered(block: Block, flat: jax.Array) -> jax.Array:
    # Each device adds one part of the array for all devices. It sends and receives as many bytes as
    # in an all-reduce.
    n = block.num_devices
    padded = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    parts = lax.all_to_all(padded, block.axis, 0, 0, tiled=True)
    return lax.all_gather(add_pairs(parts), block.axis, axis=0, tiled=True)[: flat.size]


def permute(block: Block, stacked: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Returns for each replica of this device the part that it receives, or zeros.

    Costs as much as an all-gather.

    Args:
        block: The replicas.
        stacked: The parts of this device, `[size, ...]`.
        pairs: Pairs of sender and receiver.
    """
    # A replica without a sender reads from beyond the last one, which `take` fills with zeros.
    senders = {receiver: sender for sender, receiver in pairs}
    replicas = range(block.num_replicas)
    order = jnp.asarray([senders.get(replica, block.num_replicas) for replica in replicas])
    return block.local_part(
        jnp.take(block.gather(stacked), order, axis=0, mode="fill", fill_value=0)
    )


def evaluate_for_all(
    block: Block,
    bind: Callable[..., Sequence[jax.Array]],
    stacked: Sequence[jax.Array],
    axis: str,
    groups: Sequence[Sequence[int]] | None,
) -> list[jax.Array]:
    """Returns the results of any collective for the replicas of this device.

    Every device gathers the parts of all replicas and computes the results of all of them, so this
    costs as much as an all-gather.

    Args:
        block: The replicas.
        bind: Called with the operands of one replica; computes the collective over `axis`.
        stacked: Operands with the parts of this device, `[size, ...]` each.
        axis: Name of an axis that no mesh has.
        groups: Groups of replicas that communicate; None for one group of all replicas.
    """
    operands = [block.gather(x) for x in stacked]
    groups = groups or [range(block.num_replicas)]
    by_replica: dict[int, list[jax.Array]] = {}
    for group in groups:
        members = jnp.asarray(group)
        run = jax.vmap(bind, axis_name=axis, axis_size=len(group))
        results = run(*(x[members] for x in operands))
        for position, replica in enumerate(group):
            by_replica[replica] = [x[position] for x in results]
    in_order = [by_replica[replica] for replica in range(block.num_replicas)]
    return [block.local_part(jnp.stack(x)) for x in zip(*in_order, strict=True)]
