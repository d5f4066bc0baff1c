"""Sums the gradients of rows that occur more than once, so that each row is updated once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.ps.tables.row_arrays import chunks, pad


def sum_duplicates(gradients: np.ndarray, groups: np.ndarray, num_unique: int) -> np.ndarray:
    """Returns float32 sums `[unique, dim]` of gradients `[n, dim]`, grouped by `groups` `[n]`.

    It adds in a fixed order, so equal calls return equal bits.
    """
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        size = 1 << (num_unique - 1).bit_length()
        sums = jnp.zeros((size, gradients.shape[1]), jnp.float32)
    sums = jax.device_put(sums, device)  # commits it, so that `_add` runs on the CPU
    for start, stop, rows in chunks(len(groups)):
        # Padding belongs to the group `size`, which is beyond the end and dropped.
        padding = np.full(rows - (stop - start), size, np.int32)
        numbers = np.concatenate([groups[start:stop], padding])
        sums = _add(sums, numbers, pad(gradients[start:stop], rows))
    return np.asarray(sums)[:num_unique]


@functools.partial(jax.jit, donate_argnums=0)
def _add(sums: jax.Array, indices: jax.Array, gradients: jax.Array) -> jax.Array:
    return sums.at[indices].add(gradients.astype(sums.dtype), mode="drop")
