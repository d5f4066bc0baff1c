"""`tf.data.Dataset`s of global batches, read where TensorFlow has put them, without a copy."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import read_count
from tpudist.input.sources import iterable
from tpudist.options import AutoShardPolicy


class TfDataSource(iterable.IterableSource):
    """The elements of a `tf.data.Dataset` as batches.

    A position is the number of batches that were given, which `skip` leaves out: TensorFlow makes
    them, but nobody reads them. A dataset that is shuffled must be given a seed for that.
    """

    owns_memory = True  # TensorFlow makes new tensors for each element

    def __init__(self, source: Any):
        """Wraps a dataset.

        Raises:
            TypeError: Its elements are no arrays of numbers.
            ValueError: They are no batches.
        """
        super().__init__(source)
        self.name = "tf.data.Dataset"
        self._specs = _check_spec(source.element_spec)
        self.plan = {"kind": "batches of a tf.data.Dataset", "element": str(source.element_spec)}

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """What the dataset's own options ask for."""
        dataset: Any = self._source
        asked = dataset.options().experimental_distribute.auto_shard_policy
        return AutoShardPolicy(asked.value)

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass; -1 if it has no end, -2 if not known."""
        dataset: Any = self._source
        return int(dataset.cardinality())

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a batch; the first one is read if the dataset does not say them."""
        leaves, treedef = jax.tree_util.tree_flatten(self._specs, is_leaf=_is_spec)
        if all(spec.shape.is_fully_defined() for spec in leaves):
            specs = [
                jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype)
                for spec in leaves
            ]
            return treedef.unflatten(specs)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.first())

    def _open(self) -> Iterator[PyTree]:
        dataset: Any = self._source
        return dataset.as_numpy_iterator()

    def _open_at(self, state: Any) -> tuple[Iterator[PyTree], int]:
        """All but the last of the batches before `state` are made by TensorFlow and not read."""
        dataset: Any = self._source
        num_skipped = 0 if state is None else max(0, read_count(state, "batches") - 1)
        if not num_skipped or self._peeked is not None:
            return super()._open_at(state)
        return dataset.skip(num_skipped).as_numpy_iterator(), num_skipped

    def _skip_pass(self) -> None:
        iter(self._source)  # type: ignore[call-overload]

    def shuffle_without_seed(self) -> str | None:
        """A shuffle of the dataset, or of one that it is made of, if it has no seed."""
        return _find_shuffle_without_seed(self._source)


def _find_shuffle_without_seed(dataset: Any) -> str | None:
    seeds: list[Any] = [getattr(dataset, name, 1) for name in ("_seed", "_seed2")]
    if "Shuffle" in type(dataset).__name__ and not any(int(x) for x in seeds):
        return "tf.data.Dataset.shuffle"
    below = getattr(dataset, "_inputs", list)()
    return next(filter(None, map(_find_shuffle_without_seed, below)), None)


def _is_spec(value: Any) -> bool:
    return hasattr(value, "is_compatible_with")


def _check_spec(spec: PyTree) -> PyTree:
    """The specs of an element, all of which are dense arrays of numbers with a dim of examples."""
    named, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=_is_spec)
    for path, leaf in named:
        name = jax.tree_util.keystr(path)
        what = f"The elements of the tf.data.Dataset hold {leaf}{name and f' in {name}'}"
        if type(leaf).__name__ != "TensorSpec":
            raise TypeError(
                f"{what}. Devices hold only dense arrays: use dataset.map with to_tensor or "
                "tf.sparse.to_dense, or dataset.padded_batch."
            )
        if np.dtype(leaf.dtype.as_numpy_dtype).kind == "O":
            raise TypeError(
                f"{what}, but devices hold only numbers and booleans. Convert texts to token ids "
                "with dataset.map, or omit them."
            )
        if leaf.shape.rank == 0:
            raise ValueError(
                f"{what}, a scalar, but examples are counted along dim 0. Distribute "
                f"dataset.batch(global_batch_size)."
            )
    return spec
