"""The iterator of TensorFlow 1.x, which `initialize` begins anew."""

from typing import Any

from tpudist.array_types import PyTree
from tpudist.input.dataset import DistributedDataset, DistributedIterator
from tpudist.options import warn_of_deprecation


class InitializableIterator(DistributedIterator):
    """Passes through a distributed dataset: the first without being asked, others by `initialize`.

    As what `make_dataset_iterator` of `tf.compat.v1.distribute.Strategy` gives outside of graphs.
    """

    def __init__(self, dataset: DistributedDataset):
        """Begins when the first element is asked for."""
        super().__init__(dataset, dataset.begin())
        self._is_left = False

    def _take(self) -> PyTree:
        if self._is_left:
            self._is_left = False
            self._elements = self._dataset.begin_at(self._position)
        return super()._take()

    def set_state(self, state: dict[str, Any]) -> None:
        """As `DistributedIterator.set_state`; ends what `initializer` has begun."""
        super().set_state(state)
        self._is_left = False

    def initialize(self) -> None:
        """Leaves the pass that is under way: the next element is the first of a new one."""
        warn_of_deprecation("initialize()", "use the iterator's `initializer` property")
        return self.initializer

    @property
    def initializer(self) -> None:
        """Begins anew, as `initialize()` does; there is no operation to run."""
        if self._elements.is_untouched:
            return
        self.close()
        self._position = self._dataset.next_pass
        self._is_left = True
