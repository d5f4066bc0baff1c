"""PerWorkerDataset: a dataset that each worker creates for itself, and its iterators."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpudist.coordinator.remote_value import PerWorkerValue
from tpudist.coordinator.worker_iterator import WorkerIterator


class PerWorkerDataset:
    """One dataset per worker; created by `ClusterCoordinator.create_per_worker_dataset`.

    Args:
        add_resource: Called with a function and its arguments; lets each worker create a resource
            and returns its key.
        unused: Receives the keys of resources that workers may delete.
        make: Called on each worker; returns its dataset.
    """

    def __init__(
        self,
        add_resource: Callable[[Callable[..., Any], Sequence[Any]], int],
        unused: collections.deque[int],
        make: Callable[[], Any],
    ):
        self._add_resource, self._unused, self._make = add_resource, unused, make

    def __iter__(self) -> PerWorkerIterator:
        """Returns one iterator per worker, at the beginning; pass it to `schedule`."""
        # Workers create the dataset again for each iterator, so that iterators are independent.
        return PerWorkerIterator(self._add_resource(WorkerIterator, (self._make,)), self._unused)


class PerWorkerIterator(PerWorkerValue):
    """One iterator per worker. A function uses the iterator of the worker that runs it.

    Workers delete their iterators after this object and all closures that use it are gone.
    """

    def __init__(self, key: int, unused: collections.deque[int]):
        super().__init__(())
        self._key = key
        # Not at exit: workers end with the program anyway.
        weakref.finalize(self, unused.append, key).atexit = False

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(
            "A per-worker iterator can be used only on its workers. Pass it to a scheduled "
            "function, and call next(iterator) there."
        )

    def __next__(self) -> Any:
        """Raises NotImplementedError; see `__iter__`."""
        return self.__iter__()

    get_next = __next__
