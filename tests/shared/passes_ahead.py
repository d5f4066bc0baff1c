"""Simulated processes that read batches ahead of their loops."""

import itertools
import threading
import time

import numpy as np

from benchmarks.counting_service import run


def count_ahead(begin, sizes, per_step=1, delay_s=0.0):
    """Returns the most batches that each of two processes reads before its loop takes them.

    Args:
        begin: Called with a process and its dataset; returns the parts of a pass.
        sizes: Number of values of each batch.
        per_step: Number of batches of a step in each process.
        delay_s: Seconds that process 1 needs for a batch.
    """
    num_read = [0, 0]

    def read(process):
        for size in sizes:
            num_read[process] += 1
            if process:
                time.sleep(delay_s)
            yield np.zeros(size)

    def program(process):
        parts = begin(process, lambda: read(process))
        return max(num_read[process] - i * per_step for i, _ in enumerate(parts, 1))

    return run(2, program).results


def check_that_threads_end(make_pass):
    """Closes a long pass of two processes early; `make_pass` is called with the process."""

    def program(process):
        elements = make_pass(process)
        for _ in itertools.islice(elements, 100):
            pass
        elements.stop.set()
        elements.parts.close()

    before = set(threading.enumerate())
    run(2, program)
    assert not {x for x in threading.enumerate() if x.name == "tpudist-prefetch"} - before
