"""RowArrays: a pytree of arrays with one row per table row, in host memory, changed in place.

A jitted function changes some rows, in chunks of one size; the last chunk is padded to a power of
two, so that few programs are compiled for any number of rows. It donates the arrays: a view of them
must not outlive the call that created it, so this class returns copies only.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.ps.tables import huge_pages

CHUNK_ROWS = 8192
"""Number of rows that one program changes: rows and gradients of usual dims fit into the cache."""
_MIN_ROWS = 64  # fewer rows are padded, so that few programs are compiled


class RowArrays:
    """A pytree of arrays `[capacity, ...]`, initially zeros.

    Args:
        row: Pytree of arrays or shapes of one row.
        capacity: Initial number of rows.
    """

    def __init__(self, row: PyTree, capacity: int):
        self.device = jax.local_devices(backend="cpu")[0]
        self._tree = self._zeros(row, capacity)
        self._capacity = capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self._tree))

    def reserve(self, num_rows: int) -> None:
        """Enlarges the arrays to at least `num_rows`, by doubling, which copies them."""
        capacity = self._capacity
        while capacity < num_rows:
            capacity *= 2
        if capacity > self._capacity:
            row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._tree)
            larger = self._zeros(row, capacity)
            self._tree = jax.block_until_ready(_copy_to_start(larger, self._tree))
            self._capacity = capacity

    def _zeros(self, row: PyTree, capacity: int) -> PyTree:
        return jax.tree.map(
            lambda x: huge_pages.zeros((capacity, *x.shape), x.dtype, self.device), row
        )

    def read(self, rows: np.ndarray) -> PyTree:
        """Returns copies of rows of all arrays, as a pytree of NumPy arrays."""
        return jax.tree.map(lambda x: np.take(np.asarray(x), rows, axis=0, mode="clip"), self._tree)

    def read_into(self, out: np.ndarray, rows: np.ndarray, array: Callable[[PyTree], Any]) -> None:
        """Copies rows of one array into `out`."""
        np.take(np.asarray(array(self._tree)), rows, axis=0, mode="clip", out=out)

    def change(self, function: Callable[..., PyTree], rows: np.ndarray, *values: PyTree) -> None:
        """Starts to change rows, each at most once; `values` must not change until `wait`.

        Args:
            function: Jitted function of the pytree of arrays, which it donates, of row numbers, and
                of the corresponding `values`; returns the new arrays. Row numbers beyond the end
                are padding, and must have no effect.
            rows: Integers `[n]`.
            values: Pytrees of arrays `[n, ...]`.
        """
        for start, stop, size in chunks(len(rows)):
            # Distinct numbers beyond the end: `unique_indices=True` in `scatter` relies on that.
            padding = np.arange(self._capacity, self._capacity + size - (stop - start))
            numbers = np.concatenate([rows[start:stop], padding]).astype(np.int32)
            # `tree.map` calls the function at once, so the loop's variables are as here.
            parts = jax.tree.map(lambda x: pad(x[start:stop], size), values)  # noqa: B023
            self._tree = function(self._tree, numbers, *parts)

    def wait(self) -> None:
        """Waits until all rows are changed."""
        jax.block_until_ready(self._tree)


@functools.partial(jax.jit, donate_argnums=0)
def _copy_to_start(larger: PyTree, smaller: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.at[: len(y)].set(y), larger, smaller)


def chunks(num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, end and padded size of each chunk."""
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        yield start, stop, max(_MIN_ROWS, 1 << (stop - start - 1).bit_length())


def pad(array: np.ndarray, size: int) -> np.ndarray:
    """Appends zeros to the first dim of an array, if necessary."""
    if len(array) == size:
        return array
    whole = np.zeros((size, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole
