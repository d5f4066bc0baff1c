"""Global batches, each split over the replicas: every process reads the rows of its own."""

import enum
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tpudist.input import placing, sources
from tpudist.input.assignment import Assignment
from tpudist.input.host_batch import HostBatch
from tpudist.input.numpy_dataset import UNKNOWN_CARDINALITY, NumpyDataset
from tpudist.input.placing import Parts
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


class PartialBatch(enum.Enum):
    """What becomes of a batch that has fewer rows than the global batch.

    Attributes:
        PAD: It is padded to the full shape, and its `PerReplica.rows` tell which rows are real.
        DROP: It is left out.
        ERROR: It is a `ValueError`.
    """

    PAD = "pad"
    DROP = "drop"
    ERROR = "error"


class SplitBatches:
    """A feed whose elements are the global batches of one source, which all processes read alike.

    The first batch is the largest: its rows are the global batch (for a `NumpyDataset`, what it was
    batched by).
    """

    needs_agreement = False

    def __init__(self, source: Any, replica_mesh: ReplicaMesh, partial_batch: PartialBatch | str):
        """Splits `source`; see `DistributedDataset`."""
        self._partial_batch = _partial_batch(partial_batch)
        self._source = sources.checked(source)
        if isinstance(self._source, NumpyDataset):
            self._source = self._without_surprise(self._source)
        self._mesh = replica_mesh
        # Those of the first batch there was, in any pass: the shapes of all later ones.
        self._assignment: Assignment | None = None
        self._treedef: jax.tree_util.PyTreeDef | None = None

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if not known."""
        if not isinstance(self._source, NumpyDataset) and self._partial_batch is PartialBatch.DROP:
            return UNKNOWN_CARDINALITY
        return self._source.cardinality

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, structured as it is."""
        leaves, treedef = jax.tree.flatten(self._source.element_spec)
        size = leaves[0].shape[0]
        assignment = Assignment(size, self._mesh.num_replicas)
        each = size if self._mesh.num_replicas == 1 else assignment.rows_per_replica
        rows = assignment.rows(size)
        return treedef.unflatten(
            [
                placing.part_spec(self._mesh, (each, *leaf.shape[1:]), leaf.dtype, rows)
                for leaf in leaves
            ]
        )

    def host_parts(self, pass_number: int, *, keep: bool) -> Iterator[Parts]:
        """The batches of one pass; they do not share memory with the source's, if `keep`."""
        batches = self._source.host_batches(pass_number)
        # A user's loader may fill its arrays anew for the next batch. On CPU, JAX uses aligned
        # NumPy arrays in place; elsewhere it reads them until the copy to the device has ended.
        copy = not self._owns_memory and (keep or self._mesh.platform == "cpu")
        return self._parts(batches, copy)

    @property
    def _owns_memory(self) -> bool:
        return isinstance(self._source, NumpyDataset)

    def _parts(self, batches: Iterator[HostBatch], copy: bool) -> Iterator[Parts]:
        num_elements = num_batches = 0
        for num_batches, batch in enumerate(batches, start=1):
            if self._assignment is None:
                size = self._source.global_batch_size or batch.num_rows
                self._treedef = batch.treedef
                self._assignment = Assignment(size, self._mesh.num_replicas)
            size = self._assignment.global_batch_size
            self._check(batch, num_batches - 1, size)
            if batch.num_rows < size and self._partial_batch is PartialBatch.DROP:
                continue
            yield self._take(batch, self._assignment, copy)
            num_elements += 1
        if not num_elements:
            if num_batches:
                raise ValueError(
                    f"All {num_batches} batches of the dataset were partial ones and dropped, so "
                    f"there was nothing to do. Use partial_batch='pad'."
                )
            raise ValueError(sources.NO_BATCHES)

    def _take(self, batch: HostBatch, assignment: Assignment, copy: bool) -> Parts:
        borrowed = not self._owns_memory and not copy
        if self._mesh.num_replicas == 1:
            leaves = batch.take(np.arange(batch.num_rows), copy=copy)
            return Parts(leaves, batch.treedef, None, borrowed)
        positions = assignment.positions(batch.num_rows, self._mesh.local_replicas)
        leaves = batch.take(positions, copy=copy)
        return Parts(leaves, batch.treedef, assignment.rows(batch.num_rows), borrowed)

    def _without_surprise(self, source: NumpyDataset) -> NumpyDataset:
        """Applies `partial_batch` where it is known from the start what it comes to."""
        if self._partial_batch is PartialBatch.DROP:
            return source.without_remainder()
        if self._partial_batch is PartialBatch.ERROR and source.has_remainder:
            raise ValueError(
                f"The NumPy dataset does not split into full batches of "
                f"{source.global_batch_size} examples, and partial_batch='error'. Use 'pad', which "
                f"counts the last batch's real rows exactly, or 'drop'."
            )
        return source

    def _check(self, batch: HostBatch, index: int, size: int) -> None:
        if batch.treedef != self._treedef:
            raise ValueError(
                f"Batch {index} of the dataset is structured as {batch.treedef}, but the first one "
                f"as {self._treedef}. All batches must have the same structure."
            )
        if batch.num_rows > size:
            raise ValueError(
                f"Batch {index} of the dataset has {batch.num_rows} rows, but the first one has "
                f"{size}, which sets the global batch size. A batch may be smaller, never larger: "
                f"put a full batch first, or split the larger ones."
            )
        if batch.num_rows < size and self._partial_batch is PartialBatch.ERROR:
            raise ValueError(
                f"Batch {index} of the dataset has {batch.num_rows} rows, fewer than the global "
                f"batch of {size}, and partial_batch='error'. Use 'pad', which counts its real "
                f"rows exactly, or 'drop'."
            )


def _partial_batch(value: PartialBatch | str) -> PartialBatch:
    try:
        return PartialBatch(value)
    except ValueError:
        known = ", ".join(repr(policy.value) for policy in PartialBatch)
        raise ValueError(f"partial_batch is {value!r}. Known are {known}.") from None
