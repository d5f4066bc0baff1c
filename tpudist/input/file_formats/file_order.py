"""Computes an order of the records of several files in which each process reads few of the files.

A batch consists of *lanes* of equally many rows, and each file belongs to one lane. A process reads
the same rows of every batch, so it reads only the files of their lanes. The order is a function of
seed, epoch and global batch size, and independent of the number of processes: a run can resume
with another number. Nothing here reads files.
"""

from collections.abc import Sequence

import numpy as np


def num_lanes(num_files: int, global_batch_size: int) -> int:
    """Returns the largest divisor of the batch size that is at most the number of files."""
    counts = range(min(num_files, global_batch_size), 0, -1)
    return next((n for n in counts if global_batch_size % n == 0), 1)  # 1 without files


def order_in_lanes(
    files: Sequence[np.ndarray], global_batch_size: int, rng: np.random.Generator | None
) -> np.ndarray:
    """Returns the rows of all files, ordered so that each batch has equally many from every lane.

    Each row appears once. Lanes are as equal as whole files allow.

    Args:
        files: The rows of each file, in the order in which they are read.
        global_batch_size: Rows of a batch.
        rng: Generator that shuffles the files; None keeps them in sequence.

    Returns:
        Integers `[rows]`.
    """
    files = [rows for rows in files if len(rows)]
    lane_count = num_lanes(len(files), global_batch_size)
    rows_per_batch = global_batch_size // lane_count  # of one lane
    num_batches = sum(map(len, files)) // global_batch_size
    rows_per_lane = num_batches * rows_per_batch
    order = list(range(len(files))) if rng is None else rng.permutation(len(files)).tolist()
    sequences = [
        np.concatenate([files[i] for i in lane] or [np.zeros(0, np.int64)])
        for lane in _balance([len(x) for x in files], order, lane_count)
    ]
    # Full batches need `rows_per_lane` rows of each lane. The surplus of longer lanes fills up the
    # shorter ones at their ends. It suffices: all lanes together have the rows of the full batches
    # and those of the last, partial batch, which gets the rest of the surplus.
    surplus = np.concatenate([sequence[rows_per_lane:] for sequence in sequences])
    full = np.empty((num_batches, lane_count, rows_per_batch), np.int64)
    for lane, sequence in enumerate(sequences):
        num_missing = max(rows_per_lane - len(sequence), 0)
        rows = np.concatenate([sequence[:rows_per_lane], surplus[:num_missing]])
        surplus = surplus[num_missing:]
        full[:, lane] = rows.reshape(num_batches, rows_per_batch)
    return np.concatenate([full.reshape(-1), surplus])


def _balance(sizes: list[int], order: list[int], lane_count: int) -> list[list[int]]:
    """Returns the files of each lane: the largest file goes first, to the lane with fewest rows."""
    files_of_lane: list[list[int]] = [[] for _ in range(lane_count)]
    num_rows = np.zeros(lane_count, np.int64)
    rank = {file: position for position, file in enumerate(order)}
    # The sort is stable, so files of equal size are distributed in the (shuffled) `order`.
    for file in sorted(order, key=lambda i: -sizes[i]):
        lane = int(np.argmin(num_rows))
        files_of_lane[lane].append(file)
        num_rows[lane] += sizes[file]
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
