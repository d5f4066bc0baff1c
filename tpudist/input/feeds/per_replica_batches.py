"""Feed whose datasets return whole batches for each replica, so that nothing is split.

A *step* is one batch for each replica of this process, from one dataset in turn or from a dataset
per replica. All replicas run one program, so their parts have equal sizes: the rows of the largest
batch so far that had the same shapes. Padding repeats a real row, and a replica without a batch
has 0 real rows.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.feeds import agreed_steps, source_positions
from tpudist.input.feeds.batch import Batch, Step, count_rows, describe_shapes
from tpudist.input.feeds.empty_pass import warn_of_empty_pass
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.input.feeds.states_of_processes import OpenPasses
from tpudist.input.feeds.step_counts import Length, length_of
from tpudist.input.iterator_state import HasState, Position, State, require_plan
from tpudist.input.process_rounds import Rounds
from tpudist.input.sources import adapt
from tpudist.input.sources.indexed_dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    IndexedDataset,
)
from tpudist.input.sources.iterable import IterableSource
from tpudist.input.sources.no_batches import NoBatches
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.sources.source import RowBatch
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.feed_ahead import PartsOfPass
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh

_Source: TypeAlias = IndexedDataset | IterableSource | Rebatched


class WholeBatches:
    """A feed whose elements consist of whole batches, one for each replica.

    A last step that does not feed all replicas is padded like a partial batch. It is dropped if
    padding cannot be distinguished from data: if elements are not batches (a leaf is a scalar, or
    an element is one example), or if the dataset drops its remainder. TensorFlow does the same.

    Args:
        datasets: One dataset, whose batches the replicas take in turn, or one per replica.
        replica_mesh: The replicas. This feeds the replicas of this process.
        must_differ: Whether it is an error if several processes have the same data.

    Attributes:
        example: One row of the first batch of the last step that was read. All batches have its
            structure and dtypes; the shapes may change from step to step. None before that.
        must_differ: See Args.
        may_run_in_loop: See `feed_ahead.Feed`.
        open_passes: See `agreed_steps.ProcessFeed`.

    Raises:
        TypeError: If a dataset is not a dataset of batches.
    """

    def __init__(
        self, datasets: Sequence[object], replica_mesh: ReplicaMesh, *, must_differ: bool = False
    ):
        assert len(datasets) in (1, len(replica_mesh.local_replicas)), datasets
        self._sources = [_to_source(dataset) for dataset in datasets]
        self.may_run_in_loop = all(isinstance(x, NumpyDataset) for x in self._sources)
        self.must_differ = must_differ
        self._mesh = replica_mesh
        self.example: Batch | None = None
        self.open_passes = OpenPasses()
        self._sizes = FullSizes()

    @property
    def rows_per_replica(self) -> int | None:
        """Rows of the largest part so far; None before the first one."""
        return self._sizes.largest

    @property
    def plan(self) -> dict[str, Any]:
        """Properties of the data that a state requires, as far as all processes have them."""
        plan: dict[str, Any] = {
            "kind": "batches of each replica",
            "number of processes": self._mesh.num_processes,
            "datasets in each process": len(self._sources),
        }
        if self._mesh.num_processes == 1:
            plan |= self.local_plan
        return plan

    @property
    def lengths(self) -> list[Length] | None:
        """Length of each dataset; None if one of them is not read by number."""
        found = [length_of(x) for x in self._sources if isinstance(x, IndexedDataset)]
        return found if len(found) == len(self._sources) else None

    @property
    def local_plan(self) -> dict[str, Any]:
        """Properties of this process's datasets that a state requires."""
        return {
            f"{key} of dataset {number}": value
            for number, source in enumerate(self._sources)
            for key, value in source.plan.items()
        }

    def shuffle_without_seed(self) -> str | None:
        """Returns the name of an unseeded generator that shuffles a dataset, if one is found."""
        names = (source.shuffle_without_seed() for source in self._sources)
        return next(filter(None, names), None)

    @property
    def source(self) -> str:
        """Names of the kinds of datasets of this process."""
        return ", ".join(dict.fromkeys(source.name for source in self._sources))

    @property
    def cardinality(self) -> int:
        """Number of steps of a pass; -1 if it has no end, -2 if unknown. May read a batch."""
        counts = [source.cardinality for source in self._sources]
        if self._mesh.num_processes > 1 or UNKNOWN_CARDINALITY in counts:
            return UNKNOWN_CARDINALITY
        if not any(counts):
            return 0
        lengths = [math.inf if x == INFINITE_CARDINALITY else x for x in counts]
        # One dataset lasts for a step per `num_local_replicas` batches. A last step that not all
        # replicas reach counts if it is padded, and not if it is dropped.
        if len(self._sources) < len(self._mesh.local_replicas):
            lengths = [lengths[0] / len(self._mesh.local_replicas)]
        is_batched = all(batch.num_rows is not None for batch in self._examples())
        is_padded = is_batched and not self._drops_remainder
        num_steps = max(lengths) if is_padded else min(lengths)
        if math.isinf(num_steps):
            return INFINITE_CARDINALITY
        return math.ceil(num_steps) if is_padded else math.floor(num_steps)

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, in its structure."""
        examples = self._examples()
        first = examples[0]
        sizes = [batch.num_rows for batch in examples if batch.num_rows is not None]
        if not sizes:
            specs = [to_devices.part_spec(self._mesh, x.shape, x.dtype, None) for x in first.leaves]
            return first.treedef.unflatten(specs)
        n = self._mesh.num_replicas
        # A single replica's batches are not padded to the largest one.
        size = max(sizes) if n == 1 else self.rows_per_replica or max(sizes)
        rows = None if n == 1 else (size,) * n
        return first.treedef.unflatten(
            [
                to_devices.part_spec(self._mesh, (size, *x.shape[1:]), x.dtype, rows)
                for x in first.leaves
            ]
        )

    def _examples(self) -> list[Batch]:
        """Returns a batch of the first shapes for each dataset that has batches.

        Raises:
            NoBatches: If no dataset has batches.
        """
        sources = [source for source in self._sources if source.cardinality != 0]
        if not sources:
            raise NoBatches
        return [
            _as_batch(source.peek_first(), 0)
            if isinstance(source, IterableSource)
            else _example(source)
            for source in sources
        ]

    @property
    def _drops_remainder(self) -> bool:
        return any(isinstance(x, IndexedDataset) and x.drops_remainder for x in self._sources)

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step that does not feed all replicas is dropped."""
        return self._drops_remainder or (self.example is not None and self.example.num_rows is None)

    def host_parts(self, position: Position, *, keep: bool, rounds: Rounds | None) -> PartsOfPass:
        """Returns the elements of one pass in host memory, each with the state after it.

        Args:
            position: Position at which the pass begins.
            keep: No effect: the parts share no memory with the sources in any case.
            rounds: Channel on which several processes agree about the steps; None for one process.
        """
        del keep

        def begin() -> list[tuple[Iterator[Batch], HasState]]:
            return self._begin(position)

        pairs = begin() if rounds is None else rounds.call_and_report(begin)
        passes = [source_pass for _, source_pass in pairs]
        steps = self._steps([batches for batches, _ in pairs])
        if position.source is not None:
            steps = source_positions.check_iterators(steps, passes)
        if rounds is None:
            return self._host_parts(steps, passes, position.step > 0)
        return agreed_steps.parts(self, self._mesh, steps, passes, position, rounds)

    def _begin(self, position: Position) -> list[tuple[Iterator[Batch], HasState]]:
        """Begins a pass through each dataset; returns its batches, and the pass, for its state."""
        states: list[State | None] = [None] * len(self._sources)
        source_state = position.read_source()
        if source_state is not None:
            self._sizes.restore(source_state, "rows")
            several = self._mesh.num_processes > 1
            process = self._mesh.processes.index(jax.process_index()) if several else 0
            if several:
                require_plan(
                    source_positions.state_of_process(process, source_state, "plans"),
                    self.local_plan,
                )
            states = source_positions.states_of(process, source_state, len(self._sources))
        passes: list[tuple[Iterator[Batch], HasState]] = []
        for source, state_of_source in zip(self._sources, states, strict=True):
            state = position.state_for(state_of_source)
            source = source.with_orders_of(position.version)
            if isinstance(source, IterableSource):
                # Elements and not batches, because a leaf may be a scalar here.
                elements = source.elements(position.pass_number, state)
                passes.append((map(_as_batch, elements, itertools.count()), elements))
            else:
                batches = source.begin(position.pass_number, state)
                taken = _take_batches(batches, _is_batched(source), source.owns_memory)
                passes.append((taken, batches))
        return passes

    def _steps(self, iterators: list[Iterator[Batch]]) -> Iterator[Step]:
        """Yields the batches of this process's replicas, until no replica has one."""
        # With one dataset, the same iterator appears once per replica, so replicas take its batches
        # in turn, in the order of the replicas.
        num_local = len(self._mesh.local_replicas)
        turns = iterators if len(iterators) == num_local else iterators * num_local
        while True:
            step = [next(iterator, None) for iterator in turns]
            for batch in step:
                if batch is not None:
                    self._check(batch)
            if all(batch is None for batch in step):
                return
            self._check_step(step)
            yield step

    def _host_parts(
        self, steps: Iterator[Step], passes: list[HasState], has_data: bool
    ) -> PartsOfPass:
        for step in steps:
            has_data = True  # also if its only step is dropped, as in TensorFlow
            if None in step and self.drops_incomplete_steps:
                break
            # After the batches of this step, and before those of the next one: this is the position
            # that belongs to the element.
            states = [batches.get_state() for batches in passes]
            assert self.example is not None, step
            part = self.join(step, count_rows(step), self.example)
            yield part, self.sizes_state() | {"datasets": [states]}
        if not has_data:
            warn_of_empty_pass(self, *self._sources)

    def sizes_state(self) -> State:
        """Returns the part of the state about the sizes of batches, after a step."""
        return {"rows": self.rows_per_replica, **self._sizes.get_state()}

    def _check_step(self, step: Step) -> None:
        """Checks that the batches of a step have one shape, and remembers it."""
        batches = [batch for batch in step if batch is not None]
        shapes = dict.fromkeys(map(describe_shapes, batches))
        if len(shapes) > 1:
            raise ValueError(
                "The replicas received batches of several shapes in one step: "
                f"{'; '.join(shapes)}. All replicas run one program, so each step has one shape; "
                "another step may have another. Return as many batches of a shape in sequence as "
                "there are replicas, or distribute global batches with "
                "experimental_distribute_dataset."
            )
        self._remember(batches[0])

    def _remember(self, batch: Batch) -> None:
        leaves = [x if batch.num_rows is None else x[:1].copy() for x in batch.leaves]
        self.example = batch._replace(leaves=leaves)

    def join(self, step: Step, rows: tuple[int, ...], example: Batch) -> Parts:
        """Returns the batches of a step in padded arrays `[num_local_replicas, ...]`.

        Args:
            step: The batches.
            rows: Number of rows of each replica, over all processes.
            example: One row of a batch of the step.
        """
        size = self._sizes.record(describe_shapes(example), max(rows))
        treedef, num_rows = example.treedef, example.num_rows
        if self._mesh.num_replicas == 1:
            (batch,) = step
            assert batch is not None, step
            return Parts(batch.leaves, treedef, None)
        leaves = []
        for i, row in enumerate(example.leaves):
            parts = [None if batch is None else batch.leaves[i] for batch in step]
            if num_rows is None:
                leaves.append(np.stack([x for x in parts if x is not None]))
                continue
            # A row of this step if there is one: a resumed run then pads like the original run,
            # which saw other batches before.
            row = next((x[:1] for x in parts if x is not None), row)
            joined = np.empty((len(step), size, *row.shape[1:]), row.dtype)
            for part, x in zip(joined, parts, strict=True):
                # A replica without a batch gets only padding; `rows` counts 0 rows for it.
                x = row if x is None else x
                part[: len(x)] = x
                part[len(x) :] = x[-1]
            leaves.append(joined)
        return Parts(leaves, treedef, None if num_rows is None else rows)

    def _check(self, batch: Batch) -> None:
        if self.example is None:
            self._remember(batch)
        example = self.example
        assert example is not None, batch
        if batch.treedef != example.treedef:
            raise ValueError(
                f"A batch of a dataset function has the structure {batch.treedef}, but earlier "
                f"batches have {example.treedef}. Use the same structure for all batches."
            )
        types, earlier_types = ([(x.ndim, x.dtype) for x in b.leaves] for b in (batch, example))
        if types != earlier_types or (batch.num_rows is None) != (example.num_rows is None):
            raise ValueError(
                f"A batch of a dataset function holds {describe_shapes(batch)}, but earlier "
                f"batches hold {describe_shapes(example)}. Arrays may differ only in the sizes of "
                "their dims."
            )


