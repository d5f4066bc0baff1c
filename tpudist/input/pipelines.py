"""Batches that a user's function gives for each replica: nothing is split, each takes a whole one.

A *step* is one batch for each replica of this process, from one dataset in turn or from one dataset
for each. Shapes are static: every replica's part has the rows of the largest batch of the first
step, what is not filled repeats a real row, and a replica that got no batch has 0 real rows.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpudist.input import host_batch, placing, sources
from tpudist.input.numpy_dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, NumpyDataset
from tpudist.input.placing import Parts
from tpudist.input.sources import IterableSource
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


class Batch(NamedTuple):
    """What one replica takes: arrays `[rows, ...]`; any arrays, if `num_rows` is None."""

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int | None


Step = list[Batch | None]  # for each replica of this process; None where there is none left


class Pipelines:
    """A feed whose elements are made of whole batches, one for each replica.

    A last step that does not feed all replicas is padded, as a partial batch is. It is left out
    where padding cannot be told from data: if the elements are no batches (a leaf is a scalar, or
    they are the examples of a `NumpyDataset`), or if the dataset drops its remainder. So it is in
    TensorFlow.
    """

    def __init__(self, datasets: Sequence[Any], replica_mesh: ReplicaMesh):
        """Feeds the replicas of this process.

        Args:
            datasets: One, whose batches the replicas take in turn, or one for each replica.
            replica_mesh: The replicas.

        Raises:
            TypeError: A dataset gives no batches.
        """
        assert len(datasets) in (1, len(replica_mesh.local_replicas)), datasets
        self._sources = [_checked(dataset) for dataset in datasets]
        self._mesh = replica_mesh
        self._first: Batch | None = None  # of one row: what all others must look like
        self.rows_per_replica: int | None = None

    @property
    def needs_agreement(self) -> bool:
        """Whether no process knows alone how many rows there are in a step."""
        return self._mesh.num_processes > 1

    @property
    def cardinality(self) -> int:
        """Number of steps of a pass; -1 if it has no end, -2 if not known."""
        found = [source.cardinality for source in self._sources]
        if self.needs_agreement or UNKNOWN_CARDINALITY in found:
            return UNKNOWN_CARDINALITY
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
            specs = [placing.part_spec(self._mesh, x.shape, x.dtype, None) for x in first.leaves]
            return first.treedef.unflatten(specs)
        n = self._mesh.num_replicas
        size = max(sizes) if n == 1 else self.rows_per_replica or max(sizes)
        return first.treedef.unflatten(
            [
                placing.part_spec(self._mesh, (size, *x.shape[1:]), x.dtype, (size,) * n)
                for x in first.leaves
            ]
        )

    def _examples(self) -> list[Batch]:
        """The first batch of each dataset."""
        return [
            next(_numpy_batches(source, 0))
            if isinstance(source, NumpyDataset)
            else _as_batch(source.first(), 0)
            for source in self._sources
        ]

    @property
    def _drops_remainder(self) -> bool:
        return any(isinstance(x, NumpyDataset) and x.drops_remainder for x in self._sources)

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step that does not feed all replicas is left out."""
        return self._drops_remainder or (self._first is not None and self._first.num_rows is None)

    def steps(self, pass_number: int) -> Iterator[Step]:
        """What this process's replicas take in one pass, until there is nothing left for any."""
        passes = [
            _numpy_batches(source, pass_number)
            if isinstance(source, NumpyDataset)
            else map(_as_batch, source.elements(), itertools.count())
            for source in self._sources
        ]
        num_local = len(self._mesh.local_replicas)
        return self._steps(passes if len(passes) == num_local else passes * num_local)

    def _steps(self, iterators: list[Iterator[Batch]]) -> Iterator[Step]:
        while True:
            step = [next(iterator, None) for iterator in iterators]
            for batch in step:
                if batch is not None:
                    self._check(batch)
            if all(batch is None for batch in step):
                return
            yield step

    def host_parts(self, pass_number: int, *, keep: bool) -> Iterator[Parts]:
        """The elements of one pass in host memory, where this process knows all of it."""
        del keep  # nothing is shared with the source
        return self._host_parts(self.steps(pass_number))

    def _host_parts(self, steps: Iterator[Step]) -> Iterator[Parts]:
        step = None
        for step in steps:
            if None in step and self.drops_incomplete_steps:
                break
            counts = count_rows(step)
            self.fix_rows(max(counts))
            self.check_rows(step)
            yield self.join(step, counts)
        if step is None:
            raise ValueError(sources.NO_BATCHES)

    def fix_rows(self, rows: int) -> None:
        """Says how many rows all parts have from now on, if that was not said before."""
        if self.rows_per_replica is None:
            self.rows_per_replica = rows

    def check_rows(self, step: Step) -> None:
        """Refuses batches that do not fit into a part."""
        size = self.rows_per_replica
        largest = max(count_rows(step))
        if size is not None and largest > size and self._mesh.num_replicas > 1:
            raise ValueError(
                f"A replica was given a batch of {largest} rows, but the largest of the first step "
                f"had {size}, which sets the size of all. A batch may be smaller, never larger: "
                f"begin with a full batch, or split the larger ones."
            )

    def join(self, step: Step, rows: tuple[int, ...]) -> Parts:
        """The parts of this process's replicas in arrays `[num_local_replicas, ...]`, padded.

        Args:
            step: The batches.
            rows: How many rows each replica has, over all processes.
        """
        assert self._first is not None, step
        first, size = self._first, self.rows_per_replica or 0
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
            joined = np.empty((len(step), size, *example.shape[1:]), example.dtype)
            for part, x in zip(joined, given, strict=True):
                x = example if x is None else x
                part[: len(x)] = x
                part[len(x) :] = x[-1]
            leaves.append(joined)
        return Parts(leaves, first.treedef, None if first.num_rows is None else rows)

    def _check(self, batch: Batch) -> None:
        if self._first is None:
            leaves = [x if batch.num_rows is None else x[:1].copy() for x in batch.leaves]
            self._first = batch._replace(leaves=leaves)
        first = self._first
        if batch.treedef != first.treedef:
            raise ValueError(
                f"A batch of a dataset function is structured as {batch.treedef}, but the first "
                f"one as {first.treedef}. All batches must have the same structure."
            )
        found, wanted = _describe(batch), _describe(first)
        if found != wanted:
            raise ValueError(
                f"A batch of a dataset function holds {found}, but the first one {wanted}. Arrays "
                f"may differ in their number of rows only."
            )


