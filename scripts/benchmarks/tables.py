"""Tables of rows by id on one host: what a shard does per second, against NumPy by hand.

The baseline of lookups is a dict of Python's; that of the rest knows the rows of the ids already,
and changes an array of NumPy's in place. Both take turns, and the figure is the median. Gradients
are NumPy's, which XLA copies; arrays that were JAX's are not copied. Turns by hand take the cache,
so updates are also timed one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.figures import Figure, at_least_times
from tpudist.ps.tables.id_map import IdMap
from tpudist.ps.tables.row_duplicates import sum_duplicates
from tpudist.ps.tables.row_touches import RowTouches
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_shard import TableShard

SUITE = "tables"
DIM, NUM_IDS, NUM_ZIPF, REPEATS, NUM_CALLS = 64, 50_000, 200_000, 9, 40
MOST_IDS_IN_DICT = 1_000_000


def figures(num_rows: int) -> Iterator[Figure]:
    """Millions of ids or rows per second, in a table of `num_rows`."""
    random = np.random.default_rng(0)
    ids = random.permutation(np.unique(random.integers(-(1 << 63), 1 << 63, num_rows)))
    some = random.choice(ids, min(NUM_IDS, num_rows), replace=False)
    subject = f"{num_rows:,} rows of {DIM} float32"
    options = TableOptions(dim=DIM, optimizer=rowwise_adagrad(0.1), capacity=num_rows)
    yield from _of_ids(subject, ids)
    shard = TableShard(options)
    seconds = -time.perf_counter()
    for part in np.array_split(ids, NUM_CALLS):
        shard.pull(part)
    seconds += time.perf_counter()
    yield Figure(SUITE, subject, "M rows/s created", num_rows / seconds / 1e6, None)

    table, sums = shard.state()["rows"], np.full(num_rows, 0.1, np.float32)
    rows = random.permutation(num_rows)[: len(some)]
    gradients = random.normal(size=(len(some), DIM)).astype(np.float32)

    def push_by_hand() -> None:
        sums[rows] += np.einsum("ij,ij->i", gradients, gradients) / DIM
        table[rows] -= (0.1 / np.sqrt(sums[rows]))[:, None] * gradients

    pulls = (lambda: shard.pull(some)), (lambda: np.take(table, rows, 0))
    yield _rate(subject, "M rows/s pulled", len(some), *pulls)
    pushes = (lambda: shard.push(some, gradients)), push_by_hand
    pushed = _rate(subject, "M rows/s pushed, Adagrad by row", len(some), *pushes)
    yield at_least_times(pushed, 2.0)
    in_a_row = statistics.median(_seconds(pushes[0]) for _ in range(REPEATS))
    quantity = "M rows/s pushed, Adagrad by row, in a row"
    yield Figure(SUITE, subject, quantity, len(some) / in_a_row / 1e6, None)
    yield from _of_duplicates(num_rows, random)


def _of_ids(subject: str, ids: np.ndarray) -> Iterator[Figure]:
    few = ids[:MOST_IDS_IN_DICT]
    maps, dicts = [], []

    def add() -> None:
        maps.append(IdMap())
        for part in np.array_split(ids, NUM_CALLS):
            maps[-1].find_or_add(part)

    seconds = _seconds(add)
    in_dict = _seconds(lambda: dicts.append({i: row for row, i in enumerate(few.tolist())}))
    rates = len(ids) / seconds / 1e6, len(few) / in_dict / 1e6
    yield Figure(SUITE, subject, "M ids/s added; a dict", *rates)
    some = np.random.default_rng(1).choice(few, min(NUM_IDS, len(few)), replace=False)
    finds = (lambda: maps[0].find(some)), (lambda: [dicts[0][i] for i in some.tolist()])
    found = _rate(subject, "M ids/s found; a dict", len(some), *finds)
    yield at_least_times(found, 4.0)


def _of_duplicates(num_rows: int, random: np.random.Generator) -> Iterator[Figure]:
    rows = (np.minimum(random.zipf(1.2, size=NUM_ZIPF), num_rows) - 1).astype(np.int32)
    gradients = random.normal(size=(NUM_ZIPF, DIM)).astype(np.float32)
    touches = RowTouches(num_rows)

    def merge() -> None:
        last, which = touches.touch_each(rows, 1)
        sum_duplicates(gradients, which, len(last))

    def merge_by_hand() -> None:
        order = np.argsort(rows, kind="stable")
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        np.add.reduceat(gradients[order], starts)

    subject = f"{NUM_ZIPF:,} gradients for {len(np.unique(rows)):,} different rows"
    merged = _rate(subject, "M rows/s summed", NUM_ZIPF, merge, merge_by_hand)
    yield at_least_times(merged, 4.0)


def _rate(subject: str, quantity: str, num: int, *both: Callable[[], object]) -> Figure:
    times = [[_seconds(call) for call in both] for _ in range(REPEATS + 1)][1:]
    medians = [num / statistics.median(x) / 1e6 for x in zip(*times, strict=True)]
    return Figure(SUITE, subject, quantity, *medians)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
