"""A batch of examples that are read by number, when the rows are taken."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from tpudist.input.transfer import host_batch


class ReadBatch(NamedTuple):
    """A batch whose rows are read when they are taken, as `HostBatch` has them in memory.

    Attributes:
        read_examples: Gives the examples of some numbers in some epoch.
        treedef: Structure of the batch.
        numbers: Those of its examples, integers `[rows]`.
        epoch: The one that it belongs to.
    """

    read_examples: Callable[[np.ndarray, int], list[np.ndarray]]
    treedef: jax.tree_util.PyTreeDef
    numbers: np.ndarray
    epoch: int

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch."""
        return len(self.numbers)

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """The rows at `positions`, for each leaf, in the dtypes that JAX will use."""
        flat = np.asarray(positions).reshape(-1)
        if np.all(np.diff(flat) > 0):
            leaves = self.read_examples(self.numbers[positions], self.epoch)
        else:  # padding repeats a row, which is read once
            unique, inverse = np.unique(flat, return_inverse=True)
            where = inverse.reshape(np.shape(positions))
            leaves = self.read_examples(self.numbers[unique], self.epoch)
            leaves = [leaf[where] for leaf in leaves]
        return [
            host_batch.to_jax_dtype(leaf, "A batch of the dataset", copy=copy) for leaf in leaves
        ]