def _to_source(dataset: object) -> _Source:
    # An `IndexedDataset` need not be batched: a replica takes one of its elements.
    return dataset if isinstance(dataset, IndexedDataset | Rebatched) else adapt.to_source(dataset)


def _example(source: IndexedDataset | Rebatched) -> Batch:
    """Returns a batch of abstract arrays with the shapes of an element of `source`."""
    leaves, treedef = jax.tree.flatten(source.element_spec)
    return Batch(leaves, treedef, leaves[0].shape[0] if _is_batched(source) else None)


def _is_batched(source: _Source) -> bool:
    return not isinstance(source, IndexedDataset) or source.global_batch_size is not None


def _take_batches(
    batches: Iterator[RowBatch], is_batched: bool, owns_memory: bool
) -> Iterator[Batch]:
    """Yields all rows of each batch; if not `is_batched`, its one example."""
    for batch in batches:
        rows = np.arange(batch.num_rows) if is_batched else np.array(0)
        leaves = batch.take(rows, copy=not owns_memory)
        yield Batch(leaves, batch.treedef, batch.num_rows if is_batched else None)


def _as_batch(element: PyTree, index: int) -> Batch:
    label = f"Batch {index} of the dataset"
    leaves, names, treedef = host_batch.as_arrays(element, label)
    has_scalars = any(x.ndim == 0 for x in leaves)
    num_rows = None if has_scalars else host_batch.common_rows(leaves, names, label)
    # A copy: the next replica's batch comes from the same loader, which may reuse its arrays.
    arrays = [
        host_batch.to_jax_dtype(x, label + name, copy=True)
        for x, name in zip(leaves, names, strict=True)
    ]
    return Batch(arrays, treedef, num_rows)
