"""A dataset over arrays in memory, read by index: a process touches its own replicas' rows only."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.input import assignment, host_batch
from tpudist.input.host_batch import HostBatch

PyTree = Any

INFINITE_CARDINALITY = -1  # as tf.data's
UNKNOWN_CARDINALITY = -2


class NumpyDataset:
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
            arrays: Pytree of arrays `[rows, ...]`. A list is one array, its elements stacked; use
                tuples and dicts for structure.

        Raises:
            ValueError: The arrays have different numbers of rows or none, or are ragged.
            TypeError: They do not hold numbers.
        """
        what = "The NumPy dataset"
        named, self._treedef = jax.tree_util.tree_flatten_with_path(
            arrays, is_leaf=lambda value: isinstance(value, list)
        )
        names = [jax.tree_util.keystr(path) for path, _ in named]
        self._leaves = [
            host_batch.as_array(leaf, what + name)
            for name, (_, leaf) in zip(names, named, strict=True)
        ]
        self._num_rows = host_batch.common_rows(self._leaves, names, what)
        self._plan = _Plan()

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch, or None before `batch`."""
        return self._plan.global_batch_size

    def shuffle(self, seed: int) -> "NumpyDataset":
        """Reads the examples of each epoch in an order of its own, a function of (seed, epoch).

        Raises:
            ValueError: It is shuffled or batched already, or the seed is not a number from 0.
        """
        if self._plan.seed is not None:
            raise ValueError(f"The dataset is shuffled already, with seed {self._plan.seed}.")
        if self._plan.global_batch_size is not None:
            raise ValueError("The dataset is batched already. Shuffle examples before batching.")
        return self._with(seed=_whole_number("shuffle(seed)", seed, at_least=0))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> "NumpyDataset":
        """Groups examples in global batches, which are split over the replicas.

        Args:
            global_batch_size: Examples of a batch, over all replicas.
            drop_remainder: Leave out the last batch of an epoch if it is not full.

        Raises:
            ValueError: It is batched already, the size is not a number from 1, or no batch is left.
        """
        if self._plan.global_batch_size is not None:
            raise ValueError(
                f"The dataset is batched already, by {self._plan.global_batch_size} examples."
            )
        size = _whole_number("batch(global_batch_size)", global_batch_size, at_least=1)
        batched = self._with(global_batch_size=size)
        return batched.without_remainder() if drop_remainder else batched

    def shard(self, num_shards: int, index: int) -> "NumpyDataset":
        """Every `num_shards`-th example from example `index`; of a batched dataset, batch.

        For a dataset function, which is told both by its `InputContext`.

        Raises:
            ValueError: It is repeated, or shuffled and not batched, or it has been sharded; a
                number is not what it should be; or nothing is left.
        """
        num_shards = _whole_number("shard(num_shards)", num_shards, at_least=1)
        index = _whole_number("shard(index)", index, at_least=0)
        if index >= num_shards:
            raise ValueError(f"shard(index) is {index}. Of {num_shards} shards it must be one.")
        if self._plan.num_epochs != 1:
            raise ValueError("The dataset is repeated already. Shard it before.")
        if self._plan.global_batch_size is not None:
            if self._plan.shard != (1, 0):
                raise ValueError("The batches of the dataset are sharded already.")
            sharded = self._with(shard=(num_shards, index))
        elif self._plan.seed is not None:
            raise ValueError("The dataset is shuffled already. Shard examples before shuffling.")
        else:
            sharded = self._with()
            sharded._leaves = [leaf[index::num_shards] for leaf in self._leaves]
            sharded._num_rows = len(sharded._leaves[0])
        if not sharded.cardinality:
            raise ValueError(
                f"Shard {index} of {num_shards} of a dataset of {self.cardinality} elements is "
                f"empty. Use fewer shards."
            )
        return sharded

    def repeat(self, count: int | None = None) -> "NumpyDataset":
        """Goes through the epochs `count` times, or without end; each ends with its own last batch.

        Raises:
            ValueError: It is not batched or repeated already, or `count` is not a number from 1.
        """
        if self._plan.global_batch_size is None:
            raise ValueError("The dataset is not batched. Call batch(global_batch_size) first.")
        if self._plan.num_epochs != 1:
            raise ValueError("The dataset is repeated already. Call repeat once.")
        if count is not None:
            count = _whole_number("repeat(count)", count, at_least=1)
        return self._with(num_epochs=count)

    @property
    def drops_remainder(self) -> bool:
        """Whether all batches are full ones."""
        return self._plan.drop_remainder

    @property
    def has_remainder(self) -> bool:
        """Whether an epoch ends with a batch that is not full."""
        size = self._plan.global_batch_size or 1
        return not self._plan.drop_remainder and self._num_rows % size > 0

    def without_remainder(self) -> "NumpyDataset":
        """The same full batches, without a last one that is not.

        Raises:
            ValueError: There is no full batch.
        """
        size = self._plan.global_batch_size or 1
        if size > self._num_rows:
            raise ValueError(
                f"A dataset of {self._num_rows} examples has no full batch of {size}, so nothing "
                f"is left of it without the last batch. Use a global batch of at most "
                f"{self._num_rows}, or keep the last batch."
            )
        return self._with(drop_remainder=True)

    @property
    def cardinality(self) -> int:
        """Number of elements: batches, or examples before `batch`; -1 if there is no end."""
        if self._plan.num_epochs is None:
            return INFINITE_CARDINALITY
        return len(self._batches_of_epoch) * self._plan.num_epochs

    def __len__(self) -> int:
        """The cardinality, which must have an end."""
        if self._plan.num_epochs is None:
            raise TypeError("The dataset repeats without end and has no length.")
        return self.cardinality

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a full batch, or of an example before `batch`."""
        size = self._plan.global_batch_size
        leading = () if size is None else (size,)
        return self._treedef.unflatten(
            [jax.ShapeDtypeStruct(leading + leaf.shape[1:], leaf.dtype) for leaf in self._leaves]
        )

    def __iter__(self) -> Iterator[PyTree]:
        """The elements of the first pass as pytrees of arrays; views if it is not shuffled."""
        for batch in self.host_batches():
            if self._plan.global_batch_size is None:
                row = batch.start if batch.order is None else batch.order[batch.start]
                leaves = [leaf[row] for leaf in self._leaves]
            else:
                rows = slice(batch.start, batch.start + batch.num_rows)
                index = rows if batch.order is None else batch.order[rows]
                leaves = [leaf[index] for leaf in self._leaves]
            yield self._treedef.unflatten(leaves)

    def host_batches(self, pass_number: int = 0) -> Iterator[HostBatch]:
        """The batches of one pass; passes go on counting epochs where the one before ended.

        A pass without end has none after it, so each begins with epoch 0. Costs nothing per row:
        rows are read by `HostBatch.take`.
        """
        size = self._plan.global_batch_size or 1
        num_epochs = self._plan.num_epochs
        if num_epochs is None:
            epochs = itertools.count()
        else:
            epochs = range(pass_number * num_epochs, (pass_number + 1) * num_epochs)
        for epoch in epochs:
            order = self._order(epoch)
            for number in self._batches_of_epoch:
                start = number * size
                num_rows = min(size, self._num_rows - start)
                yield HostBatch(self._leaves, self._treedef, num_rows, start, order)

    def _order(self, epoch: int) -> np.ndarray | None:
        if self._plan.seed is None:
            return None
        return np.random.default_rng([self._plan.seed, epoch]).permutation(self._num_rows)

    @property
    def _batches_of_epoch(self) -> range:
        """The numbers of the batches that are read."""
        num_batches = assignment.num_batches(
            self._num_rows,
            self._plan.global_batch_size or 1,
            drop_remainder=self._plan.drop_remainder,
        )
        num_shards, index = self._plan.shard
        return range(index, num_batches, num_shards)

    def _with(self, **changes: Any) -> "NumpyDataset":
        dataset = copy.copy(self)
        dataset._plan = dataclasses.replace(self._plan, **changes)
        return dataset


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is asked of the examples; `num_epochs` is None for no end.

    Attributes:
        shard: Of how many shards of the batches of an epoch which is read.
    """

    seed: int | None = None
    global_batch_size: int | None = None
    drop_remainder: bool = False
    num_epochs: int | None = 1
    shard: tuple[int, int] = (1, 0)


def _whole_number(what: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{what} is {value!r}. Give a whole number of at least {at_least}.")
    return int(value)
