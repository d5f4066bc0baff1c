"""Batch of examples that are read by number, when the rows are taken."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from tpudist.input.transfer import host_batch


class ReadBatch(NamedTuple):
    """A `RowBatch` whose rows are read when they are taken; `HostBatch` has them in memory.

    Attributes:
        read_examples: Called with numbers of examples and the epoch; returns the arrays of the
            examples.
        treedef: Structure of the batch.
        num_rows: Number of rows of the batch.
        numbers_of: Called with positions in the batch; returns the numbers of the examples there.
        epoch: Epoch of the batch.
    """

    read_examples: Callable[[np.ndarray, int], list[np.ndarray]]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int
    numbers_of: Callable[[np.ndarray], np.ndarray]
    epoch: int

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """Returns the rows at `positions`; see `RowBatch`."""
        flat = np.asarray(positions).reshape(-1)
        if np.all(np.diff(flat) > 0):
            leaves = self.read_examples(self.numbers_of(positions), self.epoch)
        else:  # padding repeats rows: read each of them once
            unique, inverse = np.unique(flat, return_inverse=True)
            where = inverse.reshape(np.shape(positions))
            leaves = self.read_examples(self.numbers_of(unique), self.epoch)
            leaves = [leaf[where] for leaf in leaves]
        return [
            host_batch.to_jax_dtype(leaf, "A batch of the dataset", copy=copy) for leaf in leaves
        ]
