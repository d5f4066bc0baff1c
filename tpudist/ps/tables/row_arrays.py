"""RowArrays: arrays with a row for each of many things, in the host's memory, changed in place.

A function of JAX changes some rows, chunk by chunk: whole chunks of one size, and the rest padded
to a power of two, so that few programs are compiled, whatever the numbers of rows are. The arrays
are donated to it: a view of them must not outlive the call that took it, so none is given away.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.ps.tables import huge_pages

CHUNK_ROWS = 8192  # gradients and rows of a chunk stay in the cache; larger ones were slower
_LEAST_ROWS = 64


class RowArrays:
    """A pytree of arrays `[capacity, ...]`, of zeros at first."""

    def __init__(self, row: PyTree, capacity: int):
        """Of arrays or shapes of one row."""
        self.device = jax.local_devices(backend="cpu")[0]
        self._tree = self._zeros(row, capacity)
        self._capacity = capacity

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(x.nbytes for x in jax.tree.leaves(self._tree))

    def reserve(self, num_rows: int) -> None:
        """Makes room for rows below `num_rows`, by doubling, which copies all."""
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

    def read(self, rows: np.ndarray, select: Callable[[PyTree], PyTree] = lambda tree: tree) -> Any:
        """Copies of rows of all arrays, or of those of `select`, as a pytree of NumPy arrays."""
        return jax.tree.map(
            lambda x: np.take(np.asarray(x), rows, axis=0, mode="clip"), select(self._tree)
        )

    def read_into(self, out: np.ndarray, rows: np.ndarray, array: Callable[[PyTree], Any]) -> None:
        """Copies rows of one array into `out`."""
        np.take(np.asarray(array(self._tree)), rows, axis=0, mode="clip", out=out)

    def change(self, function: Callable[..., PyTree], rows: np.ndarray, *values: PyTree) -> None:
        """Begins to change rows, none of them named twice; `values` must stay until `wait`.

        Args:
            function: A jitted one of the pytree of arrays, which it donates, the numbers of the
                rows, and what stands for them in `values`. Numbers past the end are padding, and
                must have no effect.
            rows: Integers `[n]`.
            values: Pytrees of arrays `[n, ...]`.
        """
        for start, stop, size in chunks(len(rows)):
            padding = np.arange(self._capacity, self._capacity + size - (stop - start))
            numbers = np.concatenate([rows[start:stop], padding]).astype(np.int32)
            parts = jax.tree.map(lambda x: pad(x[start:stop], size), values)  # noqa: B023
            self._tree = function(self._tree, numbers, *parts)

    def wait(self) -> None:
        """Returns when all is changed."""
        jax.block_until_ready(self._tree)


@functools.partial(jax.jit, donate_argnums=0)
def _copy_to_start(larger: PyTree, smaller: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.at[: len(y)].set(y), larger, smaller)


def chunks(num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Where each chunk of some rows begins and ends, and how many rows it has with its padding."""
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        yield start, stop, max(_LEAST_ROWS, 1 << (stop - start - 1).bit_length())


def pad(array: np.ndarray, size: int) -> np.ndarray:
    """With zeros at the end of its first dim; itself if there is nothing to add."""
    if len(array) == size:
        return array
    whole = np.zeros((size, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole
