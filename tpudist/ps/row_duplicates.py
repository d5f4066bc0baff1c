"""Sums the gradients of rows that are there more than once, so that each row is changed once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.ps.row_arrays import chunks, pad


class RowDuplicates:
    """Finds which rows of a table are named more than once, without sorting them.

    Its memory is a number for each row of the table.
    """

    def __init__(self) -> None:
        """For no rows."""
        self._position = np.zeros(0, np.int32)  # where a row was named last; old where it was not

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self._position.nbytes

    def reserve(self, capacity: int) -> None:
        """Makes room for rows below `capacity`."""
        if len(self._position) < capacity:
            self._position = np.zeros(capacity, np.int32)

    def unique(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Where each row is named last, and which of those rows each of `rows` is.

        Returns:
            Positions `[unique]` in order, and int32 `[n]` into them; None if all rows differ.
        """
        positions = np.arange(len(rows), dtype=np.int32)
        self._position[rows] = positions
        last = self._position[rows]  # whatever order NumPy wrote in: one of each row's positions
        is_last = last == positions
        if is_last.all():
            return positions, None
        rank = np.cumsum(is_last, dtype=np.int32) - 1
        return np.flatnonzero(is_last), rank[last]


def sum_duplicates(gradients: np.ndarray, which: np.ndarray, num_unique: int) -> np.ndarray:
    """The sums `[unique, dim]`, in float32, of gradients `[n, dim]` by `which` `[n]`."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        size = 1 << (num_unique - 1).bit_length()
        sums = jnp.zeros((size, gradients.shape[1]), jnp.float32)
    sums = jax.device_put(sums, device)
    for start, stop, rows in chunks(len(which)):
        padding = np.full(rows - (stop - start), size, np.int32)
        numbers = np.concatenate([which[start:stop], padding])
        sums = _add(sums, numbers, pad(gradients[start:stop], rows))
    return np.asarray(sums)[:num_unique]


@functools.partial(jax.jit, donate_argnums=0)
def _add(sums: jax.Array, indices: jax.Array, gradients: jax.Array) -> jax.Array:
    return sums.at[indices].add(gradients.astype(sums.dtype), mode="drop")
