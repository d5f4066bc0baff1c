"""The cost of `deterministic=8`: training steps on 8, 4, 2 and 1 emulated devices.

The baseline is the ordinary strategy on the same devices, which computes the same rows with one
replica per device. Both take turns, and the figure is the median of the steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

import tpudist
from benchmarks import pairs
from benchmarks.figures import Figure
from tpudist.models import TransformerConfig
from tpudist.training.steps import make_train_step

SUITE = "determinism"
NUM_REPLICAS = 8
LENGTH = 64


def figures(num_steps: int) -> list[Figure]:
    """Milliseconds per step on each number of devices."""
    config = TransformerConfig(num_layers=2, embed_dim=128, num_heads=4, mlp_dim=512)
    tasks = {
        "transformer, 16 sequences": (pairs.transformer(config, LENGTH), 16),
        "MLP, 64 rows": (pairs.mlp(), 64),
    }
    found = []
    for name, (task, num_rows) in tasks.items():
        for num_devices in (8, 4, 2, 1):
            devices = jax.devices()[:num_devices]
            ours = tpudist.MirroredStrategy(devices, deterministic=NUM_REPLICAS)
            both = [_Training(x, task, num_rows) for x in (ours, tpudist.MirroredStrategy(devices))]
            times = [[x.step() for x in both] for _ in range(num_steps)]
            medians = [statistics.median(x) * 1e3 for x in zip(*times, strict=True)]
            found.append(Figure(SUITE, name, f"ms, {num_devices} devices", *medians))
    return found


class _Training:
    def __init__(self, strategy: Any, task: pairs.Task, num_rows: int):
        self._strategy = strategy
        model = strategy.create(task.make_model)
        tx = optax.adamw(pairs.LEARNING_RATE)
        self._state = model, strategy.create(lambda model: tpudist.Optimizer(tx, model), model)
        n = strategy.num_replicas_in_sync
        rows = np.random.default_rng(0).integers(0, 256, (num_rows, *task.example.shape))
        stacked = rows.reshape(n, num_rows // n, *task.example.shape).astype(task.example.dtype)
        array = jax.device_put(stacked, strategy.replica_mesh.stacked)
        self._batch = tpudist.PerReplica(array)
        self._step = make_train_step(task.loss)
        self.step()  # compiles

    def step(self) -> float:
        """Takes one, and returns its seconds."""
        start = time.perf_counter()
        jax.block_until_ready(self._strategy.run(self._step, args=(*self._state, self._batch)))
        return time.perf_counter() - start
