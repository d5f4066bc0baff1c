"""Requests the bytes of later batches while the loop uses earlier ones, for files in object stores.

The order of the examples is arithmetic, and a process takes the same rows of every batch. So the
examples that it will read are known, and their bytes are requested in *windows* of several batches:
one window is used while the next one arrives. A wrong guess costs requests only, because the read
of a batch requests what no window has.
"""

import collections
import concurrent.futures
import contextlib
import threading
from typing import NamedTuple, Protocol

import jax
import numpy as np

from tpudist.input.daemon_threads import DaemonThreads
from tpudist.input.iterator_state import State
from tpudist.input.sources.dataset_settings import BatchPlace
from tpudist.input.sources.indexed_dataset import IndexedDataset, IndexedPass
from tpudist.input.sources.source import RowBatch
from tpudist.input.storage.data_file import CannotRead

# The first window has one batch, so that the loop starts soon, and each has more than the one
# before. With many, a loop waits for the first batch of a window until most others are there, too.
_MAX_BATCHES, _GROWTH = 64, 4
_NUM_WINDOWS = 2  # that share the bytes: one is used, one arrives


class Requests(Protocol):
    """Requests for the bytes of examples."""

    def add(self, numbers: np.ndarray, max_bytes: int, *, in_part: bool) -> bool:
        """Adds examples if the bytes of all that were added fit; returns whether they do.

        If `in_part`, adds the examples that fit, and returns True.
        """
        ...

    def begin(self) -> list[object]:
        """Begins to read; the bytes are kept as long as the result is referenced."""
        ...


class AheadDataset(Protocol):
    """A dataset whose bytes can be requested ahead."""

    def requests(self) -> Requests:
        """Returns an object for the requests of one window."""
        ...

    def numbers_of(self, place: BatchPlace, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the examples of some rows of a batch."""
        ...


class AheadPass(IndexedPass):
    """A pass that requests the bytes of later batches; see `IndexedPass`.

    Args:
        dataset: The dataset, which is also an `AheadDataset`.
        ahead: The dataset.
        pass_number: Number of the pass.
        state: Position at which it begins; None for the start.
        max_bytes: Bytes that may be requested ahead. A batch that needs more is requested in part.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        ahead: AheadDataset,
        pass_number: int,
        state: State | None,
        max_bytes: int,
    ):
        super().__init__(dataset, pass_number, state)
        scout = IndexedPass(dataset, pass_number, state)
        self._windows = _Windows(ahead, scout, self._num_taken, max_bytes // _NUM_WINDOWS)

    def __next__(self) -> RowBatch:
        batch = super().__next__()
        return _AheadBatch(batch, self._num_taken - 1, self._windows)


class _AheadBatch(NamedTuple):
    """A batch whose `take` prepares later batches first."""

    batch: RowBatch
    number: int
    windows: "_Windows"

    @property
    def treedef(self) -> jax.tree_util.PyTreeDef:
        return self.batch.treedef

    @property
    def num_rows(self) -> int:
        return self.batch.num_rows

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        self.windows.prepare(self.number, np.unique(positions))
        return self.batch.take(positions, copy=copy)


class _Windows:
    """The windows that are used and that arrive.

    Args:
        dataset: The dataset.
        scout: A pass at the same position, which runs ahead.
        first: Number of its first batch.
        max_bytes: Bytes of a window, which has at least a part of one batch.
    """

    def __init__(self, dataset: AheadDataset, scout: IndexedPass, first: int, max_bytes: int):
        self._dataset, self._scout, self._max_bytes = dataset, scout, max_bytes
        self._lock = threading.Lock()
        # Of each window: the number of the batch behind it, and the bytes.
        self._windows: collections.deque[tuple[int, list[object]]] = collections.deque()
        self._index, self._rows, self._end = first, np.zeros(0, np.int64), first
        self._num_batches, self._is_at_end = 1, False
        self._place: BatchPlace | None = None  # of a batch that did not fit into the last window
        self._next: concurrent.futures.Future[None] | None = None
        self._thread = DaemonThreads(1, "tpudist-read-ahead")

    def prepare(self, index: int, rows: np.ndarray) -> None:
        """Waits until the bytes of a batch are requested, and starts the next window."""
        with self._lock:
            # A batch may be taken in several parts, so those of an earlier batch say more.
            is_same = index == self._index
            self._rows = np.union1d(self._rows, rows) if is_same else rows
            self._index = index
            while self._windows and self._windows[0][0] <= index:
                self._windows.popleft()
            # Ends: each turn moves `_end`, or the pass has no more batches.
            while self._end <= index and not self._is_at_end:
                self._begin_next(rows).result()
                self._next = None
            if len(self._windows) < _NUM_WINDOWS and not self._is_at_end:
                self._begin_next(self._rows)

    def _begin_next(self, rows: np.ndarray) -> "concurrent.futures.Future[None]":
        if self._next is None or self._next.done():
            self._next = self._thread.submit(self._request, rows)
        return self._next

    def _request(self, rows: np.ndarray) -> None:
        """Requests the next window. Only one call runs at a time."""
        requests, num_batches = self._dataset.requests(), 0
        while num_batches < self._num_batches:
            try:
                self._place = self._place or self._scout.advance()
            except CannotRead:
                if not num_batches:  # else the next window raises it: this one can be read
                    raise
                break
            if self._place is None:
                self._is_at_end = True
                break
            with contextlib.suppress(CannotRead):  # the read of the batch raises it
                numbers = self._dataset.numbers_of(self._place, rows[rows < self._place.num_rows])
                if not requests.add(numbers, self._max_bytes, in_part=not num_batches):
                    break
            self._place = None
            num_batches += 1
        parts: list[object] = []
        with contextlib.suppress(CannotRead):
            parts = requests.begin()
        if num_batches:
            self._end += num_batches
            self._windows.append((self._end, parts))
            self._num_batches = min(_GROWTH * num_batches, _MAX_BATCHES)
