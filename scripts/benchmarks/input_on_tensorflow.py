"""The input benchmark's loops on tf.data and MirroredStrategy's distributed dataset; prints JSON.

Run as a script, by a Python that has TensorFlow. As many logical CPU devices as tpudist emulates.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from input_data import CASES, NUM_AHEAD, NUM_DEVICES, Case, batches_per_s

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(num_passes: int) -> None:
    """Prints the batches per second of each case, in order and shuffled."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM_DEVICES)])
    found = {}
    for case in CASES:
        examples = case.examples()
        for shuffled in (False, True):
            dataset = strategy.experimental_distribute_dataset(
                _dataset(tf, case, examples, shuffled)
            )
            rates = [batches_per_s(_elements(dataset), _wait) for _ in range(num_passes + 1)]
            found[f"{case.name}, {shuffled}"] = statistics.median(rates[1:])
    print(json.dumps(found))


def _dataset(tf: Any, case: Case, examples: Any, shuffled: bool) -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(examples)
    if shuffled:
        dataset = dataset.shuffle(len(examples), seed=0)
    dataset = dataset.batch(case.batch_size, drop_remainder=True)
    return dataset.take(case.num_slow_batches).prefetch(NUM_AHEAD)


def _elements(dataset: Any) -> Iterator[Any]:
    yield from dataset


def _wait(element: Any) -> None:
    """Eager tensors are there when they are given."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
