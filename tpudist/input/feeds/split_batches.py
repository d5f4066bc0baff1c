"""Global batches, each split over the replicas: every process reads the rows of its own."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import process_rounds
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.iterator_state import Position
from tpudist.input.process_rounds import Rounds
from tpudist.input.rows_of_replicas import Assignment
from tpudist.input.sources import iterable, no_batches
from tpudist.input.sources.indexed_dataset import UNKNOWN_CARDINALITY, IndexedDataset
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.host_batch import HostBatch
from tpudist.input.transfer.to_devices import Parts
from tpudist.options import PartialBatch
from tpudist.xla.mesh import ReplicaMesh


class SplitBatches:
    """A feed whose elements are the global batches of one source, which all processes read alike.

    The global batch is the largest of the batches so far whose examples have the same shapes (for
    what is read by number, what it was batched by). Examples may come in several shapes, such as
    sequences in buckets by length: a step is compiled for each.
    """

    def __init__(
        self,
        source: Any,
        replica_mesh: ReplicaMesh,
        partial_batch: PartialBatch | str | None,
        *,
        fills_first: bool = False,
    ):
        """Splits `source`, which `adapt.to_source` gave; see `DistributedDataset`.

        Args:
            source: The batches.
            replica_mesh: The replicas.
            partial_batch: The treatment of a batch that is not full.
            fills_first: Whether a partial batch gives the first replicas as many rows as a full
                one; otherwise equal parts.
        """
        self._fills_first = fills_first
        self.partial_batch = PartialBatch.of(partial_batch)
        self.source = source
        if isinstance(self.source, IndexedDataset):
            self.source = self._apply_partial_batch(self.source)
        self._mesh = replica_mesh
        pads_alone = partial_batch is not None and self.partial_batch is PartialBatch.PAD
        self._counts_rows = replica_mesh.num_replicas > 1 or pads_alone
        self.any_thread = isinstance(self.source, NumpyDataset)
        self._sizes = FullSizes()
        # Those of the first batch there was, in any pass: what all later ones must look like.
        self._treedef: jax.tree_util.PyTreeDef | None = None
        self._examples: list[tuple[Any, ...]] = []

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if not known."""
        dropping = self.partial_batch is PartialBatch.DROP
        if dropping and not isinstance(self.source, IndexedDataset):
            return UNKNOWN_CARDINALITY
        return self.source.cardinality

    def global_batch_size(self, *, read: bool) -> int | None:
        """Rows of a full batch; None if that is not known before the first one is read."""
        known = self.source.global_batch_size or self._sizes.largest
        if known is None and read:
            with contextlib.suppress(no_batches.NoBatches):
                return jax.tree.leaves(self.source.element_spec)[0].shape[0]
        return known

    @property
    def plan(self) -> dict[str, Any]:
        """What a state is good for."""
        return iterable.plan_of(self.source)

    def shuffle_without_seed(self) -> str | None:
        """The random generator without a seed that shuffles the source, if one is found."""
        return iterable.shuffle_without_seed_of(self.source)

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, structured as it is."""
        leaves, treedef = jax.tree.flatten(self.source.element_spec)
        size = leaves[0].shape[0]
        assignment = self.assignment(size, size)
        each, rows = assignment.rows_per_replica, assignment.rows(size)
        if not self._counts_rows:
            each, rows = size, None
        return treedef.unflatten(
            [
                to_devices.part_spec(self._mesh, (each, *leaf.shape[1:]), leaf.dtype, rows)
                for leaf in leaves
            ]
        )

    def host_parts(
        self, position: Position, *, keep: bool, rounds: Rounds | None
    ) -> Iterator[tuple[Parts, Any]]:
        """The batches of one pass, each with the state after it.

        Args:
            position: Where the pass begins.
            keep: Whether they may share no memory with the source's.
            rounds: How the processes agree on them, if there are several.
        """
        # A user's loader may fill its arrays anew for the next batch. On CPU, JAX uses aligned
        # NumPy arrays in place; elsewhere it reads them until the copy to the device has ended.
        copy = not self.source.owns_memory and (keep or self._mesh.platform == "cpu")
        at, first = position.source, 0
        if at is not None and self.source.global_batch_size is None:
            self._sizes.restore(at, "global batch size")
            at = at.get("dataset")
        at = position.state_for(at)
        if isinstance(at, dict):
            first = at.get("batches", 0)

        def begin() -> Any:
            return self.source.begin(position.pass_number, at)

        batches = begin() if rounds is None else rounds.call_and_report(begin)
        return self._parts(batches, position, first, copy, rounds)

    def _parts(
        self, batches: Any, position: Position, first: int, copy: bool, rounds: Rounds | None
    ) -> Iterator[tuple[Parts, Any]]:
        checked = self._check_batches(batches, first)
        if rounds is not None:
            rounds.require_same(self.plan | position._asdict())
            if not isinstance(self.source, IndexedDataset):
                checked = process_rounds.iterate_in_step(
                    checked, rounds, lambda found: (found[0].num_rows, _kind(found[0]))
                )
        num_elements, num_batches = position.step, first
        for batch, size in checked:
            num_batches += 1
            if batch.num_rows < size and self.partial_batch is PartialBatch.DROP:
                continue
            state = batches.get_state()
            if self.source.global_batch_size is None:
                state = {
                    "global batch size": self._sizes.largest,
                    **self._sizes.get_state(),
                    "dataset": state,
                }
            yield self._take(batch, size, copy), state
            num_elements += 1
        if not num_elements:
            no_batches.warn(self, self.source, num_dropped=num_batches)

    def assignment(self, num_rows: int, size: int) -> Assignment:
        """Who reads which of the `num_rows` rows of a batch, where a full one has `size`."""
        shrinks = self.partial_batch is PartialBatch.SHRINK
        return _assignment(num_rows, size, self._mesh.num_replicas, shrinks, self._fills_first)

    def _take(self, batch: Any, size: int, copy: bool) -> Parts:
        borrowed, num_rows = not self.source.owns_memory and not copy, batch.num_rows
        if not self._counts_rows:
            leaves = batch.take(np.arange(num_rows), copy=copy)
            return Parts(leaves, batch.treedef, None, borrowed)
        shrinks = self.partial_batch is PartialBatch.SHRINK
        rows, positions = shares(num_rows, size, self._mesh, shrinks, self._fills_first)
        return Parts(batch.take(positions, copy=copy), batch.treedef, rows, borrowed)

    def _apply_partial_batch(self, source: IndexedDataset) -> IndexedDataset:
        """Applies `partial_batch` where it is known from the start what it comes to."""
        if self.partial_batch is PartialBatch.DROP:
            return source.without_remainder()
        if self.partial_batch is PartialBatch.ERROR and source.has_remainder:
            raise ValueError(
                f"The {type(source).__name__} does not split into full batches of "
                f"{source.global_batch_size} examples, and partial_batch='error'. Use 'pad', which "
                f"counts the last batch's real rows exactly, or 'drop'."
            )
        return source

    def _check_batches(self, batches: Iterator[Any], first: int) -> Iterator[tuple[Any, int]]:
        """The batches, each with the rows of a full one; a user's must all look like the first."""
        if isinstance(self.source, IndexedDataset):
            size = self.source.global_batch_size
            assert size is not None, "it is batched"
            yield from ((batch, size) for batch in batches)
            return
        for index, batch in zip(itertools.count(first), batches, strict=False):
            if self._treedef is None:
                self._treedef, self._examples = batch.treedef, _examples(batch)
            self._check(batch, index)
            size = self._sizes.note(_kind(batch), batch.num_rows)
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
            f"{name or 'the array'} holds {describe(found)}, before {describe(wanted)}"
            for name, found, wanted in zip(names, _examples(batch), self._examples, strict=True)
            if (len(found[0]), found[1]) != (len(wanted[0]), wanted[1])
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
    if not shrinks and (fills_first or num_rows == size):
        return Assignment(size, num_replicas)
    return Assignment(num_rows, num_replicas, in_equal_parts=True)


