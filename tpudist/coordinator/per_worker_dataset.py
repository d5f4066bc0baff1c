"""PerWorkerDataset: a dataset that each worker makes for itself, and iterators over it."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpudist.coordinator.remote_value import PerWorkerValue
from tpudist.coordinator.worker_iterator import WorkerIterator


class PerWorkerDataset:
    """A dataset of each worker; made by `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(
        self,
        keep: Callable[[Callable[..., Any], Sequence[Any]], int],
        unused: collections.deque[int],
        make: Callable[[], Any],
    ):
        """Made by `make` on each worker.

        Args:
            keep: Has workers keep what a function makes of arguments; its key.
            unused: Takes the keys of what they need not keep any more.
            make: Gives the dataset, on a worker.
        """
        self._keep, self._unused, self._make = keep, unused, make

    def __iter__(self) -> PerWorkerIterator:
        """An iterator of each worker, at the beginning: an argument for `schedule`."""
        return PerWorkerIterator(self._keep(_begin_iteration, (self._make,)), self._unused)


class PerWorkerIterator(PerWorkerValue):
    """An iterator of each worker, of which a function sees that of the worker that runs it.

    Workers keep theirs until this one is forgotten, and what it was given to has run.
    """

    def __init__(self, key: int, unused: collections.deque[int]):
        """The one that workers keep under `key`, until that is among `unused`."""
        super().__init__(())
        self._key = key
        weakref.finalize(self, unused.append, key).atexit = False

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(
            "A per-worker iterator can be used only on its workers. Pass it to a scheduled "
            "function, and call next(iterator) there."
        )

    def __next__(self) -> Any:
        """Not here: see `__iter__`."""
        return self.__iter__()

    get_next = __next__


def _begin_iteration(make: Callable[[], Any]) -> WorkerIterator:
    return WorkerIterator(make)
