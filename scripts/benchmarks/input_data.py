"""Data of the input benchmark, and the loop that consumes them.

NumPy only: the Python that has TensorFlow need not have JAX.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_DEVICES = 8
# A loop keeps its last elements, like steps in flight, and waits for the oldest: so no loop runs
# further ahead of its copies than another.
NUM_HELD = 2
# How many batches each pipeline makes ahead, as tpudist does. More would all be made before the
# clock starts.
NUM_AHEAD = 2


@dataclass(frozen=True)
class Case:
    """Examples in memory, and how they are read."""

    name: str
    shape: tuple[int, ...]
    """Shape of one example."""
    dtype: str
    batch_size: int
    num_batches: int
    """Number of batches in one pass."""
    num_slow_batches: int
    """Number of batches that suffice for a pipeline that processes single examples."""

    def examples(self) -> np.ndarray:
        """The examples, the same in each process."""
        num_examples = self.batch_size * self.num_batches
        high = np.iinfo(np.dtype(self.dtype)).max
        return np.random.default_rng(0).integers(
            high, size=(num_examples, *self.shape), dtype=self.dtype
        )


CASES = (
    Case("28x28 uint8, batch 128", (28, 28), "uint8", 128, 500, 25),
    Case("1025 int32, batch 16", (1025,), "int32", 16, 500, 100),
    Case("1025 int32, batch 64", (1025,), "int32", 64, 400, 50),
    Case("224x224x3 uint8, batch 64", (224, 224, 3), "uint8", 64, 24, 12),
    Case("224x224x3 uint8, batch 256", (224, 224, 3), "uint8", 256, 6, 6),
)


def batches_per_s(elements: Iterable[Any], wait: Callable[[Any], Any]) -> float:
    """Returns the elements per second of an empty loop, from the second element on."""
    held: collections.deque[Any] = collections.deque()
    num_elements, start = -1, 0.0
    for element in elements:
        held.append(element)
        num_elements += 1
        if not num_elements:
            wait(element)
            start = time.perf_counter()
        elif len(held) > NUM_HELD:
            wait(held.popleft())
    for element in held:
        wait(element)
    return num_elements / (time.perf_counter() - start)
