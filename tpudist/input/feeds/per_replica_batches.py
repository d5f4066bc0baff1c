"""Batches that a user's function gives for each replica: nothing is split, each takes a whole one.

A *step* is one batch for each replica of this process, from one dataset in turn or from one dataset
for each. All replicas run one program: every replica's part has the rows of the largest batch so
far whose examples have the same shapes, what is not filled repeats a real row, and a replica that
got no batch has 0 real rows.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.feeds import agreed_steps
from tpudist.input.feeds.batch import Batch, Step, count_rows, describe_shapes
from tpudist.input.feeds.full_sizes import FullSizes
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.input.iterator_state import Position, require_plan
from tpudist.input.process_rounds import Rounds
from tpudist.input.sources import adapt, iterable, no_batches
from tpudist.input.sources.indexed_dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    IndexedDataset,
)
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.transfer import host_batch, to_devices
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh


class Pipelines:
    """A feed whose elements are made of whole batches, one for each replica.

    A last step that does not feed all replicas is padded, as a partial batch is. It is left out
    where padding cannot be told from data: if the elements are no batches (a leaf is a scalar, or
    they are examples, not batched), or if the dataset drops its remainder. So it is in
    TensorFlow.
    """

    def __init__(
        self, datasets: Sequence[Any], replica_mesh: ReplicaMesh, *, must_differ: bool = False
    ):
        """Feeds the replicas of this process.

        Args:
            datasets: One, whose batches the replicas take in turn, or one for each replica.
            replica_mesh: The replicas.
            must_differ: Whether it is a mistake if several processes have the same data.

        Raises:
            TypeError: A dataset gives no batches.
        """
        assert len(datasets) in (1, len(replica_mesh.local_replicas)), datasets
        self._sources = [_to_source(dataset) for dataset in datasets]
        self.any_thread = all(isinstance(x, NumpyDataset) for x in self._sources)
        self.must_differ = must_differ
        self._mesh = replica_mesh
        # Of one row, of the shapes of the last step: what others must look like, but for shapes.
        self.first: Batch | None = None
        self._sizes = FullSizes()

    @property
    def rows_per_replica(self) -> int | None:
        """Rows of the largest part so far; None before there was any."""
        return self._sizes.largest

    @property
    def plan(self) -> dict[str, Any]:
        """What a state is good for, as far as all processes say the same of it."""
        plan: dict[str, Any] = {
            "kind": "batches of each replica",
            "number of processes": self._mesh.num_processes,
            "datasets in each process": len(self._sources),
        }
        if self._mesh.num_processes == 1:
            plan |= self.local_plan
        return plan

    @property
    def local_plan(self) -> dict[str, Any]:
        """What the states of this process's datasets are good for."""
        return {
            f"{key} of dataset {number}": value
            for number, source in enumerate(self._sources)
            for key, value in iterable.plan_of(source).items()
        }

    def shuffle_without_seed(self) -> str | None:
        """The random generator without a seed that shuffles a dataset, if one is found."""
        return next(filter(None, map(iterable.shuffle_without_seed_of, self._sources)), None)

    @property
    def source(self) -> str:
        """What kinds of datasets this process reads."""
        names = [getattr(x, "name", type(x).__name__) for x in self._sources]
        return ", ".join(dict.fromkeys(names))

    @property
    def cardinality(self) -> int:
        """Number of steps of a pass; -1 if it has no end, -2 if not known."""
        found = [source.cardinality for source in self._sources]
        if self._mesh.num_processes > 1 or UNKNOWN_CARDINALITY in found:
            return UNKNOWN_CARDINALITY
        if not any(found):
            return 0
        found = [math.inf if x == INFINITE_CARDINALITY else x for x in found]
        if len(self._sources) < len(self._mesh.local_replicas):
            found = [found[0] / len(self._mesh.local_replicas)]
        batched = all(batch.num_rows is not None for batch in self._examples())
        padded = batched and not self._drops_remainder
        steps = max(found) if padded else min(found)
        if math.isinf(steps):
            return INFINITE_CARDINALITY
        return math.ceil(steps) if padded else math.floor(steps)

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, structured as it is."""
        examples = self._examples()
        first = examples[0]
        sizes = [batch.num_rows for batch in examples if batch.num_rows is not None]
        if not sizes:
            specs = [to_devices.part_spec(self._mesh, x.shape, x.dtype, None) for x in first.leaves]
            return first.treedef.unflatten(specs)
        n = self._mesh.num_replicas
        size = max(sizes) if n == 1 else self.rows_per_replica or max(sizes)
        rows = None if n == 1 else (size,) * n
        return first.treedef.unflatten(
            [
                to_devices.part_spec(self._mesh, (size, *x.shape[1:]), x.dtype, rows)
                for x in first.leaves
            ]
        )

    def _examples(self) -> list[Batch]:
        """The first batch of each dataset that has any.

        Raises:
            ValueError: If no dataset has.
        """
        sources = [source for source in self._sources if source.cardinality != 0]
        if not sources:
            raise no_batches.NoBatches
        return [
            _as_batch(source.first(), 0) if hasattr(source, "first") else _example(source)
            for source in sources
        ]

    @property
    def _drops_remainder(self) -> bool:
        return any(isinstance(x, IndexedDataset) and x.drops_remainder for x in self._sources)

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step that does not feed all replicas is left out."""
        return self._drops_remainder or (self.first is not None and self.first.num_rows is None)

    def host_parts(
        self, position: Position, *, keep: bool, rounds: Rounds | None
    ) -> Iterator[tuple[Parts, Any]]:
        """The elements of one pass in host memory, each with the state after it.

        Args:
            position: Where the pass begins.
            keep: Without effect: nothing is shared with the sources.
            rounds: How the processes agree on the steps, if there are several.
        """
        del keep

        def begin() -> list[Any]:
            return self._begin(position)

        passes = begin() if rounds is None else rounds.call_and_report(begin)
        states = [source for _, source in passes]
        steps = self._steps([batches for batches, _ in passes])
        if position.source is not None:
            steps = _check_iterators(steps, states)
        if rounds is None:
            return self._host_parts(steps, states, position.step > 0)
        return agreed_steps.parts(self, self._mesh, steps, states, position, rounds)

    def _begin(self, position: Position) -> list[tuple[Iterator[Batch], Any]]:
        """A pass through each dataset: its batches, and what knows its state."""
        given: list[Any] = [None] * len(self._sources)
        if position.source is not None:
            self._sizes.restore(position.source, "rows")
            several = self._mesh.num_processes > 1
            process = self._mesh.processes.index(jax.process_index()) if several else 0
            if several:
                require_plan(_state_of_process(process, position.source, "plans"), self.local_plan)
            given = _states_of(process, position.source, len(self._sources))
        passes = []
        for source, said in zip(self._sources, given, strict=True):
            state = position.state_for(said)
            if hasattr(source, "elements"):
                batches = source.elements(position.pass_number, state)
                passes.append((_batches(batches), batches))
            else:
                batches = source.begin(position.pass_number, state)
                whole = not isinstance(source, IndexedDataset) or source.global_batch_size
                passes.append((_take_batches(batches, bool(whole), source.owns_memory), batches))
        return passes

    def _steps(self, iterators: list[Iterator[Batch]]) -> Iterator[Step]:
        """What this process's replicas take, until there is nothing left for any."""
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
        self, steps: Iterator[Step], passes: list[Any], has_begun: bool
    ) -> Iterator[tuple[Parts, Any]]:
        for step in steps:
            if None in step and self.drops_incomplete_steps:
                has_begun = True
                break
            has_begun = True
            states = [batches.get_state() for batches in passes]
            yield self.join(step, count_rows(step)), self.state([states])
        if not has_begun:
            no_batches.warn(self, *self._sources)

    def state(
        self, states: list[list[Any]], plans: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """What is said of where the datasets of every process are."""
        said = {"rows": self.rows_per_replica, **self._sizes.get_state(), "datasets": states}
        return said if plans is None else said | {"plans": plans}

    def _check_step(self, step: Step) -> None:
        """Refuses batches of several shapes in one step, and remembers that of this one."""
        given = [batch for batch in step if batch is not None]
        found = dict.fromkeys(map(describe_shapes, given))
        if len(found) > 1:
            raise ValueError(
                f"The replicas received batches of several shapes in one step: {'; '.join(found)}. "
                "All replicas run one program, so each step has one shape; another step may have "
                "another. Return as many batches of a shape in sequence as there are replicas, or "
                "distribute global batches with experimental_distribute_dataset."
            )
        self._remember(given[0])

    def _remember(self, batch: Batch) -> None:
        leaves = [x if batch.num_rows is None else x[:1].copy() for x in batch.leaves]
        self.first = batch._replace(leaves=leaves)

    def join(self, step: Step, rows: tuple[int, ...]) -> Parts:
        """The parts of this process's replicas in arrays `[num_local_replicas, ...]`, padded.

        `first` has the shapes of the step.

        Args:
            step: The batches.
            rows: How many rows each replica has, over all processes.
        """
        assert self.first is not None, step
        first, size = self.first, self._sizes.note(describe_shapes(self.first), max(rows))
        if self._mesh.num_replicas == 1:
            (batch,) = step
            assert batch is not None, step
            return Parts(batch.leaves, first.treedef, None)
        leaves = []
        for i, example in enumerate(first.leaves):
            given = [None if batch is None else batch.leaves[i] for batch in step]
            if first.num_rows is None:
                leaves.append(np.stack([x for x in given if x is not None]))
                continue
            # Of this step if there is one, so that a run that was resumed pads as it would have.
            example = next((x[:1] for x in given if x is not None), example)
            joined = np.empty((len(step), size, *example.shape[1:]), example.dtype)
            for part, x in zip(joined, given, strict=True):
                x = example if x is None else x
                part[: len(x)] = x
                part[len(x) :] = x[-1]
            leaves.append(joined)
        return Parts(leaves, first.treedef, None if first.num_rows is None else rows)

    def _check(self, batch: Batch) -> None:
        if self.first is None:
            self._remember(batch)
        first = self.first
        assert first is not None, batch
        if batch.treedef != first.treedef:
            raise ValueError(
                f"A batch of a dataset function has the structure {batch.treedef}, but the first "
                f"batch has {first.treedef}. Use the same structure for all batches."
            )
        kinds = [[(x.ndim, x.dtype) for x in each.leaves] for each in (batch, first)]
        if kinds[0] != kinds[1] or (batch.num_rows is None) != (first.num_rows is None):
            raise ValueError(
                f"A batch of a dataset function holds {describe_shapes(batch)}, but the first "
                f"batch holds {describe_shapes(first)}. Arrays may differ only in the sizes of "
                "their dims."
            )


def _to_source(dataset: Any) -> Any:
    if isinstance(dataset, IndexedDataset | Rebatched):
        return dataset  # batched or not: a replica takes an element of it
    return adapt.to_source(dataset)


def _check_iterators(steps: Iterator[Step], passes: list[Any]) -> Iterator[Step]:
    """The steps of a resumed pass.

    Raises:
        ValueError: If two datasets are one iterator, of which each would return to another place.
    """
    for step in steps:
        opened = [x.iterator for x in passes if isinstance(x, iterable.Elements)]
        if len({id(x) for x in opened}) < len(opened):
            raise ValueError(
                "The state of an iterator was set, but the datasets of several replicas are one "
                f"{type(opened[0]).__name__}, which they read in turn: no replica can return to "
                "its own position. Return a new dataset for each replica, or one for all of them "
                "with InputReplicationMode.PER_WORKER."
            )
        yield step


def _states_of(process: int, said: dict[str, Any], num_datasets: int) -> list[Any]:
    own = _state_of_process(process, said, "datasets")
    if not isinstance(own, list) or len(own) != num_datasets:
        raise ValueError(
            f"The state is damaged: it has {said.get('datasets')!r} as the datasets of all "
            f"processes, but process {process} reads {num_datasets}. Use another state."
        )
    return own


def _state_of_process(process: int, said: dict[str, Any], key: str) -> Any:
    """What a state says of one process under `key`, None if nothing."""
    of_all = said.get(key)
    return of_all[process] if isinstance(of_all, list) and process < len(of_all) else None


def _example(source: Any) -> Batch:
    """Something of the shape of an element of `source`."""
    leaves, treedef = jax.tree.flatten(source.element_spec)
    batched = not isinstance(source, IndexedDataset) or source.global_batch_size is not None
    return Batch(leaves, treedef, leaves[0].shape[0] if batched else None)


def _take_batches(batches: Iterator[Any], batched: bool, owns_memory: bool) -> Iterator[Batch]:
    """Whole host batches; or the one example that each holds."""
    for batch in batches:
        rows = np.arange(batch.num_rows) if batched else np.array(0)
        leaves = batch.take(rows, copy=not owns_memory)
        yield Batch(leaves, batch.treedef, batch.num_rows if batched else None)


def _batches(elements: Iterator[PyTree]) -> Iterator[Batch]:
    return map(_as_batch, elements, itertools.count())


def _as_batch(element: PyTree, index: int) -> Batch:
    what = f"Batch {index} of the dataset"
    leaves, names, treedef = host_batch.as_arrays(element, what)
    scalars = any(x.ndim == 0 for x in leaves)
    num_rows = None if scalars else host_batch.common_rows(leaves, names, what)
    # The same loader is asked again for the next replica, and may fill its arrays anew.
    arrays = [
        host_batch.to_jax_dtype(x, what + name, copy=True)
        for x, name in zip(leaves, names, strict=True)
    ]
    return Batch(arrays, treedef, num_rows)
