"""Base of datasets whose examples are read by number; shuffle, batch and repeat are arithmetic.

The contents of a batch depend only on the seed and its number. So a position in the data is one
integer, and each process reads only the rows of its own replicas.
"""

import abc
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import iterator_state
from tpudist.input.iterator_state import State
from tpudist.input.permutation import Order
from tpudist.input.sources.dataset_settings import SHARD_HINT, BatchPlace, Settings
from tpudist.input.sources.no_batches import NoBatches
from tpudist.input.sources.read_batch import ReadBatch
from tpudist.input.sources.source import RowBatch
from tpudist.options import AutoShardPolicy

# The values of tf.data.
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
# Largest batch that may consist mostly of padding: that many rows fit in memory. Larger ones, of
# more than this many times the examples, are a mistake, such as bytes in place of rows.
_MAX_PADDED, _MAX_PADDING_RATIO = 1 << 16, 16


class IndexedDataset(abc.ABC):
    """Examples that can be read by number; can be shuffled, batched and repeated.

    Each method returns a new dataset: `dataset.shuffle(seed=0).batch(256).repeat(3)`, in this
    order. The contents of a batch depend only on the seed and its number, so they are the same on
    any number of replicas and processes.
    """

    # Hooks: a subclass sets the first three and defines `_read`.

    _num_rows: int
    """Number of examples of all shards."""
    _treedef: jax.tree_util.PyTreeDef
    """The structure of an example."""
    _leaf_specs: list[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the arrays of one example."""

    @abc.abstractmethod
    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        """Returns the examples with these numbers: arrays `[*rows.shape, ...]`.

        Nobody writes to the arrays later. Random changes of an example depend only on the seed, the
        epoch and its number. One background thread per pass calls this.
        """

    def _order(self, epoch: int) -> Order | None:
        """Returns the order of the `num_examples` examples of an epoch; None for ascending."""
        return self._settings.shuffle(self.num_examples, epoch)

    def _host_batch(self, place: BatchPlace) -> RowBatch:
        """Returns a batch, whose rows are read by its `take`."""
        numbers_of = functools.partial(self._numbers, place)
        return ReadBatch(self._read, self._treedef, place.num_rows, numbers_of, place.epoch)

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    """Policy that the dataset itself requests. Another one in `InputOptions` has precedence."""

    # Hooks of datasets that are read from files.

    num_files: int | None = None
    """Number of files; None if the examples do not come from files."""

    def with_order_by_files(self) -> Self:
        """Returns the dataset in an order in which neighbors in a batch come from the same files.

        A process reads the same rows of every batch, and so few files. The order depends on the
        seed, the epoch and the global batch size, but not on the number of processes. `plan`
        differs from that of the order without files.
        """
        raise ValueError(f"A {type(self).__name__} is not read from files.")

    def num_files_of(self, numbers: np.ndarray) -> int | None:
        """Returns the number of files that contain these examples; None without files."""
        del numbers
        return None

    # Shared by all datasets.

    owns_memory = True
    _settings = Settings()
    _num_passes = 0
    """Number of passes that `iter` has begun. Distributed datasets count their own."""

    @property
    def name(self) -> str:
        """Name of the class, for messages."""
        return type(self).__name__

    def shuffle_without_seed(self) -> str | None:
        """Returns None: `shuffle` requires a seed."""
        return None

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        return self._settings.count_examples(self._num_rows)

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch; None before `batch`."""
        return self._settings.global_batch_size

    def shuffle(self, seed: int) -> Self:
        """Shuffles the examples. Each epoch has its own order, which depends on (seed, epoch).

        Memory and time to the first batch do not depend on the number of examples: of more than
        65,536, only those orders are computed that are read.

        Raises:
            ValueError: If the dataset is already shuffled or batched, or `seed` is not an integer
                of at least 0.
        """
        if self._settings.seed is not None:
            raise ValueError(f"The dataset is already shuffled, with seed {self._settings.seed}.")
        if self._settings.global_batch_size is not None:
            raise ValueError("The dataset is already batched. Shuffle examples before batching.")
        return self._replace(seed=_whole_number("shuffle(seed)", seed, at_least=0))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> Self:
        """Groups examples into global batches, which are split over the replicas.

        Args:
            global_batch_size: Examples per batch, over all replicas.
            drop_remainder: Whether to drop the last batch of an epoch if it is not full.

        Raises:
            ValueError: If the dataset is already batched, or the size is not an integer of at least
                1, or is far too large.
        """
        if self._settings.global_batch_size is not None:
            raise ValueError(
                f"The dataset is already batched, by {self._settings.global_batch_size} examples."
            )
        size = _whole_number("batch(global_batch_size)", global_batch_size, at_least=1)
        has_padding = self.num_examples > 0 and not drop_remainder
        if has_padding and size > max(_MAX_PADDED, _MAX_PADDING_RATIO * self.num_examples):
            raise ValueError(
                f"batch(global_batch_size={size}): the dataset has {self.num_examples} examples in "
                "an epoch, so nearly all of the batch would be padding. Use a smaller batch."
            )
        batched = self._replace(global_batch_size=size)
        return batched.without_remainder() if drop_remainder else batched

    def shard(self, num_shards: int, index: int) -> Self:
        """Keeps every `num_shards`-th example from example `index`; if batched, every such batch.

        Use it in a dataset function, whose `InputContext` has both numbers. A shard may have no
        elements, as in TensorFlow. With `SHARD_HINT` for both, and `AutoShardPolicy.HINT`, each
        process reads its own shard.

        Raises:
            ValueError: If the dataset is already repeated or sharded, or is shuffled but not
                batched, or if a number is out of range.
        """
        # Examples are sharded before the shuffle, so that an example is in the same shard in every
        # epoch. Batches are sharded after it, when they exist.
        is_hint = num_shards == index == SHARD_HINT
        if not is_hint:
            num_shards = _whole_number("shard(num_shards)", num_shards, at_least=1)
            index = _whole_number("shard(index)", index, at_least=0)
            if index >= num_shards:
                raise ValueError(
                    f"shard(index={index}): the index must be one of {num_shards} shards."
                )
        if self._settings.num_epochs != 1:
            raise ValueError("The dataset is already repeated. Shard it before.")
        if self.has_shard_hint:
            raise ValueError("The dataset already has a SHARD_HINT. Shard it once.")
        if self._settings.global_batch_size is not None:
            if self._settings.batches != (1, 0):
                raise ValueError("The batches of the dataset are already sharded.")
            return self._replace(batches=(num_shards, index))
        if self._settings.seed is not None:
            raise ValueError("The dataset is already shuffled. Shard examples before shuffling.")
        if is_hint and self._settings.examples != (1, 0):
            raise ValueError("The examples of the dataset are already sharded.")
        if not is_hint:  # a shard of a shard
            step, first = self._settings.examples
            num_shards, index = step * num_shards, first + step * index
        return self._replace(examples=(num_shards, index))

    def repeat(self, count: int | None = None) -> Self:
        """Repeats the epoch `count` times, or without end. Each epoch ends with its own last batch.

        Raises:
            ValueError: If the dataset is not batched or is already repeated, or `count` is not an
                integer of at least 1.
        """
        if self._settings.global_batch_size is None:
            raise ValueError("The dataset is not batched. Call batch(global_batch_size) first.")
        if self._settings.num_epochs != 1:
            raise ValueError("The dataset is already repeated. Call repeat once.")
        if count is not None:
            count = _whole_number("repeat(count)", count, at_least=1)
        return self._replace(num_epochs=count)

    @property
    def has_shard_hint(self) -> bool:
        """Whether the shard is not known yet."""
        return self._settings.has_shard_hint

    def with_shard_hint(self, num_shards: int, index: int) -> Self:
        """Replaces the `SHARD_HINT` by these numbers."""
        field = "examples" if self._settings.examples[0] == SHARD_HINT else "batches"
        return self._replace(**{field: (num_shards, index)})

    @property
    def drops_remainder(self) -> bool:
        """Whether a last batch that is not full is dropped."""
        return self._settings.drop_remainder

    @property
    def has_remainder(self) -> bool:
        """Whether an epoch ends with a batch that is not full."""
        size = self._settings.global_batch_size or 1
        return not self._settings.drop_remainder and self.num_examples % size > 0

    def without_remainder(self) -> Self:
        """Drops a last batch that is not full."""
        return self._replace(drop_remainder=True)

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass: batches, or examples before `batch`; -1 for no end."""
        if self._settings.num_epochs is None and self.batches_of_epoch:
            return INFINITE_CARDINALITY
        return len(self.batches_of_epoch) * (self._settings.num_epochs or 0)

    def __len__(self) -> int:
        """Returns the cardinality; raises `TypeError` if it is infinite."""
        if self.cardinality == INFINITE_CARDINALITY:
            raise TypeError("The dataset repeats without end and has no length.")
        return self.cardinality

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a full batch, or of an example before `batch`.

        Raises:
            NoBatches: If there are no examples to determine them.
        """
        if not self._leaf_specs:
            raise NoBatches
        size = self._settings.global_batch_size
        leading = () if size is None else (size,)
        return self._treedef.unflatten(
            [jax.ShapeDtypeStruct(leading + spec.shape, spec.dtype) for spec in self._leaf_specs]
        )

    def __iter__(self) -> Iterator[PyTree]:
        """Returns the elements of the next pass as pytrees of arrays.

        A shuffled dataset has another order in each pass, as in tf.data: the order of the same pass
        through the distributed dataset.
        """
        batches = self.begin(self._num_passes)
        self._num_passes += 1
        return self._elements(batches)

    def elements_from(self, position: int) -> Iterator[PyTree]:
        """Returns the elements of the first pass from a position on; reads no others."""
        return self._elements(self.begin(0, {"batches": position}))

    def _elements(self, batches: "IndexedPass") -> Iterator[PyTree]:
        is_batched = self._settings.global_batch_size is not None
        while (place := batches.advance()) is not None:
            numbers = self._numbers(place)
            leaves = self._read(numbers if is_batched else numbers[0], place.epoch)
            yield self._treedef.unflatten(leaves)

    @property
    def plan(self) -> dict[str, Any]:
        """Properties that determine the examples of each batch; a state requires equal ones."""
        specs = (f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in self._leaf_specs)
        return {
            "kind": "examples read by number",
            "number of examples": self._num_rows,
            "example": ", ".join(specs),
            "seed": self._settings.seed,
            "global batch size": self._settings.global_batch_size,
            "drops the remainder": self._settings.drop_remainder,
            "epochs of a pass": self._settings.num_epochs,
            "shard of examples": list(self._settings.examples),
            "shard of batches": list(self._settings.batches),
        }

    def numbers_of_first_epoch(self) -> Iterator[np.ndarray]:
        """Yields the numbers of the examples of each batch of the first epoch."""
        order = self._order(0)
        for batch in self.batches_of_epoch:
            size = self._settings.global_batch_size or 1
            start = batch * size
            num_rows = min(size, self.num_examples - start)
            yield self._numbers(BatchPlace(0, num_rows, start, order))

    def begin(self, pass_number: int, state: State | None = None) -> "IndexedPass":
        """Returns the batches of one pass. Reads no rows: `take` of a batch does.

        The epochs of a pass are counted on from the pass before. A pass without end has no
        successor, so each begins with epoch 0.

        Args:
            pass_number: Number of the pass.
            state: Result of `get_state` of another pass, at whose position this one begins.

        Raises:
            ValueError: If the state does not belong to such a pass.
        """
        return IndexedPass(self, pass_number, state)

    def with_orders_of(self, version: int) -> Self:
        """Returns the dataset with the shuffle of states of this version."""
        return self._replace(state_version=version)

    @property
    def batches_of_epoch(self) -> range:
        """Numbers of the batches that are read in each epoch."""
        return self._settings.batches_of_epoch(self._num_rows)

    def _numbers(self, place: BatchPlace, positions: np.ndarray | None = None) -> np.ndarray:
        """Returns the numbers of the examples at `positions` of a batch, among all shards.

        Without positions, of the whole batch.
        """
        rows = place.start + (np.arange(place.num_rows) if positions is None else positions)
        if place.order is not None:
            rows = place.order[rows]
        num_shards, index = self._settings.shard_of_examples
        return index + num_shards * rows

    def _replace(self, **changes: Any) -> Self:
        dataset = copy.copy(self)
        dataset._settings = dataclasses.replace(self._settings, **changes)
        dataset._num_passes = 0
        return dataset


class IndexedPass(Iterator[RowBatch]):
    """The batches of one pass through an `IndexedDataset`; see `IndexedDataset.begin`."""

    def __init__(self, dataset: IndexedDataset, pass_number: int, state: State | None):
        self._dataset = dataset
        self._first_epoch = pass_number * (dataset._settings.num_epochs or 0)
        self._num_taken = 0 if state is None else iterator_state.read_count(state, "batches")
        self._num_batches = dataset.cardinality
        if 0 <= self._num_batches < self._num_taken:
            raise ValueError(
                f"The state was taken after {self._num_taken} batches of a pass, but a pass has "
                f"{self._num_batches}."
            )
        self._numbers, self._num_examples = dataset.batches_of_epoch, dataset.num_examples
        self._batch_size = dataset.global_batch_size or 1
        # Epoch and its order. Only the present epoch's is kept: an array has all rows.
        self._order: tuple[int, Order | None] | None = None

    def __next__(self) -> RowBatch:
        place = self.advance()
        if place is None:
            raise StopIteration
        return self._dataset._host_batch(place)

    def advance(self) -> BatchPlace | None:
        """Returns the place of the next batch; None at the end."""
        if self._num_taken == self._num_batches:
            return None
        epoch, index = divmod(self._num_taken, len(self._numbers))
        epoch += self._first_epoch
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._dataset._order(epoch))
        start = self._numbers[index] * self._batch_size
        num_rows = min(self._batch_size, self._num_examples - start)
        self._num_taken += 1
        return BatchPlace(epoch, num_rows, start, self._order[1])

    def get_state(self) -> State:
        """Returns the position: the number of batches that were taken."""
        return {"batches": self._num_taken}


def _whole_number(parameter: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{parameter}={value!r}: it must be an integer of at least {at_least}.")
    return int(value)
