"""A step of Keras' `fit` in a scope, against `keras.distribution.DataParallel` and one device.

All train the same model on the same rows in turns of one call of `fit`; a figure is the median of
the calls. Wall time is what people wait for; on a machine that does other things CPU time is the
steadier one. DataParallel cannot split 1020 rows over 8 devices; there one device is the baseline.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tpudist
from benchmarks.figures import Figure, at_most_times

SUITE = "fit of Keras"
TURNS = 7
WIDE, WIDE_STEPS = (512, 1024, 1024, 10), 8  # steps in a call of `fit`
NARROW, NARROW_STEPS = (16, 10), 128


def figures(num_turns: int = TURNS) -> list[Figure]:
    """Wall and CPU milliseconds per step."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    strategy = tpudist.MirroredStrategy()
    parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
    places: dict[str, Callable[[], Any]] = {
        "ours": strategy.scope,
        "DataParallel": parallel.scope,
        "one device": contextlib.nullcontext,
    }
    found = []
    for dims, steps, batch_sizes in (
        (WIDE, WIDE_STEPS, (1024, 1020)),
        (NARROW, NARROW_STEPS, (64,)),
    ):
        for batch_size in batch_sizes:
            for steps_per_execution in (1, 4):
                names = [x for x in places if batch_size % 8 == 0 or x != "DataParallel"]
                runs = {
                    name: _Fit(places[name], dims, steps, batch_size, steps_per_execution)
                    for name in names
                }
                subject = f"MLP {'-'.join(map(str, dims))}, batch {batch_size}"
                subject += f", steps_per_execution={steps_per_execution}"
                found += _compare(subject, runs, num_turns)
    return found


def _compare(subject: str, runs: dict[str, _Fit], num_turns: int) -> list[Figure]:
    order = list(runs)
    for _ in range(num_turns):
        for name in order:
            runs[name].fit()
        order.append(order.pop(0))
    found = []
    for quantity, times in (("wall", "wall_ms"), ("CPU", "cpu_ms")):
        medians = {name: statistics.median(getattr(run, times)) for name, run in runs.items()}
        for name in [x for x in runs if x != "ours"]:
            figure = Figure(
                SUITE,
                subject,
                f"{quantity} ms per step, against {name}",
                medians["ours"],
                medians[name],
                details={"calls_of_fit": num_turns},
            )
            with_target = name == "DataParallel" and quantity == "wall"
            found.append(at_most_times(figure, 1.05) if with_target else figure)
    return found


class _Fit:
    """One model, trained by `fit` again and again."""

    def __init__(
        self,
        scope: Callable[[], Any],
        dims: tuple[int, ...],
        steps: int,
        batch_size: int,
        steps_per_execution: int,
    ):
        import keras

        rng = np.random.default_rng(0)
        self._scope, self._steps, self._batch_size = scope, steps, batch_size
        self._x = rng.normal(size=(steps * batch_size, dims[0])).astype(np.float32)
        self._y = rng.integers(0, dims[-1], steps * batch_size).astype(np.int32)
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []
        keras.utils.set_random_seed(0)
        with scope():
            inner = [keras.layers.Dense(size, "relu") for size in dims[1:-1]]
            layers = [keras.layers.Input((dims[0],)), *inner, keras.layers.Dense(dims[-1])]
            self._model = keras.Sequential(layers)
            self._model.compile(
                "sgd",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=steps_per_execution,
            )
        self.fit()  # compiles
        self.wall_ms.clear()
        self.cpu_ms.clear()

    def fit(self) -> None:
        """Notes what a step of a call took."""
        with self._scope():
            wall, cpu = time.perf_counter(), time.process_time()
            self._model.fit(self._x, self._y, batch_size=self._batch_size, shuffle=False, verbose=0)
            self.wall_ms.append((time.perf_counter() - wall) / self._steps * 1e3)
            self.cpu_ms.append((time.process_time() - cpu) / self._steps * 1e3)
