"""Computes an order of the records of several files in which each process reads few of the files.

A batch consists of *lanes* of equally many rows, and each file belongs to one lane. A process reads
the same rows of every batch, so it reads only the files of their lanes. The order is a function of
seed, epoch and global batch size, and independent of the number of processes: a run can resume
with another number. It is computed for the rows that are read, in memory for each file, not for
each row. Nothing here reads files.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tpudist.input.file_formats.recent import Recent
from tpudist.input.permutation import Order

# Bytes of the orders of segments that are kept, of all files and of the blocks in them.
MAX_ORDER_BYTES = 1 << 26
_ORDER_BYTES = 1 << 16  # most bytes of an order that is computed


def num_lanes(num_files: int, global_batch_size: int) -> int:
    """Returns the largest divisor of the batch size that is at most the number of files."""
    counts = range(min(num_files, global_batch_size), 0, -1)
    return next((n for n in counts if global_batch_size % n == 0), 1)  # 1 without files


class SegmentOrder:
    """The rows of segments, such as files or blocks of a file, one segment after the other.

    Args:
        sizes: Number of rows of each segment. Rows count on from segment to segment.
        sequence: The segments in the order in which they are read.
        order_of_rows: Called with a segment; returns the order of its rows. None for ascending.
        orders: Keeps the orders of recent segments. Orders within orders share it, so that memory
            does not grow with the number of files times that of their blocks.
        name: Name of this object in `orders`.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        sequence: np.ndarray,
        order_of_rows: Callable[[int], Order] | None,
        orders: Recent[Order],
        name: tuple[int, ...] = (),
    ):
        self._first_rows = np.cumsum(sizes) - sizes
        self._sequence = sequence
        self._ends = np.cumsum(sizes[sequence])
        self._starts = self._ends - sizes[sequence]
        self._order_of_rows = order_of_rows
        self._orders, self._name = orders, name

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return 4 * self._ends.nbytes

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Returns the rows at `positions`; a slice has no step."""
        flat, shape = _flatten(positions, int(self._ends[-1]))
        places = np.searchsorted(self._ends, flat, side="right")
        segments, rows = self._sequence[places], flat - self._starts[places]
        if self._order_of_rows is not None and len(rows):
            self._shuffle(segments, rows)
        return (self._first_rows[segments] + rows).reshape(shape)

    def _shuffle(self, segments: np.ndarray, rows: np.ndarray) -> None:
        """Replaces the rows of each segment by those in its order."""
        by_segment = np.argsort(segments, kind="stable")
        ends = np.flatnonzero(np.diff(segments[by_segment])) + 1
        for group in np.split(by_segment, ends):
            rows[group] = self._order_of(int(segments[group[0]]))[rows[group]]

    def _order_of(self, segment: int) -> Order:
        key = (*self._name, segment)
        order = self._orders.get(key)
        if order is None:
            assert self._order_of_rows is not None, segment
            order = self._order_of_rows(segment)
            has_arrays = isinstance(order, np.ndarray | SegmentOrder)
            self._orders.put(key, order, order.nbytes if has_arrays else _ORDER_BYTES)
        return order


class FileOrder:
    """The rows of all files, ordered so that each batch has equally many from every lane.

    Each row appears once. Lanes are as equal as whole files allow. Full batches need the same
    number of rows of each lane. The surplus of longer lanes fills up the shorter ones at their
    ends, and then the last, partial batch. It suffices: all lanes together have the rows of the
    full batches and those of the partial one.

    Args:
        num_rows: Number of rows of each file. Rows count on from file to file.
        global_batch_size: Rows of a batch.
        order_of_files: Order of the files that have rows. None for ascending.
        order_of_rows: Called with the number of a file; returns the order of its rows. None for
            ascending.
    """

    def __init__(
        self,
        num_rows: np.ndarray,
        global_batch_size: int,
        order_of_files: Order | None,
        order_of_rows: Callable[[int], Order] | None,
        orders: Recent[Order] | None = None,
    ):
        files, numbers = np.flatnonzero(num_rows), np.arange(np.count_nonzero(num_rows))
        order = numbers if order_of_files is None else order_of_files[numbers]
        lane_count = num_lanes(len(files), global_batch_size)
        lanes = _balance(num_rows[files].tolist(), order.tolist(), lane_count)
        sequence = files[np.fromiter(itertools.chain.from_iterable(lanes), np.int64, len(files))]
        self._rows_of_lanes = SegmentOrder(
            num_rows, sequence, order_of_rows, orders or Recent(MAX_ORDER_BYTES)
        )
        self._batch_size, self._rows_per_batch = global_batch_size, global_batch_size // lane_count
        self._num_rows = int(num_rows.sum())
        num_batches = self._num_rows // global_batch_size
        self._num_in_full_batches = num_batches * global_batch_size
        self._rows_per_lane = num_batches * self._rows_per_batch
        self._lane_sizes = np.array([int(num_rows[files[lane]].sum()) for lane in lanes], np.int64)
        self._lane_starts = _starts(self._lane_sizes)
        # Positions in the surplus: of the rows that a lane has, and of the rows that fill it up.
        surplus = np.maximum(self._lane_sizes - self._rows_per_lane, 0)
        missing = np.maximum(self._rows_per_lane - self._lane_sizes, 0)
        self._surplus_starts, self._surplus_ends = _starts(surplus), np.cumsum(surplus)
        self._filling_starts, self._num_missing = _starts(missing), int(missing.sum())

    def __len__(self) -> int:
        """Number of rows."""
        return self._num_rows

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Returns the rows at `positions`; a slice has no step."""
        positions, shape = _flatten(positions, self._num_rows)
        batches, in_batch = np.divmod(positions, self._batch_size)
        lanes, in_part = np.divmod(in_batch, self._rows_per_batch)
        in_lane = batches * self._rows_per_batch + in_part
        in_surplus = self._filling_starts[lanes] + in_lane - self._lane_sizes[lanes]
        is_partial = positions >= self._num_in_full_batches
        after_full = positions - self._num_in_full_batches + self._num_missing
        in_surplus = np.where(is_partial, after_full, in_surplus)
        is_surplus = is_partial | (in_lane >= self._lane_sizes[lanes])
        donors = np.searchsorted(self._surplus_ends, np.where(is_surplus, in_surplus, 0), "right")
        donors = np.minimum(donors, len(self._lane_sizes) - 1)  # without any surplus
        in_donor = self._rows_per_lane + in_surplus - self._surplus_starts[donors]
        lanes = np.where(is_surplus, donors, lanes)
        places = self._lane_starts[lanes] + np.where(is_surplus, in_donor, in_lane)
        return self._rows_of_lanes[places].reshape(shape)


