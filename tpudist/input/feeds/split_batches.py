"""Feed that splits each global batch over the replicas. A process reads its replicas' rows."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from tpudist.array_types import PyTree, Shape
from tpudist.input.feeds import equal_batches
from tpudist.input.feeds.empty_pass import warn_of_empty_pass
from tpudist.input.feeds.equal_batches import HostElement, ReadBatch
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.iterator_state import Position, read_count, require
from tpudist.input.process_rounds import Rounds
from tpudist.input.rows_of_replicas import Assignment
from tpudist.input.sources.indexed_dataset import UNKNOWN_CARDINALITY, IndexedDataset
from tpudist.input.sources.iterable import IterableSource
from tpudist.input.sources.no_batches import NoBatches
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.sources.source import RowBatch, SourcePass
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.feed_ahead import PartsOfPass
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.input.transfer.to_devices import Parts
from tpudist.options import PartialBatch
from tpudist.xla.mesh import ReplicaMesh

# Shape and dtype of one row of an array; the dtype is JAX's, or None if JAX has none for it.
_RowSpec: TypeAlias = tuple[Shape, np.dtype | None]


class SplitBatches:
    """A feed whose elements are the global batches of one source.

    All processes have the same source. The global batch size is the size of the largest batch so
    far with examples of the same shapes; an `IndexedDataset` knows it. Examples may have several
    shapes, such as sequences in buckets by length: a step is compiled for each.

    Attributes:
        may_run_in_loop: See `feed_ahead.Feed`.

    Args:
        source: Source of the batches.
        replica_mesh: The replicas.
        partial_batch: Treatment of a batch that is not full; see `DistributedDataset`.
        fills_first: Whether the first replicas get as many rows of a partial batch as of a full
            one. By default all replicas get equal parts.
    """

    def __init__(
        self,
        source: IndexedDataset | IterableSource,
        replica_mesh: ReplicaMesh,
        partial_batch: PartialBatch | str | None,
        *,
        fills_first: bool = False,
    ):
        self._fills_first = fills_first
        self.partial_batch = PartialBatch.of(partial_batch)
        self.source = source
        if isinstance(self.source, IndexedDataset):
            self.source = self._apply_partial_batch(self.source)
        self._mesh = replica_mesh
        # The only replica needs no counts of rows, unless you request padding for it.
        pads_one = partial_batch is not None and self.partial_batch is PartialBatch.PAD
        self._counts_rows = replica_mesh.num_replicas > 1 or pads_one
        self.may_run_in_loop = isinstance(self.source, NumpyDataset)
        self._sizes = FullSizes()
        # Structure and rows of the first batch of any pass, with which later ones must agree.
        self._treedef: jax.tree_util.PyTreeDef | None = None
        self._row_specs: list[_RowSpec] = []

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if unknown."""
        is_dropping = self.partial_batch is PartialBatch.DROP
        if is_dropping and not isinstance(self.source, IndexedDataset):
            return UNKNOWN_CARDINALITY
        return self.source.cardinality

    def global_batch_size(self, *, read: bool) -> int | None:
        """Returns the rows of a full batch; None if unknown. May read the first batch if `read`."""
        known = self.source.global_batch_size or self._sizes.largest
        if known is None and read:
            with contextlib.suppress(NoBatches):
                return jax.tree.leaves(self.source.element_spec)[0].shape[0]
        return known

    @property
    def plan(self) -> dict[str, Any]:
        """Properties of the data that a state requires."""
        return self.source.plan

    def shuffle_without_seed(self) -> str | None:
        """Returns the name of an unseeded generator that shuffles the source, if one is found."""
        return self.source.shuffle_without_seed()

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, in its structure."""
        leaves, treedef = jax.tree.flatten(self.source.element_spec)
        size = leaves[0].shape[0]
        assignment = self.assignment(size, size)
        part_size, rows = assignment.rows_per_replica, assignment.rows(size)
        if not self._counts_rows:
            part_size, rows = size, None
        return treedef.unflatten(
            [
                to_devices.part_spec(self._mesh, (part_size, *leaf.shape[1:]), leaf.dtype, rows)
                for leaf in leaves
            ]
        )

    def host_parts(self, position: Position, *, keep: bool, rounds: Rounds | None) -> PartsOfPass:
        """Returns this process's parts of the batches of one pass, each with the state after it.

        Args:
            position: Position at which the pass begins.
            keep: Whether the parts wait in host memory, while the source makes the next batch.
            rounds: Channel on which several processes compare their batches; None for one process.
        """
        # A user's loader may reuse its arrays for the next batch. So a part is copied if it is read
        # after the next batch is made: if it is kept, and on CPU, where JAX uses aligned NumPy
        # arrays in place. Else it is only borrowed; see `_take`.
        copy = not self.source.owns_memory and (keep or self._mesh.platform == "cpu")
        state, num_read = position.read_source(), 0
        if state is not None and self.source.global_batch_size is None:
            self._sizes.restore(state, "global batch size")
            state = state.get("dataset")
        if position.step:
            # Dropped batches are not elements. A dataset that is read by number drops none.
            num_read = read_count(state, "batches")
            is_exact = isinstance(self.source, IndexedDataset)
            require(
                num_read == position.step if is_exact else num_read >= position.step,
                f"it was taken after {position.step} elements, but {num_read} batches",
            )
        state = position.state_for(state)

        def begin() -> SourcePass:
            source = self.source.with_orders_of(position.version)
            return source.begin(position.pass_number, state)

        batches = begin() if rounds is None else rounds.call_and_report(begin)
        return self._parts(batches, position, num_read, copy, rounds)

    def _parts(
        self,
        batches: SourcePass,
        position: Position,
        num_read: int,
        copy: bool,
        rounds: Rounds | None,
    ) -> PartsOfPass:
        # Lazily: each element is made before the next batch is read.
        read = (
            (batch, self._make_element(batches, batch, size, copy))
            for batch, size in self._check_batches(batches, num_read)
        )
        elements = (element for _, element in read)
        if rounds is not None:
            # It may ask a store for the versions of files.
            plan = rounds.call_and_report(lambda: self.plan)
            rounds.require_same(plan, position._asdict())
            # Batches that are read by number are equal if the plans are. Others are compared.
            if not isinstance(self.source, IndexedDataset):
                described = itertools.starmap(self._describe, read)
                elements = equal_batches.take_equal(described, rounds, num_read)
        num_elements, num_batches = position.step, num_read
        with contextlib.closing(elements):
            for element in elements:
                num_batches += 1
                if element is not None:
                    yield element
                    num_elements += 1
        if not num_elements:
            warn_of_empty_pass(self, self.source, num_dropped=num_batches)

    def _make_element(
        self, batches: SourcePass, batch: RowBatch, size: int, copy: bool
    ) -> HostElement:
        """Returns the parts of a batch, and the position after it; None if it is dropped."""
        if batch.num_rows < size and self.partial_batch is PartialBatch.DROP:
            return None
        state = batches.get_state()
        if self.source.global_batch_size is None:
            state = {
                "global batch size": self._sizes.largest,
                **self._sizes.get_state(),
                "dataset": state,
            }
        return self._take(batch, size, copy), state

    def _describe(self, batch: RowBatch, element: HostElement) -> ReadBatch:
        """Returns a batch with its description for other processes."""
        assert isinstance(batch, HostBatch), batch  # of an iterable
        # If the source owns the memory, the parts may be views of the whole batch.
        parts = [] if element is None else element[0].leaves
        leaves = batch.leaves if self.source.owns_memory else parts
        description = f"{batch.num_rows} rows of {_describe_rows(batch)}"
        return ReadBatch(element, description, sum(x.nbytes for x in leaves))

    def assignment(self, num_rows: int, size: int) -> Assignment:
        """Returns the split of a batch of `num_rows` rows; a full batch has `size` rows."""
        shrinks = self.partial_batch is PartialBatch.SHRINK
        return _assignment(num_rows, size, self._mesh.num_replicas, shrinks, self._fills_first)

    def _take(self, batch: RowBatch, size: int, copy: bool) -> Parts:
        # A borrowed part shares memory with the source: its copy to the device must end before the
        # source makes the next batch.
        borrowed, num_rows = not self.source.owns_memory and not copy, batch.num_rows
        if not self._counts_rows:
            leaves = batch.take(np.arange(num_rows), copy=copy)
            return Parts(leaves, batch.treedef, None, borrowed)
        shrinks = self.partial_batch is PartialBatch.SHRINK
        rows, positions = rows_and_positions(num_rows, size, self._mesh, shrinks, self._fills_first)
        return Parts(batch.take(positions, copy=copy), batch.treedef, rows, borrowed)

    def _apply_partial_batch(self, source: IndexedDataset) -> IndexedDataset:
        """Applies `partial_batch` to a dataset whose last batch is known in advance."""
        if self.partial_batch is PartialBatch.DROP:
            return source.without_remainder()
        if self.partial_batch is PartialBatch.ERROR and source.has_remainder:
            raise ValueError(
                f"The {type(source).__name__} does not split into full batches of "
                f"{source.global_batch_size} examples, and partial_batch='error'. Use 'pad', which "
                f"counts the last batch's real rows exactly, or 'drop'."
            )
        return source

    def _check_batches(
        self, batches: SourcePass, first_index: int
    ) -> Iterator[tuple[RowBatch, int]]:
        """Yields each batch and the rows of a full one; checks batches of an iterable."""
        if isinstance(self.source, IndexedDataset):
            size = self.source.global_batch_size
            assert size is not None, self.source
            yield from ((batch, size) for batch in batches)
            return
        for index, batch in enumerate(batches, first_index):
            assert isinstance(batch, HostBatch), batch
            if self._treedef is None:
                self._treedef, self._row_specs = batch.treedef, _row_specs(batch)
            self._check(batch, index)
            size = self._sizes.record(_describe_rows(batch), batch.num_rows)
            if batch.num_rows < size and self.partial_batch is PartialBatch.ERROR:
                raise ValueError(
                    f"Batch {index} of the dataset has {batch.num_rows} rows, fewer than the "
                    f"global batch of {size}, and partial_batch='error'. Use 'pad', which counts "
                    f"its real rows exactly, or 'drop'."
                )
            yield batch, size

    def _check(self, batch: HostBatch, index: int) -> None:
        if batch.treedef != self._treedef:
            raise ValueError(
                f"Batch {index} of the dataset has the structure {batch.treedef}, but the first "
                f"batch has {self._treedef}. Use the same structure for all batches."
            )
        names = names_of(batch.treedef)
        different = [
            f"{name or 'the array'} holds {describe(spec)}, before {describe(first)}"
            for name, spec, first in zip(names, _row_specs(batch), self._row_specs, strict=True)
            if (len(spec[0]), spec[1]) != (len(first[0]), first[1])
        ]
        if different:
            raise ValueError(
                f"Batch {index} of the dataset differs from the first one: {'; '.join(different)}. "
                "Only the sizes of dims may change, and a step is compiled for each size. Convert "
                "the arrays to one dtype, and reshape them to one number of dims."
            )


@functools.lru_cache(maxsize=1024)
def _assignment(
    num_rows: int, size: int, num_replicas: int, shrinks: bool, fills_first: bool
) -> Assignment:
    # A full batch is split by quotas. A partial one is split into equal parts of its own rows,
    # except that with auto-sharding off it fills the quotas of the first replicas.
    if not shrinks and (fills_first or num_rows == size):
        return Assignment(size, num_replicas)
    return Assignment(num_rows, num_replicas, in_equal_parts=True)


@functools.lru_cache(maxsize=1024)
def rows_and_positions(
    num_rows: int, size: int, mesh: ReplicaMesh, shrinks: bool = False, fills_first: bool = False
) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the rows of each replica, and the positions of the rows that this process reads.

    The array of positions is shared between batches, and read-only.
    """
    assignment = _assignment(num_rows, size, mesh.num_replicas, shrinks, fills_first)
    # Parts of a partial batch are padded to the size of full ones, so that the step is not compiled
    # again; SHRINK wants smaller parts instead.
    part_size = None if shrinks else Assignment(size, mesh.num_replicas).rows_per_replica
    positions = assignment.positions(num_rows, mesh.local_replicas, part_size)
    positions.flags.writeable = False
    return assignment.rows(num_rows), positions


def _row_specs(batch: HostBatch) -> list[_RowSpec]:
    return [(leaf.shape[1:], host_batch.jax_dtype(leaf.dtype)) for leaf in batch.leaves]


def _describe_rows(batch: RowBatch) -> str:
    assert isinstance(batch, HostBatch), batch  # of an iterable
    return ", ".join(map(describe, _row_specs(batch)))


def names_of(treedef: jax.tree_util.PyTreeDef) -> list[str]:
    """Returns the names of the leaves of a batch, for errors."""
    numbered = treedef.unflatten(range(treedef.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


def describe(row_spec: _RowSpec) -> str:
    """Returns a description of an array whose rows have this shape and dtype."""
    shape, dtype = row_spec
    return f"{dtype}[{','.join(['rows', *map(str, shape)])}]"
