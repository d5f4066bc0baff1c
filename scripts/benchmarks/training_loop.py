"""The overhead of `tpudist.training.train` around a step, against a hand-written loop.

The loop by hand takes batches from the same dataset, runs the same step, and reads the loss of the
step before the last one, as a careful program does. Compared is the CPU time of the loop's thread:
the rest is the devices', and here these are threads of the same cores. Both take turns, and the
least of several turns counts.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

import tpudist
from benchmarks.figures import Figure, at_most_more
from tpudist.training.loop import train
from tpudist.training.steps import make_train_step

SUITE = "training loop"
MAX_EXTRA_MS = 0.1
TURNS = 5


def figures(num_steps: int) -> list[Figure]:
    """The figures of loops of `num_steps` steps."""
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda: tpudist.Optimizer(optax.sgd(0.01), model))
    update = make_train_step(lambda model, batch: ((model(batch["x"]) - 1) ** 2).sum(-1))

    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        return {"loss": update(model, optimizer, batch)}

    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    data = [{"x": x}] * 50

    def by_hand() -> None:
        dataset = strategy.experimental_distribute_dataset(data)
        done, losses, under_way = 0, [], deque()
        while done < num_steps:
            for batch in dataset:
                under_way.append(strategy.run(step, args=(model, optimizer, batch))["loss"])
                if len(under_way) > 2:
                    losses.append(float(under_way.popleft()))
                done += 1
                if done == num_steps:
                    break

    def ours(**options: Any) -> Callable[[], None]:
        def run() -> None:
            train(strategy, step, (model, optimizer), data, num_steps=num_steps, **options)

        return run

    def with_folder() -> None:
        with tempfile.TemporaryDirectory() as folder:
            ours(progress=False, folder=Path(folder))()

    loops = {
        "by hand": by_hand,
        "quiet": ours(progress=False),
        "with metrics.jsonl, events and a checkpoint": with_folder,
    }
    for loop in loops.values():  # compiles
        loop()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TURNS):
        for name, loop in loops.items():
            begun_s = time.thread_time()
            loop()
            times[name].append((time.thread_time() - begun_s) * 1000 / num_steps)
    least = {name: min(found) for name, found in times.items()}
    subject = f"train of {num_steps:,} small steps, 8 devices"
    return [
        _figure(f"{subject}, {name}", took, least["by hand"], has_target=name == "quiet")
        for name, took in least.items()
        if name != "by hand"
    ]


def _figure(subject: str, ours_ms: float, by_hand_ms: float, *, has_target: bool) -> Figure:
    figure = Figure(
        SUITE, subject, "ms of the thread per step", ours_ms, by_hand_ms, by_difference=True
    )
    return at_most_more(figure, MAX_EXTRA_MS) if has_target else figure
