"""WorkerIterator: an iterator that a worker keeps, and whose position outlives the worker."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

from tpudist.input.sources.indexed_dataset import IndexedDataset


class WorkerIterator:
    """Goes over a dataset that each worker makes for itself.

    What a closure has taken is taken when it has finished; if its worker is lost, or it could not
    finish for another reason that is not its own, that is taken again.
    """

    def __init__(self, make: Callable[[], Any]):
        """At the beginning of what `make` gives: a dataset, or anything to iterate over."""
        dataset = make()
        if isinstance(dataset, IndexedDataset):
            dataset = dataset.from_first_pass()  # the same order for a worker in place of another
        self._iterator: Iterator[Any] = iter(dataset)
        self._num_taken = 0
        self._since: list[Any] = []
        self._again: collections.deque[Any] = collections.deque()

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        """The next element."""
        element = self._again.popleft() if self._again else next(self._iterator)
        self._since.append(element)
        return element

    get_next = __next__

    @property
    def position(self) -> int:
        """How many elements were taken for good."""
        return self._num_taken

    def commit(self) -> None:
        """What was taken is taken for good."""
        self._num_taken += len(self._since)
        self._since.clear()

    def give_back(self) -> None:
        """What was taken since is the next again."""
        self._again.extendleft(reversed(self._since))
        self._since.clear()

    def go_to(self, position: int) -> None:
        """Passes over what one in its place has taken for good."""
        for _ in range(position):
            next(self._iterator, None)
        self._num_taken = position