@functools.lru_cache(maxsize=1024)
def shares(
    num_rows: int, size: int, mesh: ReplicaMesh, shrinks: bool = False, fills_first: bool = False
) -> tuple[tuple[int, ...], np.ndarray]:
    """How many of `num_rows` rows each replica reads, and where those of this process's stand."""
    assignment = _assignment(num_rows, size, mesh.num_replicas, shrinks, fills_first)
    part_size = None if shrinks else Assignment(size, mesh.num_replicas).rows_per_replica
    positions = assignment.positions(num_rows, mesh.local_replicas, part_size)
    positions.flags.writeable = False  # it is given out again
    return assignment.rows(num_rows), positions


def _examples(batch: HostBatch) -> list[tuple[Any, ...]]:
    """Shapes and dtypes of one row of each leaf, as JAX will hold it."""
    return [(leaf.shape[1:], host_batch.jax_dtype(leaf.dtype)) for leaf in batch.leaves]


def _kind(batch: HostBatch) -> str:
    return ", ".join(map(describe, _examples(batch)))


def names_of(treedef: jax.tree_util.PyTreeDef) -> list[str]:
    """The names of the leaves of a batch, as errors have them."""
    numbered = treedef.unflatten(range(treedef.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


def describe(example: tuple[Any, ...]) -> str:
    """Describes arrays whose rows have this shape and dtype."""
    shape, dtype = example
    return f"{dtype}[{','.join(['rows', *map(str, shape)])}]"
