"""Distributed datasets: global batches on the host become values on the replicas.

Each process reads the rows of its own replicas, in a thread that also copies them to the devices
while steps run. What differs between sources of data ends here: all a strategy sees are elements.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tpudist import context
from tpudist.errors import OutOfRangeError
from tpudist.input import feeding, sources
from tpudist.input.optional import Optional
from tpudist.input.pipelines import Pipelines
from tpudist.input.split import PartialBatch, SplitBatches
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


class DistributedDataset:
    """A dataset whose elements are split over the replicas; each `iter` is one pass through it.

    An element is the pytree of the batch with every array in a `PerReplica`, `[num_replicas,
    rows_per_replica, ...]`, whose `rows` count the real rows of each replica, the same for all
    arrays. With one replica its arrays are plain ones `[rows, ...]`, never padded.

    The first batch is the largest: its rows are the global batch (for a `NumpyDataset`, what it was
    batched by). Of datasets that a function makes, each replica has whole batches; the largest of
    the first step is the largest. As `tf.distribute.DistributedDataset`, where a partial batch
    changes shape.
    """

    def __init__(
        self,
        source: sources.Source | Pipelines,
        replica_mesh: ReplicaMesh,
        *,
        partial_batch: PartialBatch | str = PartialBatch.PAD,
        prefetch: int = 2,
        fetch_to_device: bool = True,
        strategy: Any = None,
    ):
        """Distributes `source` over the replicas of `replica_mesh`.

        Args:
            source: A batched `NumpyDataset`; or global batches as pytrees of arrays `[rows, ...]`:
                an iterable, or a function that returns one for each pass. In several processes all
                must give the same batches. Or `Pipelines`, whose batches are the replicas' own.
            replica_mesh: The replicas.
            partial_batch: What becomes of a global batch with fewer rows.
            prefetch: How many elements to hold ready; 0 makes each when it is asked for, in the
                caller's thread.
            fetch_to_device: Whether they are held on the devices, or in host memory.
            strategy: Whose replicas they are: elements cannot be taken in the scope of another one.

        Raises:
            TypeError: `source` gives no batches.
            ValueError: It is not batched, or an option has no such value.
        """
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch is {prefetch!r}. Give a whole number of at least 0.")
        if isinstance(source, DistributedDataset | DistributedIterator):
            raise TypeError("The dataset is distributed already. Iterate over it as it is.")
        self._feed = (
            source
            if isinstance(source, Pipelines)
            else SplitBatches(source, replica_mesh, partial_batch)
        )
        self._mesh = replica_mesh
        self._prefetch = prefetch
        self._fetch_to_device = fetch_to_device
        self.strategy = strategy
        self._num_passes = 0

    def __iter__(self) -> "DistributedIterator":
        """Begins the next pass; iterators are independent of each other.

        Raises:
            ValueError: In a replica function; or the source is an iterator, which has one pass, and
                this is the second.
        """
        context.require_cross_replica("iter(distributed_dataset)")
        _require_no_trace("iter(distributed_dataset)")
        return DistributedIterator(self, self.begin())

    def begin(self) -> Iterator[PyTree]:
        """The elements of the next pass, made ahead as the options say."""
        elements = feeding.elements(
            self._feed,
            self._mesh,
            self._num_passes,
            prefetch=self._prefetch,
            fetch_to_device=self._fetch_to_device,
        )
        self._num_passes += 1
        return elements

    def reduce(
        self, initial_state: PyTree, reduce_func: Callable[[PyTree, PyTree], PyTree]
    ) -> PyTree:
        """The last state of a pass: `reduce_func(state, element)` gives each from the one before.

        In cross-replica context. As `tf.distribute.DistributedDataset.reduce`.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    @property
    def cardinality(self) -> int:
        """Number of elements of a pass; as in tf.data, -1 if it has no end, -2 if not known."""
        return self._feed.cardinality

    @property
    def element_spec(self) -> PyTree:
        """Shapes, dtypes and shardings of a full element, structured as it is.

        Reads the first batch of an iterable to know it.
        """
        return self._feed.element_spec


class DistributedIterator(Iterator[PyTree]):
    """One pass through a `DistributedDataset`.

    Once at the end it stays there. Dropping it ends its thread. As
    `tf.distribute.DistributedIterator`.
    """

    def __init__(self, dataset: DistributedDataset, elements: Iterator[PyTree]):
        """Made by `iter(dataset)`."""
        self._dataset = dataset
        self._elements = elements
        self._given_back: list[PyTree] = []

    def __next__(self) -> PyTree:
        """The next element.

        Raises:
            StopIteration: At the end.
            RuntimeError: In the scope of another strategy.
            ValueError: In a replica function, or the source gives a batch that is not fit.
            Exception: Whatever the source raises.
        """
        context.require_cross_replica("next(iterator)")
        if self._dataset.strategy is not None:
            context.require_scope_or_default(self._dataset.strategy, "next(iterator)")
        frame = context.current().frame
        if frame is not None:
            return frame.root.next_element(self)
        return self._given_back.pop() if self._given_back else next(self._elements)

    def __iter__(self) -> "DistributedIterator":
        """Itself."""
        _require_no_trace("iter(iterator)")
        return self

    def give_back(self, element: PyTree) -> None:
        """Makes `element`, the last one taken, the next one again."""
        self._given_back.append(element)

    def get_next(self) -> PyTree:
        """As `next`, but the end is an `errors.OutOfRangeError`, which is a StopIteration too."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The distributed iterator is at its end.") from None

    def get_next_as_optional(self) -> Optional:
        """As `next`, in an `Optional`, which has no value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> PyTree:
        """That of the dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """Ends the pass and waits for its thread, which ends with the batch it is at."""
        close: Callable[[], None] | None = getattr(self._elements, "close", None)
        if close is not None:
            close()
        self._elements = iter(())
        self._given_back.clear()


def _require_no_trace(what: str) -> None:
    if context.current().frame is not None:
        raise ValueError(
            f"{what} was called in a tpudist.function or merge_call, which is traced once: a loop "
            f"over a dataset would become part of the compiled program. Loop outside of it, or "
            f"take a fixed number of elements with next(iterator)."
        )
