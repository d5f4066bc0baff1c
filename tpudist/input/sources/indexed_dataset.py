"""Datasets whose examples can be read by number: shuffled, batched and repeated by arithmetic.

What a batch holds is a function of the seed and its number alone, so a position in the data is one
integer, and each process reads the rows of its own replicas only.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import iterator_state, rows_of_replicas
from tpudist.input.sources.no_batches import NoBatches
from tpudist.input.sources.read_batch import ReadBatch

INFINITE_CARDINALITY = -1  # as tf.data's
UNKNOWN_CARDINALITY = -2
# In place of both arguments of `shard`: which part of the data is meant is known when they are
# distributed. As tf.data's.
SHARD_HINT = -1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of the examples; `num_epochs` is None for no end.

    Attributes:
        examples: Of how many shards of the examples which is read.
        batches: Of how many shards of the batches of an epoch which is read.
    """

    seed: int | None = None
    global_batch_size: int | None = None
    drop_remainder: bool = False
    num_epochs: int | None = 1
    examples: tuple[int, int] = (1, 0)
    batches: tuple[int, int] = (1, 0)


class IndexedDataset(abc.ABC):
    """Examples that can be read by number, perhaps shuffled, batched and repeated.

    Each method returns a new dataset: `dataset.shuffle(seed=0).batch(256).repeat(3)`, in this
    order. What a batch holds is a function of the seed and its number alone, the same on any number
    of replicas and processes.
    """

    # Hooks: a subclass sets the first three and defines `_read`.

    _num_rows: int
    """Number of examples, before any are left to other shards."""
    _treedef: jax.tree_util.PyTreeDef
    """The structure of an example."""
    _leaf_specs: list[jax.ShapeDtypeStruct]
    """Shapes and dtypes of the arrays of one example."""

    @abc.abstractmethod
    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        """The examples of these numbers: arrays `[*rows.shape, ...]` that nobody writes to later.

        What is random in them is a function of the seed, the epoch and the number only. Called in
        the background, by one thread for each pass that is under way.
        """

    def _order(self, epoch: int) -> np.ndarray | None:
        """In which order the `num_examples` examples of an epoch are read; None for as they are."""
        if self._plan.seed is None:
            return None
        return np.random.default_rng([self._plan.seed, epoch]).permutation(self.num_examples)

    def _host_batch(self, epoch: int, num_rows: int, start: int, order: np.ndarray | None) -> Any:
        """A batch, of which nothing is read before its `take` is called."""
        numbers = self._numbers(num_rows, start, order)
        return ReadBatch(self._read, self._treedef, numbers, epoch)

    # Hooks of what is read from files.

    num_files: int | None = None
    """Number of files; None if the examples do not come from files."""

    def with_order_by_files(self) -> Self:
        """The same examples in an order in which neighbours in a batch come from the same files.

        So a process, which reads the same rows of every batch, reads few files. It is a function of
        seed, epoch and global batch size, never of how many processes there are; `plan` tells it
        from the order without files.
        """
        raise ValueError(f"A {type(self).__name__} is not read from files.")

    def num_files_of(self, numbers: np.ndarray) -> int | None:
        """In how many files the examples of these numbers are; None if they come from no files."""
        del numbers
        return None

    # What all of them share.

    owns_memory = True
    _plan = Plan()
    _num_passes = 0
    """Number of passes that `iter` has begun. Distributed datasets count their own."""

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        num_shards, index = self._plan.examples
        return len(range(max(index, 0), self._num_rows, max(num_shards, 1)))

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch, or None before `batch`."""
        return self._plan.global_batch_size

    def shuffle(self, seed: int) -> Self:
        """Reads the examples of each epoch in an order of its own, a function of (seed, epoch).

        Raises:
            ValueError: It is shuffled or batched already, or the seed is not a number from 0.
        """
        if self._plan.seed is not None:
            raise ValueError(f"The dataset is already shuffled, with seed {self._plan.seed}.")
        if self._plan.global_batch_size is not None:
            raise ValueError("The dataset is already batched. Shuffle examples before batching.")
        return self._replace(seed=_whole_number("shuffle(seed)", seed, at_least=0))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> Self:
        """Groups examples in global batches, which are split over the replicas.

        Args:
            global_batch_size: Examples of a batch, over all replicas.
            drop_remainder: Leave out the last batch of an epoch if it is not full.

        Raises:
            ValueError: It is batched already, or the size is not a number from 1, or far too large.
        """
        if self._plan.global_batch_size is not None:
            raise ValueError(
                f"The dataset is already batched, by {self._plan.global_batch_size} examples."
            )
        size = _whole_number("batch(global_batch_size)", global_batch_size, at_least=1)
        has_padding = self.num_examples > 0 and not drop_remainder
        if has_padding and size > max(_MAX_PADDED, 16 * self.num_examples):
            raise ValueError(
                f"batch(global_batch_size={size}): the dataset has {self.num_examples} examples in "
                "an epoch, so nearly all of the batch would be padding. Use a smaller batch."
            )
        batched = self._replace(global_batch_size=size)
        return batched.without_remainder() if drop_remainder else batched

    def shard(self, num_shards: int, index: int) -> Self:
        """Every `num_shards`-th example from example `index`; of a batched dataset, batch.

        For a dataset function, which is told both by its `InputContext`. A shard of which nothing
        is left has no elements, as in TensorFlow. With `SHARD_HINT` for both, and
        `AutoShardPolicy.HINT`, each process reads a shard of its own.

        Raises:
            ValueError: It is repeated, or shuffled and not batched, or it has been sharded; or a
                number is not what it should be.
        """
        is_hint = num_shards == index == SHARD_HINT
        if not is_hint:
            num_shards = _whole_number("shard(num_shards)", num_shards, at_least=1)
            index = _whole_number("shard(index)", index, at_least=0)
            if index >= num_shards:
                raise ValueError(
                    f"shard(index={index}): the index must be one of {num_shards} shards."
                )
        if self._plan.num_epochs != 1:
            raise ValueError("The dataset is already repeated. Shard it before.")
        if self.has_shard_hint:
            raise ValueError("The dataset already has a SHARD_HINT. Shard it once.")
        if self._plan.global_batch_size is not None:
            if self._plan.batches != (1, 0):
                raise ValueError("The batches of the dataset are already sharded.")
            return self._replace(batches=(num_shards, index))
        if self._plan.seed is not None:
            raise ValueError("The dataset is already shuffled. Shard examples before shuffling.")
        if is_hint and self._plan.examples != (1, 0):
            raise ValueError("The examples of the dataset are already sharded.")
        each, first = self._plan.examples
        if not is_hint:
            num_shards, index = each * num_shards, first + each * index
        return self._replace(examples=(num_shards, index))

    def repeat(self, count: int | None = None) -> Self:
        """Goes through the epochs `count` times, or without end; each ends with its own last batch.

        Raises:
            ValueError: It is not batched or repeated already, or `count` is not a number from 1.
        """
        if self._plan.global_batch_size is None:
            raise ValueError("The dataset is not batched. Call batch(global_batch_size) first.")
        if self._plan.num_epochs != 1:
            raise ValueError("The dataset is already repeated. Call repeat once.")
        if count is not None:
            count = _whole_number("repeat(count)", count, at_least=1)
        return self._replace(num_epochs=count)

    @property
    def has_shard_hint(self) -> bool:
        """Whether it is not known yet which shard is read."""
        return (SHARD_HINT, SHARD_HINT) in (self._plan.examples, self._plan.batches)

    def with_shard_hint(self, num_shards: int, index: int) -> Self:
        """The same with these numbers in place of the `SHARD_HINT`."""
        kind = "examples" if self._plan.examples[0] == SHARD_HINT else "batches"
        return self._replace(**{kind: (num_shards, index)})

    @property
    def drops_remainder(self) -> bool:
        """Whether all batches are full ones."""
        return self._plan.drop_remainder

    @property
    def has_remainder(self) -> bool:
        """Whether an epoch ends with a batch that is not full."""
        size = self._plan.global_batch_size or 1
        return not self._plan.drop_remainder and self.num_examples % size > 0

    def without_remainder(self) -> Self:
        """The same full batches, without a last one that is not; perhaps there are none."""
        return self._replace(drop_remainder=True)

    @property
    def cardinality(self) -> int:
        """Number of elements: batches, or examples before `batch`; -1 if there is no end."""
        if self._plan.num_epochs is None and self.batches_of_epoch:
            return INFINITE_CARDINALITY
        return len(self.batches_of_epoch) * (self._plan.num_epochs or 0)

    def __len__(self) -> int:
        """The cardinality, which must have an end."""
        if self._plan.num_epochs is None:
            raise TypeError("The dataset repeats without end and has no length.")
        return self.cardinality

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a full batch, or of an example before `batch`.

        Raises:
            ValueError: If there is no example that says them.
        """
        if not self._leaf_specs:
            raise NoBatches
        size = self._plan.global_batch_size
        leading = () if size is None else (size,)
        return self._treedef.unflatten(
            [jax.ShapeDtypeStruct(leading + spec.shape, spec.dtype) for spec in self._leaf_specs]
        )

    def __iter__(self) -> Iterator[PyTree]:
        """The elements of the next pass as pytrees of arrays.

        A shuffled dataset has another order in each pass: those of the passes through the
        distributed dataset. As in tf.data.
        """
        examples = self.begin(self._num_passes)
        self._num_passes += 1
        return self._elements(examples)

    def from_first_pass(self) -> Self:
        """The same dataset, whose passes are counted anew."""
        return self._replace()

    def _elements(self, examples: "IndexedPass") -> Iterator[PyTree]:
        batched = self._plan.global_batch_size is not None
        while (place := examples.advance()) is not None:
            epoch, num_rows, start, order = place
            numbers = self._numbers(num_rows, start, order)
            yield self._treedef.unflatten(self._read(numbers if batched else numbers[0], epoch))

    @property
    def plan(self) -> dict[str, Any]:
        """What decides which examples are read when; a state is good for the same plan only."""
        specs = (f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in self._leaf_specs)
        return {
            "kind": "examples read by number",
            "number of examples": self._num_rows,
            "example": ", ".join(specs),
            "seed": self._plan.seed,
            "global batch size": self._plan.global_batch_size,
            "drops the remainder": self._plan.drop_remainder,
            "epochs of a pass": self._plan.num_epochs,
            "shard of examples": list(self._plan.examples),
            "shard of batches": list(self._plan.batches),
        }

    def numbers_of_epoch(self) -> Iterator[np.ndarray]:
        """The numbers of the examples of each batch of the first epoch."""
        order = self._order(0)
        for batch in self.batches_of_epoch:
            size = self._plan.global_batch_size or 1
            start = batch * size
            yield self._numbers(min(size, self.num_examples - start), start, order)

    def begin(self, pass_number: int, state: Any = None) -> "IndexedPass":
        """The batches of one pass; passes go on counting epochs where the one before ended.

        A pass without end has none after it, so each begins with epoch 0. Costs nothing per row:
        rows are read by `take` of a batch.

        Args:
            pass_number: Which pass.
            state: Where in it, as `get_state` of what this returns has said.

        Raises:
            ValueError: The state is not one of such a pass.
        """
        return IndexedPass(self, pass_number, state)

    @property
    def batches_of_epoch(self) -> range:
        """The numbers of the batches that are read in each epoch."""
        num_batches = rows_of_replicas.num_batches(
            self.num_examples,
            self._plan.global_batch_size or 1,
            drop_remainder=self._plan.drop_remainder,
        )
        num_shards, index = self._plan.batches
        return range(max(index, 0), num_batches, max(num_shards, 1))

    def _numbers(self, num_rows: int, start: int, order: np.ndarray | None) -> np.ndarray:
        """Which examples a batch holds, counted before any is left to other shards."""
        rows = np.arange(start, start + num_rows) if order is None else order[start:][:num_rows]
        num_shards, index = self._plan.examples
        return index + num_shards * rows

    def _replace(self, **changes: Any) -> Self:
        dataset = copy.copy(self)
        dataset._plan = dataclasses.replace(self._plan, **changes)
        dataset._num_passes = 0
        return dataset


