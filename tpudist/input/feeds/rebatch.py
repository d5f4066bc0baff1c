"""The parts of global batches as batches of their own, where a process has data of its own."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.feeds.batch import describe_shapes
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.iterator_state import read_count
from tpudist.input.rows_of_replicas import Assignment
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    IndexedDataset,
)
from tpudist.options import PartialBatch


class Rebatched:
    """A source of batches of B / n rows, made of one whose batches have B.

    The first B % n of each n have one row more. So TensorFlow rebatches a dataset with
    auto-sharding off: a process, whose replicas take turns, uses up a batch of its own in several
    steps.
    """

    def __init__(self, source: Any, num_replicas: int, partial_batch: PartialBatch):
        """Splits the batches of `source`; those with fewer rows as `partial_batch` says.

        Raises:
            ValueError: They are to be shrunk, which each process would do alone.
        """
        if partial_batch is PartialBatch.SHRINK:
            raise ValueError(
                "InputOptions(partial_batch='shrink') does not support auto_shard_policy OFF or "
                "HINT: replicas take parts of their own process's batches, so no global batch has "
                "a tail to shrink. Use 'pad', 'drop' or 'error'."
            )
        if partial_batch is PartialBatch.DROP and isinstance(source, IndexedDataset):
            source = source.without_remainder()
        self._source = source
        self._num_replicas = num_replicas
        self._partial_batch = partial_batch
        self.owns_memory = source.owns_memory
        self._sizes = FullSizes()
        self.plan = iterable.plan_of(source)
        self.name = getattr(source, "name", type(source).__name__)

    @property
    def cardinality(self) -> int:
        """Number of parts of a pass, where it is known: that is, where they are without end."""
        known = self._source.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if known else UNKNOWN_CARDINALITY

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of the first part."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (Assignment(x.shape[0], self._num_replicas).rows_per_replica, *x.shape[1:]), x.dtype
            ),
            self._source.element_spec,
        )

    def shuffle_without_seed(self) -> str | None:
        """The random generator without a seed that shuffles the source, if one is found."""
        return iterable.shuffle_without_seed_of(self._source)

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch that is split; None before one was read."""
        return self._source.global_batch_size or self._sizes.largest

    def note_size(self, batch: Any) -> int:
        """The rows of a full batch with examples of the shapes that this one has."""
        if self._source.global_batch_size is not None:
            return self._source.global_batch_size
        return self._sizes.note(describe_shapes(batch), batch.num_rows)

    def get_state(self) -> dict[str, Any]:
        """What it knows of the sizes of batches."""
        return {"global batch size": self.global_batch_size or 0, **self._sizes.get_state()}

    def restore(self, state: Any) -> None:
        """As it was when a state was taken."""
        self._sizes.restore(state, "global batch size")

    def begin(self, pass_number: int, state: Any = None) -> "Parts":
        """The parts of one pass."""
        return Parts(self, pass_number, state)


class Parts(Iterator[Any]):
    """The parts of the batches of one pass."""

    def __init__(self, source: Rebatched, pass_number: int, state: Any):
        """After what `state` says: a state before a batch, and how many parts of it were given."""
        self._rebatched = source
        self._before = self._after = None
        self._num_given = 0
        self._expected: int | None = None  # the checksum of the batch that was given in part
        if state is not None and state.get("batches") == 0:  # the beginning of a pass
            self._before = state
        elif state is not None:
            self._num_given = read_count(state, "parts")
            self._before = state.get("before") or {"batches": 0}
            self._expected = state.get("checksum")
            source.restore(state)
            if state.get("ended"):
                self._before |= {"ended": True}
        self._batches = source._source.begin(pass_number, self._before)
        self._parts: list[Part] | None = None

    def __next__(self) -> "Part":
        while self._parts is None or self._num_given >= len(self._parts):
            if self._parts is not None:
                self._before, self._num_given = self._after, 0
            self._parts = self._split(next(self._batches))
            self._after = self._batches.get_state()
            expected, self._expected = self._expected, None
            if expected not in (None, self._after.get("checksum")):
                raise ValueError(iterable.OTHER_BATCHES.format(1, self._rebatched.name))
        part = self._parts[self._num_given]
        self._num_given += 1
        return part

    def _split(self, batch: Any) -> "list[Part]":
        source = self._rebatched
        size = source.note_size(batch)
        if batch.num_rows < size and source._partial_batch is PartialBatch.DROP:
            return []
        if batch.num_rows < size and source._partial_batch is PartialBatch.ERROR:
            raise ValueError(
                f"A batch of the dataset has {batch.num_rows} rows, fewer than the global batch of "
                f"{size}, and partial_batch='error'. Use 'pad', which counts its real rows "
                f"exactly, or 'drop'."
            )
        assignment = Assignment(size, source._num_replicas)
        rows = assignment.rows(batch.num_rows)
        return [Part(batch, assignment.start(i), each) for i, each in enumerate(rows) if each]

    def get_state(self) -> dict[str, Any]:
        """Where it is."""
        state = {
            **self._rebatched.get_state(),
            "before": self._before,
            "parts": self._num_given,
        }
        checksum = (self._after or {}).get("checksum")
        return state if checksum is None else state | {"checksum": checksum}


class Part:
    """Rows in sequence of a batch."""

    def __init__(self, batch: Any, start: int, num_rows: int):
        """Those from `start` on."""
        self.treedef = batch.treedef
        self.num_rows = num_rows
        self._batch, self._start = batch, start

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """The rows at `positions`, as the batch gives them."""
        return self._batch.take(self._start + positions, copy=copy)
