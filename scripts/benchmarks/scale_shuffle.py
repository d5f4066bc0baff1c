"""Cost of a shuffle of many rows: CPU time per row and until the first batch, and memory."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

import tpudist
from benchmarks.figures import Figure, at_most
from tpudist.input import permutation

SUITE = "shuffles of more rows"
NUM_ROWS = (10**6, 10**9, 10**10)
BATCH = 1024
NUM_BATCHES = 2000
# The baseline, an array of all rows, is measured up to this many: at 10^9 it needs 8 GB.
_MAX_BASELINE = 10**6
_MAX_NS, _MAX_MS, _MAX_BYTES = 300, 10, 1 << 20


def figures() -> Iterator[Figure]:
    """CPU time per row, CPU time until the first batch, and bytes, for each number of rows."""
    ns_per_row = {}
    for num_rows in NUM_ROWS:
        subject = f"{num_rows:.0e} rows, batches of {BATCH}"
        ns = ns_per_row[num_rows] = _ns_per_row(num_rows)
        array_ns = array_bytes = None
        if num_rows <= _MAX_BASELINE:
            start = time.process_time()
            order = permutation.shuffle_in_memory(num_rows, 0, 0)
            array_ns = (time.process_time() - start) * 1e9 / num_rows
            array_bytes = order.nbytes
        quantity = "order, ns of CPU per row (an array)"
        yield at_most(Figure(SUITE, subject, quantity, ns, array_ns), _MAX_NS)
        first_ms = _first_batch_ms(num_rows)
        quantity = "dataset until its first batch, ms of CPU"
        yield at_most(Figure(SUITE, subject, quantity, first_ms, None), _MAX_MS)
        peak = _peak_bytes(num_rows)
        figure = Figure(SUITE, subject, "order, bytes (an array)", peak, array_bytes)
        yield at_most(figure, _MAX_BYTES)
    few, many = NUM_ROWS[0], NUM_ROWS[-1]
    exponent = math.log(ns_per_row[many] / ns_per_row[few]) / math.log(many / few)
    subject = f"{few:.0e} to {many:.0e} rows"
    yield at_most(Figure(SUITE, subject, "exponent of CPU per row", exponent, None), 0.1)


def _read_batches(num_rows: int) -> None:
    order = permutation.shuffle(num_rows, 0, 0)
    for i in range(NUM_BATCHES):
        start = i * BATCH % (num_rows - BATCH)
        order[start : start + BATCH]


def _ns_per_row(num_rows: int) -> float:
    start = time.process_time()
    _read_batches(num_rows)
    return (time.process_time() - start) * 1e9 / (NUM_BATCHES * BATCH)


def _peak_bytes(num_rows: int) -> int:
    tracemalloc.start()
    try:
        _read_batches(num_rows)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _first_batch_ms(num_rows: int) -> float:
    """From the arrays to the first batch on the devices, without the compilation of programs."""
    strategy = tpudist.MirroredStrategy()
    times = []
    for _ in range(4):  # the first one loads modules
        start = time.process_time()
        rows = np.broadcast_to(np.float32(1), (num_rows,))
        dataset = strategy.experimental_make_numpy_dataset(rows).shuffle(seed=0).batch(BATCH)
        iterator = iter(strategy.experimental_distribute_dataset(dataset.repeat(2)))
        next(iterator)
        times.append(time.process_time() - start)
        iterator.close()
    return min(times) * 1e3