def _flatten(positions: slice | np.ndarray, num_rows: int) -> tuple[np.ndarray, tuple[int, ...]]:
    if isinstance(positions, slice):
        positions = np.arange(*positions.indices(num_rows))
    return positions.reshape(-1), positions.shape


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(sizes) - sizes


def _balance(sizes: Sequence[int], order: Sequence[int], lane_count: int) -> list[list[int]]:
    """Returns the files of each lane: the largest file goes first, to the lane with fewest rows."""
    files_of_lane: list[list[int]] = [[] for _ in range(lane_count)]
    lanes = [(0, lane) for lane in range(lane_count)]  # a heap by number of rows
    rank = {file: position for position, file in enumerate(order)}
    # The sort is stable, so files of equal size are distributed in the (shuffled) `order`.
    for file in sorted(order, key=lambda i: -sizes[i]):
        num_rows, lane = lanes[0]
        files_of_lane[lane].append(file)
        heapq.heapreplace(lanes, (num_rows + sizes[file], lane))
    return [sorted(lane, key=rank.__getitem__) for lane in files_of_lane]


def shuffle_in_blocks(rows: np.ndarray, ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the rows of a file, shuffled so that the rows of a block stay together.

    Args:
        rows: Integers `[rows]`.
        ends: Position in `rows` at which each block ends, integers `[blocks]`.
        rng: Generator that shuffles the blocks, and the rows of each.
    """
    blocks = np.split(rows, ends[:-1])
    if len(blocks) == 1:
        return rng.permutation(rows)
    return np.concatenate([rng.permutation(blocks[i]) for i in rng.permutation(len(blocks))])