def count_rows(step: Step) -> tuple[int, ...]:
    """How many rows each replica of this process has in a step; 1 if elements are no batches."""
    return tuple(
        0 if batch is None else 1 if batch.num_rows is None else batch.num_rows for batch in step
    )


def _describe(batch: Batch) -> str:
    def one(x: np.ndarray) -> str:
        dims = x.shape if batch.num_rows is None else ("rows", *x.shape[1:])
        return f"{x.dtype}[{','.join(map(str, dims))}]"

    return ", ".join(map(one, batch.leaves))


def _checked(dataset: Any) -> NumpyDataset | IterableSource:
    if isinstance(dataset, NumpyDataset):
        return dataset  # batched or not: a replica takes an element of it
    return sources.checked(dataset)


def _numpy_batches(source: NumpyDataset, pass_number: int) -> Iterator[Batch]:
    batched = source.global_batch_size is not None
    for batch in source.host_batches(pass_number):
        rows = np.arange(batch.num_rows) if batched else np.array(0)
        leaves = batch.take(rows, copy=False)
        yield Batch(leaves, batch.treedef, batch.num_rows if batched else None)


def _as_batch(element: PyTree, index: int) -> Batch:
    what = f"Batch {index} of the dataset"
    leaves, names, treedef = host_batch.as_arrays(element, what)
    scalars = any(x.ndim == 0 for x in leaves)
    num_rows = None if scalars else host_batch.common_rows(leaves, names, what)
    # The same loader is asked again for the next replica, and may fill its arrays anew.
    return Batch([host_batch.in_jax_dtype(x, copy=True) for x in leaves], treedef, num_rows)
