"""A batch in memory onto the replicas, against `jax.device_put` with the same sharding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import tpudist
from benchmarks.figures import Figure, at_most_times

NUM_TURNS = 300


def figures(strategy: tpudist.Strategy, suite: str) -> Iterator[Figure]:
    """CPU time of the process until the batch is on the replicas. The ways take turns."""
    n, sharding = strategy.num_replicas_in_sync, strategy.replica_mesh.stacked
    tokens = np.random.default_rng(0).integers(256, size=(8 * n, 1024)).astype(np.int32)
    parts = tokens.reshape(n, 8, 1024)
    ways: dict[str, Callable[[], Any]] = {
        "device_put": lambda: jax.device_put(tokens.reshape(parts.shape), sharding),
        "one batch": lambda: strategy.distribute_batch(tokens),
        "one batch of a pmap program": lambda: strategy.distribute_batch(
            parts, has_device_dim=True
        ),
        "one value for each replica": lambda: strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_TURNS):
        for name, place in ways.items():
            begun = time.process_time()
            jax.block_until_ready(place())
            times[name].append(1e6 * (time.process_time() - begun))
    by_hand = statistics.median(times.pop("device_put"))
    for name, own in times.items():
        figure = Figure(
            suite,
            f"{name}, {n} replicas",
            "us of CPU time, against device_put",
            statistics.median(own),
            by_hand,
        )
        yield at_most_times(figure, 1.1)
