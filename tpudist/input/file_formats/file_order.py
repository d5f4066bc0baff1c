"""In which order the records of some files are read so that each process needs few of the files.

Arithmetic only. A batch is cut in *lanes* of equally many rows, and each file belongs to one lane,
so a process, which reads the same rows of every batch, reads the files of their lanes. Nothing here
knows how many processes there are: the order is a function of seed, epoch and global batch size.
"""

from collections.abc import Sequence

import numpy as np


def num_lanes(num_files: int, global_batch_size: int) -> int:
    """The largest divisor of the batch size that is at most the number of files."""
    return next(
        n for n in range(min(num_files, global_batch_size), 0, -1) if global_batch_size % n == 0
    )


def order_in_lanes(
    files: Sequence[np.ndarray], global_batch_size: int, rng: np.random.Generator | None
) -> np.ndarray:
    """The rows of all files in an order of which each batch takes as many from every lane.

    Lanes get files until they are as equal as whole files make them; what the longer ones have too
    much fills up the shorter ones at their end, and then the last batch. Each row is there once.

    Args:
        files: The rows of each file, in the order in which it is read.
        global_batch_size: Rows of a batch.
        rng: Shuffles the files; None to leave them in sequence.

    Returns:
        Integers `[rows]`.
    """
    files = [rows for rows in files if len(rows)]
    lanes = num_lanes(len(files), global_batch_size)
    each = global_batch_size // lanes
    num_batches = sum(map(len, files)) // global_batch_size
    wanted = num_batches * each
    order = list(range(len(files))) if rng is None else rng.permutation(len(files)).tolist()
    sequences = [
        np.concatenate([files[i] for i in lane] or [np.zeros(0, np.int64)])
        for lane in _balance([len(x) for x in files], order, lanes)
    ]
    # There are `wanted` rows for each lane, and those of the last batch: what some lanes have above
    # that is enough for what others lack.
    spare = np.concatenate([sequence[wanted:] for sequence in sequences])
    full = np.empty((num_batches, lanes, each), np.int64)
    for lane, sequence in enumerate(sequences):
        missing = max(wanted - len(sequence), 0)
        rows = np.concatenate([sequence[:wanted], spare[:missing]])
        spare = spare[missing:]
        full[:, lane] = rows.reshape(num_batches, each)
    return np.concatenate([full.reshape(-1), spare])


def _balance(sizes: list[int], order: list[int], lanes: int) -> list[list[int]]:
    """The files of each lane: the largest first, each to the lane that has least so far."""
    found: list[list[int]] = [[] for _ in range(lanes)]
    filled = np.zeros(lanes, np.int64)
    rank = {file: position for position, file in enumerate(order)}
    for file in sorted(order, key=lambda i: -sizes[i]):  # stable: equals as they are in `order`
        lane = int(np.argmin(filled))
        found[lane].append(file)
        filled[lane] += sizes[file]
    return [sorted(lane, key=rank.__getitem__) for lane in found]


def shuffle_in_blocks(rows: np.ndarray, ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The rows of a file, shuffled so that those of a block of it are read together.

    Args:
        rows: Integers `[rows]`.
        ends: Where each block ends in them, integers `[blocks]`.
        rng: Shuffles the blocks, and the rows of each.
    """
    blocks = np.split(rows, ends[:-1])
    if len(blocks) == 1:
        return rng.permutation(rows)
    return np.concatenate([rng.permutation(blocks[i]) for i in rng.permutation(len(blocks))])
