"""One pass through examples that are read by number: which come next, and how they are read."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tpudist.input import iterator_state
from tpudist.input.transfer import host_batch

if TYPE_CHECKING:
    from tpudist.input.sources.indexed_dataset import IndexedDataset


class IndexedPass(Iterator[Any]):
    """The batches of one pass through an `IndexedDataset`."""

    def __init__(self, dataset: "IndexedDataset", pass_number: int, given: Any):
        """After the batches that the state `given` counts."""
        self._dataset = dataset
        self._num_epochs = dataset._plan.num_epochs
        self._first_epoch = pass_number * (self._num_epochs or 0)
        self._num_given = 0 if given is None else iterator_state.read_count(given, "batches")
        self._num_batches = dataset.cardinality
        if 0 <= self._num_batches < self._num_given:
            raise ValueError(
                f"The state is one after {self._num_given} batches of a pass, which has "
                f"{self._num_batches}."
            )
        self._numbers, self._num_examples = dataset.batches_of_epoch, dataset.num_examples
        self._batch_size = dataset.global_batch_size or 1
        self._order: tuple[int, np.ndarray | None] | None = None

    def __next__(self) -> Any:
        place = self.advance()
        if place is None:
            raise StopIteration
        return self._dataset._host_batch(*place)

    def advance(self) -> tuple[int, int, int, np.ndarray | None] | None:
        """Epoch, rows, start and order of the next batch, for `_host_batch`; None at the end."""
        if self._num_given == self._num_batches:
            return None
        epoch, index = divmod(self._num_given, len(self._numbers))
        epoch += self._first_epoch
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._dataset._order(epoch))
        start = self._numbers[index] * self._batch_size
        num_rows = min(self._batch_size, self._num_examples - start)
        self._num_given += 1
        return epoch, num_rows, start, self._order[1]

    def get_state(self) -> dict[str, Any]:
        """Where the pass is."""
        return {"batches": self._num_given}


class ReadBatch(NamedTuple):
    """A batch whose rows are read when they are taken, as `HostBatch` has them in memory.

    Attributes:
        read_examples: Gives the examples of some numbers in some epoch.
        treedef: Structure of the batch.
        numbers: Those of its examples, integers `[rows]`.
        epoch: The one that it belongs to.
    """

    read_examples: Callable[[np.ndarray, int], list[np.ndarray]]
    treedef: jax.tree_util.PyTreeDef
    numbers: np.ndarray
    epoch: int

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch."""
        return len(self.numbers)

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """The rows at `positions`, for each leaf, in the dtypes that JAX will use."""
        flat = np.asarray(positions).reshape(-1)
        if np.all(np.diff(flat) > 0):
            leaves = self.read_examples(self.numbers[positions], self.epoch)
        else:  # padding repeats a row, which is read once
            unique, inverse = np.unique(flat, return_inverse=True)
            where = inverse.reshape(np.shape(positions))
            leaves = self.read_examples(self.numbers[unique], self.epoch)
            leaves = [leaf[where] for leaf in leaves]
        return [
            host_batch.to_jax_dtype(leaf, "A batch of the dataset", copy=copy) for leaf in leaves
        ]