class IndexedPass(Iterator[Any]):
    """The batches of one pass through an `IndexedDataset`."""

    def __init__(self, dataset: IndexedDataset, pass_number: int, given: Any):
        """After the batches that the state `given` counts."""
        self._dataset = dataset
        self._num_epochs = dataset._plan.num_epochs
        self._first_epoch = pass_number * (self._num_epochs or 0)
        self._num_given = 0 if given is None else iterator_state.read_count(given, "batches")
        self._num_batches = dataset.cardinality
        if 0 <= self._num_batches < self._num_given:
            raise ValueError(
                f"The state was taken after {self._num_given} batches of a pass, but a pass has "
                f"{self._num_batches}."
            )
        self._numbers, self._num_examples = dataset.batches_of_epoch, dataset.num_examples
        self._batch_size = dataset.global_batch_size or 1
        self._order: tuple[int, np.ndarray | None] | None = None

    def __next__(self) -> Any:
        place = self.advance()
        if place is None:
            raise StopIteration
        return self._dataset._host_batch(*place)

    def advance(self) -> tuple[int, int, int, np.ndarray | None] | None:
        """Epoch, rows, start and order of the next batch, for `_host_batch`; None at the end."""
        if self._num_given == self._num_batches:
            return None
        epoch, index = divmod(self._num_given, len(self._numbers))
        epoch += self._first_epoch
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._dataset._order(epoch))
        start = self._numbers[index] * self._batch_size
        num_rows = min(self._batch_size, self._num_examples - start)
        self._num_given += 1
        return epoch, num_rows, start, self._order[1]

    def get_state(self) -> dict[str, Any]:
        """Where the pass is."""
        return {"batches": self._num_given}


# A batch of so many rows may be padding for the most part: it fits in memory.
_MAX_PADDED = 1 << 16


def _whole_number(what: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{what}={value!r}: it must be an integer of at least {at_least}.")
    return int(value)
