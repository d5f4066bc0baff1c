"""Dataset over arrays in memory. A process reads only the rows of its own replicas."""

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.sources.dataset_settings import BatchPlace
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.transfer import host_batch
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.xla import tree_depth


class NumpyDataset(IndexedDataset):
    """Examples along dim 0 of a pytree of arrays; can be shuffled, batched and repeated.

    See `IndexedDataset` for its methods: `dataset.shuffle(seed=0).batch(256).repeat(3)`, in this
    order.

    The arrays are not copied; do not write to them while the dataset is in use. Matches
    `tf.data.Dataset.from_tensor_slices`.

    Args:
        arrays: Pytree of arrays `[rows, ...]`; `rows` may be 0. A list is one array, its elements
            stacked; use tuples and dicts for structure.

    Raises:
        ValueError: If the arrays have different numbers of rows, or are ragged.
        TypeError: If they do not consist of numbers.
    """

    def __init__(self, arrays: PyTree):
        label = "The NumPy dataset"
        tree_depth.check_depth(arrays, label, _is_list)
        named, self._treedef = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=_is_list)
        names = [jax.tree_util.keystr(path) for path, _ in named]
        self._leaves = [
            host_batch.as_array(leaf, label + name)
            for name, (_, leaf) in zip(names, named, strict=True)
        ]
        self._num_rows = host_batch.common_rows(self._leaves, names, label, may_be_empty=True)
        self._leaf_specs = [
            jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in self._leaves
        ]

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        # Evenly spaced rows are views, which cost nothing.
        if rows.ndim != 1:
            return [leaf[rows] for leaf in self._leaves]
        steps = np.diff(rows)
        if len(steps) and (steps[0] < 1 or np.any(steps != steps[0])):
            return [leaf[rows] for leaf in self._leaves]
        step = int(steps[0]) if len(steps) else 1
        return [leaf[int(rows[0]) : int(rows[-1]) + 1 : step] for leaf in self._leaves]

    def _host_batch(self, place: BatchPlace) -> HostBatch:
        num_shards, index = self._settings.shard_of_examples
        leaves = [leaf[index::num_shards] for leaf in self._leaves]  # views
        return HostBatch(leaves, self._treedef, place.num_rows, place.start, place.order)


def _is_list(value: object) -> bool:
    return isinstance(value, list)
