"""The order by files: lanes of few files, computed for the rows that are read."""

import numpy as np
from hypothesis import given, strategies as st

from tpudist.input import permutation
from tpudist.input.file_formats import file_order
from tpudist.input.file_formats.file_order import FileOrder


def file_order_of(lengths, size, seed=None):
    """Returns the order of files, and the same orders of files and of their rows as arrays."""
    lengths = np.array(lengths)
    files = permutation.shuffle_part(np.count_nonzero(lengths), seed or 0, 0, (0,))

    def rows(file):
        return permutation.shuffle_part(int(lengths[file]), seed or 0, 0, (1, file))

    if seed is None:
        files, rows = None, None
    return FileOrder(lengths, size, files, rows), files, rows


def concatenate_lanes(lengths, size, files, rows):
    """Returns the same order in memory, step by step: lanes, and the surplus that fills them up."""
    starts = np.cumsum(lengths) - lengths
    parts = [
        start + (np.arange(length) if rows is None else rows(file)[np.arange(length)])
        for file, (start, length) in enumerate(zip(starts, lengths, strict=True))
        if length
    ]
    order = range(len(parts)) if files is None else files.tolist()
    num_lanes = file_order.num_lanes(len(parts), size)
    lanes = [[] for _ in range(num_lanes)]
    rank = {file: position for position, file in enumerate(order)}
    for file in sorted(order, key=lambda i: -len(parts[i])):
        counts = [sum(len(parts[i]) for i in lane) for lane in lanes]
        lanes[counts.index(min(counts))].append(file)
    sequences = [
        np.concatenate([parts[i] for i in sorted(lane, key=rank.__getitem__)]).tolist()
        for lane in lanes
    ]
    num_full = sum(lengths) // size * (size // num_lanes)
    surplus = sum((sequence[num_full:] for sequence in sequences), [])
    for lane in sequences:
        del lane[num_full:]
        while len(lane) < num_full:
            lane.append(surplus.pop(0))
    full = np.reshape(sequences, (num_lanes, -1, size // num_lanes)).swapaxes(0, 1)
    return [*full.reshape(-1).tolist(), *surplus]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum),
    st.integers(1, 24),
    st.none() | st.integers(0, 3),
)
def test_the_order_by_files_has_every_row_once_and_lanes_of_few_files(lengths, size, seed):
    ends = np.cumsum(lengths)
    lazy, files, rows = file_order_of(lengths, size, seed)
    order = lazy[np.arange(ends[-1])]
    assert order.tolist() == concatenate_lanes(lengths, size, files, rows)
    assert sorted(order.tolist()) == list(range(ends[-1]))
    num_files = sum(length > 0 for length in lengths)
    lanes = file_order.num_lanes(num_files, size)
    assert size % lanes == 0
    assert lanes <= num_files
    # Until the shortest lane is used up, every lane reads one file after the other.
    full = order[: len(order) // size * size].reshape(-1, lanes, size // lanes)
    changes = sum(
        np.count_nonzero(np.diff(np.searchsorted(ends, full[:, lane].reshape(-1), side="right")))
        for lane in range(lanes)
    )
    # Each file begins once in its lane, and once more for each lane that its end fills up.
    assert changes <= 2 * (num_files + lanes)
    # A row does not depend on the rows that are read with it.
    some = np.random.default_rng(0).integers(0, len(lazy), (2, 3))
    np.testing.assert_array_equal(file_order_of(lengths, size, seed)[0][some], order[some])
    assert lazy[some[0, 0]] == order[some[0, 0]]
    assert lazy[3:7].tolist() == order[3:7].tolist()


def test_files_of_equal_length_are_read_by_one_half_of_the_batch_each():
    order = file_order_of([8] * 8, 8, seed=0)[0][np.arange(64)].reshape(-1, 2, 4) // 8
    first, second = set(order[:, 0].flat), set(order[:, 1].flat)
    assert not first & second
    assert len(first) == len(second) == 4


def test_the_order_by_files_of_ten_billion_rows_stores_only_blocks_of_its_files():
    """An array of all rows would have 80 GB."""
    num_rows = 10**10 // 1024
    order, _, _ = file_order_of([num_rows] * 1024, 256, seed=0)
    assert len(order) == 1024 * num_rows
    last = len(order) // 256 - 1
    for batch in (0, 1, last // 2, last):
        rows = order[256 * batch : 256 * (batch + 1)]
        assert len({*(rows // num_rows).tolist()}) == 256  # one of each lane
    # Of each lane, three files were read.
    orders = order._rows_of_lanes._orders
    assert orders.num_bytes == 3 * 256 << 16
    assert max(len(x._block[1]) for x, _ in orders._values.values()) <= 8192
    for i in range(0, 1024 * num_rows, num_rows):  # other rows of all files
        order[i : i + 1]
    assert orders.num_bytes <= 1 << 26
