"""A dataset over arrays in memory, read by index: a process touches its own replicas' rows only."""

from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.transfer import host_batch
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.xla import tree_depth


class NumpyDataset(IndexedDataset):
    """Examples along dim 0 of a pytree of arrays, perhaps shuffled, batched and repeated.

    Each method returns a new dataset: `dataset.shuffle(seed=0).batch(256).repeat(3)`, in this
    order. What a batch holds is a function of the seed and its number alone, the same on any number
    of replicas and processes.

    The arrays are not copied; do not write to them while the dataset is in use. As
    `tf.data.Dataset.from_tensor_slices`.
    """

    def __init__(self, arrays: PyTree):
        """Slices `arrays` along dim 0.

        Args:
            arrays: Pytree of arrays `[rows, ...]`; there may be no rows. A list is one array, its
                elements stacked; use tuples and dicts for structure.

        Raises:
            ValueError: The arrays have different numbers of rows, or are ragged.
            TypeError: They do not hold numbers.
        """
        what = "The NumPy dataset"
        tree_depth.check_depth(arrays, what, _is_list)
        named, self._treedef = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=_is_list)
        names = [jax.tree_util.keystr(path) for path, _ in named]
        self._leaves = [
            host_batch.as_array(leaf, what + name)
            for name, (_, leaf) in zip(names, named, strict=True)
        ]
        self._num_rows = host_batch.common_rows(self._leaves, names, what, may_be_empty=True)
        self._leaf_specs = [
            jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in self._leaves
        ]

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        """Views, if the rows are evenly spaced."""
        steps = np.diff(rows) if rows.ndim == 1 else np.zeros(1, int)
        if len(steps) and (steps[0] < 1 or np.any(steps != steps[0])):
            return [leaf[rows] for leaf in self._leaves]
        every = int(steps[0]) if len(steps) else 1
        return [leaf[int(rows[0]) : int(rows[-1]) + 1 : every] for leaf in self._leaves]

    def _host_batch(
        self, epoch: int, num_rows: int, start: int, order: np.ndarray | None
    ) -> HostBatch:
        num_shards, index = self._plan.examples
        leaves = self._leaves
        if num_shards > 1:
            leaves = [leaf[index::num_shards] for leaf in leaves]
        return HostBatch(leaves, self._treedef, num_rows, start, order)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
