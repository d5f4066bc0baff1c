"""Source for a `tf.data.Dataset` of global batches, which are read without a copy."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import State, read_count
from tpudist.input.sources import iterable
from tpudist.options import AutoShardPolicy


class TfDataSource(iterable.IterableSource):
    """The elements of a `tf.data.Dataset` as batches.

    A position is a number of batches. To resume, `skip` leaves them out: TensorFlow computes them,
    but does not convert them. A shuffled dataset needs a seed to resume.

    Raises:
        TypeError: If an element does not consist of dense arrays of numbers.
        ValueError: If an element is not a batch.
    """

    owns_memory = True  # TensorFlow makes new tensors for each element

    def __init__(self, dataset: Any):
        super().__init__(dataset)
        self._dataset = dataset
        self.name = "tf.data.Dataset"
        self._specs = _check_spec(dataset.element_spec)
        self.plan = {"kind": "batches of a tf.data.Dataset", "element": str(dataset.element_spec)}
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self.auto_shard_policy = AutoShardPolicy(policy.value)

    @property
    def cardinality(self) -> int:
        """See `BatchSource`."""
        return int(self._dataset.cardinality())

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a batch. Reads the first batch if the dataset's are incomplete."""
        leaves, treedef = jax.tree_util.tree_flatten(self._specs, is_leaf=_is_spec)
        if all(spec.shape.is_fully_defined() for spec in leaves):
            specs = [
                jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype)
                for spec in leaves
            ]
            return treedef.unflatten(specs)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.peek_first())

    def _open(self) -> Iterator[PyTree]:
        return self._dataset.as_numpy_iterator()

    def _open_at(self, state: State | None) -> tuple[Iterator[PyTree], int]:
        # Skips all but the last batch before the position, whose checksum is compared.
        num_skipped = 0 if state is None else max(0, read_count(state, "batches") - 1)
        # A peeked pass is the next one: to skip would open another, perhaps in another order.
        if not num_skipped or self._peeked is not None:
            return super()._open_at(state)
        return self._dataset.skip(num_skipped).as_numpy_iterator(), num_skipped

    def _skip_pass(self) -> None:
        iter(self._dataset)  # TensorFlow draws the order of a pass here

    def shuffle_without_seed(self) -> str | None:
        """See `BatchSource`; finds `shuffle` in the dataset and in its inputs."""
        return _find_shuffle_without_seed(self._dataset)


def _find_shuffle_without_seed(dataset: object) -> str | None:
    # Private attributes of TensorFlow's datasets. If they are missing, nothing is found.
    # 1 counts as a seed, and `list` returns no inputs.
    seeds: list[Any] = [getattr(dataset, name, 1) for name in ("_seed", "_seed2")]
    if "Shuffle" in type(dataset).__name__ and not any(int(x) for x in seeds):
        return "tf.data.Dataset.shuffle"
    inputs = getattr(dataset, "_inputs", list)()
    return next(filter(None, map(_find_shuffle_without_seed, inputs)), None)


def _is_spec(value: object) -> bool:
    return hasattr(value, "is_compatible_with")  # a `tf.TypeSpec`, which may be a tuple too


def _check_spec(spec: PyTree) -> PyTree:
    """Returns the specs of an element, if all are dense arrays of numbers with a dim of rows."""
    named, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=_is_spec)
    for path, leaf in named:
        name = jax.tree_util.keystr(path)
        problem = f"The elements of the tf.data.Dataset hold {leaf}{name and f' in {name}'}"
        if type(leaf).__name__ != "TensorSpec":
            raise TypeError(
                f"{problem}. Devices hold only dense arrays: use dataset.map with to_tensor or "
                "tf.sparse.to_dense, or dataset.padded_batch."
            )
        if np.dtype(leaf.dtype.as_numpy_dtype).kind == "O":
            raise TypeError(
                f"{problem}, but devices hold only numbers and booleans. Convert texts to token "
                "ids with dataset.map, or omit them."
            )
        if leaf.shape.rank == 0:
            raise ValueError(
                f"{problem}, a scalar, but examples are counted along dim 0. Distribute "
                f"dataset.batch(global_batch_size)."
            )
    return spec
