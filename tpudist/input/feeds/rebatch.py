"""Divides each global batch of a process into parts, which are batches of one replica each.

For `AutoShardPolicy` OFF and HINT, with which each process has its own data.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.feeds.batch import describe_shapes
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.iterator_state import State, read_count, require
from tpudist.input.rows_of_replicas import Assignment
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    IndexedDataset,
)
from tpudist.input.sources.iterable import IterableSource
from tpudist.input.sources.source import RowBatch, SourcePass
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.options import PartialBatch


class Rebatched:
    """A source whose batches are the n parts of another source's batches, with B / n rows each.

    The first B % n parts have one row more. TensorFlow rebatches a dataset with auto-sharding off
    in the same way. The replicas of a process take the parts in turn, so a batch of the process
    lasts for several steps.

    Args:
        source: Source of the batches.
        num_replicas: Number of parts, over all processes.
        partial_batch: Treatment of batches with fewer rows.

    Raises:
        ValueError: If `partial_batch` is SHRINK, which each process would do on its own.
    """

    def __init__(
        self,
        source: IndexedDataset | IterableSource,
        num_replicas: int,
        partial_batch: PartialBatch,
    ):
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
        self.plan = source.plan
        self.name = source.name

    @property
    def cardinality(self) -> int:
        """-1 if a pass has no end, else -2 (unknown)."""
        is_infinite = self._source.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if is_infinite else UNKNOWN_CARDINALITY

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
        """See `BatchSource`."""
        return self._source.shuffle_without_seed()

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch before it is split; None before the first batch."""
        return self._source.global_batch_size or self._sizes.largest

    def record_size(self, batch: RowBatch) -> int:
        """Returns the rows of a full batch with the shapes of `batch`."""
        if self._source.global_batch_size is not None:
            return self._source.global_batch_size
        assert isinstance(batch, HostBatch), batch  # of an iterable
        return self._sizes.record(describe_shapes(batch), batch.num_rows)

    def get_state(self) -> State:
        """Returns the part of a state about the sizes of batches."""
        return {"global batch size": self.global_batch_size or 0, **self._sizes.get_state()}

    def restore(self, state: State) -> None:
        """Restores the sizes of batches from a state."""
        self._sizes.restore(state, "global batch size")

    def with_orders_of(self, version: int) -> Self:
        """Returns the parts of the source with the shuffle of states of this version."""
        rebatched = copy.copy(self)  # which shares the sizes of batches
        rebatched._source = self._source.with_orders_of(version)
        return rebatched

    def begin(self, pass_number: int, state: State | None = None) -> "RebatchedPass":
        """Returns the parts of one pass."""
        return RebatchedPass(self, pass_number, state)

    def begin_source(self, pass_number: int, state: State | None) -> SourcePass:
        """Returns the batches of one pass through the source."""
        return self._source.begin(pass_number, state)

    def split(self, batch: RowBatch) -> "list[Part]":
        """Returns the parts with rows of a batch; none if it is partial and dropped."""
        size = self.record_size(batch)
        if batch.num_rows < size and self._partial_batch is PartialBatch.DROP:
            return []
        if batch.num_rows < size and self._partial_batch is PartialBatch.ERROR:
            raise ValueError(
                f"A batch of the dataset has {batch.num_rows} rows, fewer than the global batch of "
                f"{size}, and partial_batch='error'. Use 'pad', which counts its real rows "
                f"exactly, or 'drop'."
            )
        assignment = Assignment(size, self._num_replicas)
        rows = assignment.rows(batch.num_rows)
        return [Part(batch, assignment.start(i), n) for i, n in enumerate(rows) if n]


class RebatchedPass(Iterator["Part"]):
    """The parts of the batches of one pass.

    A state consists of the source's state before the present batch and the number of its rows that
    were taken. So a resumed pass reads that batch again, and compares its checksum.
    """

    def __init__(self, source: Rebatched, pass_number: int, state: State | None):
        self._rebatched = source
        # States of the source before and after the present batch.
        self._before: State | None = None
        self._after: State | None = None
        self._parts: list[Part] | None = None  # of the present batch; None before it is read
        self._num_taken = 0  # parts
        # Of the state at which the pass begins: the rows of the batch that were taken, and its
        # checksum. States of earlier releases have only the number of parts.
        self._num_rows_taken: int | None = None
        self._expected: int | None = None
        if state is not None and state.get("batches") == 0:
            # The beginning of a pass, which `Position.state_for` gives to every kind of source.
            self._before = state
        elif state is not None:
            require("before" in state, "it has no 'before', the position before the present batch")
            self._num_taken = read_count(state, "parts")
            self._num_rows_taken = read_count(state, "rows") if "rows" in state else None
            before: State = {"batches": 0} if state["before"] is None else state["before"]
            read_count(before, "batches")
            # `Position.state_for` adds "ended" to this state; the source must know it, too.
            self._before = before | {"ended": True} if state.get("ended") else before
            self._expected = state.get("checksum")
            source.restore(state)
        self._batches = source.begin_source(pass_number, self._before)

    def __next__(self) -> "Part":
        # A loop, because a partial batch that is dropped has no parts.
        while self._parts is None or self._num_taken >= len(self._parts):
            if self._parts is not None:
                self._before, self._num_taken = self._after, 0
            self._parts = self._rebatched.split(next(self._batches))
            self._after = self._batches.get_state()
            expected, self._expected = self._expected, None
            if expected not in (None, self._after.get("checksum")):
                raise ValueError(
                    iterable.OTHER_BATCHES.format(num_batches=1, name=self._rebatched.name)
                )
            if self._num_rows_taken is not None:
                self._num_taken = self._find_part(self._parts, self._num_rows_taken)
                self._num_rows_taken = None
        part = self._parts[self._num_taken]
        self._num_taken += 1
        return part

    def _find_part(self, parts: "list[Part]", num_rows: int) -> int:
        """Returns the number of parts that make up the first `num_rows` rows of a batch."""
        ends = [0, *itertools.accumulate(part.num_rows for part in parts)]
        if num_rows not in ends:
            raise ValueError(
                f"The state was taken after {num_rows} rows of a batch of the "
                f"{self._rebatched.name}, but the parts of this batch for the present replicas end "
                f"at rows {ends[1:]}. Resume with the number of replicas of the run that wrote the "
                "state."
            )
        return ends.index(num_rows)

    def get_state(self) -> State:
        """Returns the position; see the class."""
        state = {
            **self._rebatched.get_state(),
            "before": self._before,
            "parts": self._num_taken,
        }
        num_rows = self._num_rows_taken
        if self._parts is not None:
            num_rows = sum(part.num_rows for part in self._parts[: self._num_taken])
        checksum = (self._after or {}).get("checksum")
        optional = {"rows": num_rows, "checksum": checksum}
        return state | {key: value for key, value in optional.items() if value is not None}


class Part:
    """A `RowBatch` of the `num_rows` rows of another batch from row `start` on."""

    def __init__(self, batch: RowBatch, start: int, num_rows: int):
        self.treedef = batch.treedef
        self.num_rows = num_rows
        self._batch, self._start = batch, start

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """Returns the rows at `positions` of this part; see `RowBatch`."""
        return self._batch.take(self._start + positions, copy=copy)
