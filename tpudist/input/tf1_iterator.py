"""The iterator of TensorFlow 1.x, which `initialize` starts again."""

from tpudist.array_types import PyTree
from tpudist.input.dataset import DistributedDataset, DistributedIterator
from tpudist.input.iterator_state import State
from tpudist.options import warn_of_deprecation


class InitializableIterator(DistributedIterator):
    """Iterator that can begin a new pass: `next` begins the first one, `initialize` the others.

    Matches the result of `make_dataset_iterator` of `tf.compat.v1.distribute.Strategy` outside of
    graphs.
    """

    def __init__(self, dataset: DistributedDataset):
        super().__init__(dataset, dataset.begin())
        # Whether the old pass is closed, and the next `next` begins a new one.
        self._is_reset = False

    def _take(self) -> PyTree:
        if self._is_reset:
            self._is_reset = False
            self._elements = self._dataset.begin_at(self._position)
        return super()._take()

    def set_state(self, state: State) -> None:
        """See `DistributedIterator.set_state`; cancels a call of `initializer`."""
        super().set_state(state)
        self._is_reset = False

    def initialize(self) -> None:
        """Ends the current pass: the next element is the first of a new one."""
        warn_of_deprecation("initialize()", "use the iterator's `initializer` property")
        return self.initializer

    @property
    def initializer(self) -> None:
        """Starts again, as `initialize()` does. In TensorFlow it is the operation that does so."""
        if self._elements.is_untouched:  # nothing was read: the pass need not begin again
            return
        self.close()
        self._position = self._dataset.next_pass
        self._is_reset = True
