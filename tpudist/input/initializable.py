"""The iterator of TensorFlow 1.x, which `initialize` begins anew."""

from collections.abc import Iterator
from typing import Any

from tpudist import deprecated
from tpudist.input.dataset import DistributedDataset, DistributedIterator

PyTree = Any


class InitializableIterator(DistributedIterator):
    """Passes through a distributed dataset: the first without being asked, others by `initialize`.

    As what `make_dataset_iterator` of `tf.compat.v1.distribute.Strategy` gives outside of graphs.
    """

    def __init__(self, dataset: DistributedDataset):
        """Begins when the first element is asked for."""
        self._current = _Pass(dataset)
        super().__init__(dataset, self._current)

    def initialize(self) -> None:
        """Leaves the pass that is under way: the next element is the first of a new one."""
        deprecated.warn("initialize()", "use the iterator's `initializer` property")
        return self.initializer

    @property
    def initializer(self) -> None:
        """Begins anew, as `initialize()` does; there is no operation to run."""
        self.close()
        self._elements = self._current


class _Pass(Iterator[PyTree]):
    """One pass, begun when its first element is asked for, and the next one after `close`."""

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._elements: Iterator[PyTree] | None = None

    def __next__(self) -> PyTree:
        if self._elements is None:
            self._elements = self._dataset.begin()
        return next(self._elements)

    def close(self) -> None:
        elements, self._elements = self._elements, None
        if elements is not None and hasattr(elements, "close"):
            elements.close()  # type: ignore[attr-defined]
