"""WorkerIterator: the iterator of one worker, with a position that outlives the worker."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY, IndexedDataset


class WorkerIterator:
    """Iterates over a dataset that each worker creates for itself.

    A closure's elements count as consumed when the closure has finished, also with an error. If a
    server is lost meanwhile, `give_back` returns them. If the worker is lost, its successor calls
    `go_to`.

    Args:
        make: Called once; returns a dataset or another iterable.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        dataset = self._dataset = make()
        # The successor of a lost worker must see the same order, so it starts at the same pass.
        self._iterator: Iterator[Any] = (
            dataset.elements_from(0) if isinstance(dataset, IndexedDataset) else iter(dataset)
        )
        self._num_consumed = 0
        self._in_use: list[Any] = []
        self._returned: collections.deque[Any] = collections.deque()

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        """Returns the next element."""
        element = self._returned.popleft() if self._returned else next(self._iterator)
        self._in_use.append(element)
        return element

    get_next = __next__

    @property
    def position(self) -> int:
        """Number of consumed elements."""
        return self._num_consumed

    def commit(self) -> None:
        """Counts the elements in use as consumed."""
        self._num_consumed += len(self._in_use)
        self._in_use.clear()

    def give_back(self) -> None:
        """Returns the elements in use, in their order, before all others."""
        self._returned.extendleft(reversed(self._in_use))
        self._in_use.clear()

    def go_to(self, position: int) -> None:
        """Skips the elements that a lost worker has consumed; reads them if it must.

        Raises:
            ValueError: If there are fewer elements.
        """
        if isinstance(self._dataset, IndexedDataset):
            size = self._dataset.cardinality
            count = position if size == INFINITE_CARDINALITY else min(size, position)
            self._iterator = self._dataset.elements_from(count)
        else:
            count = sum(1 for _ in itertools.islice(self._iterator, position))
        if count < position:
            raise ValueError(
                f"A lost worker has consumed {position} elements of its dataset, but the dataset "
                f"that its successor created has only {count}. The dataset function must return "
                "the same data each time it is called."
            )
        self._num_consumed = position
