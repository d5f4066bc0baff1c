"""A custom step over a Keras model in `strategy.run`, against the same by hand.

By hand is a function under `jax.jit` over Keras' stateless methods, of replicated state, which is
donated, and a batch that is split over the devices. Both train the same model on the same rows in
turns; a figure is the median of the turns.
"""

from __future__ import annotations

import abc
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tpudist
from benchmarks.figures import Figure, at_most_times

SUITE = "steps over Keras models"
TURNS = 15
# Dims of the model, rows of a batch, steps in a turn.
CASES = (((512, 1024, 1024, 10), 1024, 4), ((16, 10), 64, 100))


def figures(num_turns: int = TURNS) -> list[Figure]:
    """Wall and CPU milliseconds per step."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    found = []
    for dims, batch_size, num_steps in CASES:
        runs = {"ours": _InReplicas(dims, batch_size), "by hand": _ByHand(dims, batch_size)}
        order = list(runs)
        for _ in range(num_turns):
            for name in order:
                runs[name].turn(num_steps)
            order.reverse()
        np.testing.assert_allclose(*(run.step() for run in runs.values()), rtol=1e-3)
        for quantity, times in (("wall", "wall_ms"), ("CPU", "cpu_ms")):
            ours, by_hand = (statistics.median(getattr(run, times)) for run in runs.values())
            figure = Figure(
                SUITE,
                f"MLP {'-'.join(map(str, dims))}, batch {batch_size}",
                f"{quantity} ms per step, against by hand",
                ours,
                by_hand,
                details={"turns": num_turns},
            )
            found.append(at_most_times(figure, 1.1) if quantity == "wall" else figure)
    return found


class _Steps(abc.ABC):
    """A model, an optimizer and a metric, made in the scope of a strategy, and rows."""

    def __init__(self, dims: tuple[int, ...], batch_size: int):
        import keras

        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(batch_size, dims[0])).astype(np.float32)
        self.y = rng.integers(0, dims[-1], batch_size).astype(np.int32)
        self.strategy = tpudist.MirroredStrategy()
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []
        keras.utils.set_random_seed(0)
        with self.strategy.scope():
            inner = [keras.layers.Dense(size, "relu") for size in dims[1:-1]]
            layers = [keras.layers.Input((dims[0],)), *inner, keras.layers.Dense(dims[-1])]
            self.model = keras.Sequential(layers)
            self.optimizer = keras.optimizers.Adam(1e-3)
            self.optimizer.build(self.model.trainable_variables)
            self.mean = keras.metrics.Mean()
        self.losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.prepare()
        self.step()  # compiles

    @abc.abstractmethod
    def prepare(self) -> None:
        """Places all variables on the devices that compute with them."""

    @abc.abstractmethod
    def step(self) -> Any:
        """Makes one; the mean loss of all steps so far, in a form that `float` takes."""

    def turn(self, num_steps: int) -> None:
        """Notes what a step took."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            last = self.step()
        jax.block_until_ready(last)
        self.wall_ms.append((time.perf_counter() - wall) / num_steps * 1e3)
        self.cpu_ms.append((time.process_time() - cpu) / num_steps * 1e3)


class _InReplicas(_Steps):
    """The step of docs/keras_fit.md."""

    def prepare(self) -> None:
        """Distributes the rows."""
        dataset = tpudist.NumpyDataset((self.x, self.y)).batch(len(self.x))
        self._batch = next(iter(self.strategy.experimental_distribute_dataset(dataset)))

    def step(self) -> Any:
        """One step."""
        self.strategy.run(self._train, args=self._batch)
        return self.mean.total._value / self.mean.count._value

    def _train(self, x, y):
        def compute_loss():
            losses = self.losses(y, self.model(x, training=True))
            return tpudist.compute_average_loss(losses), losses

        compute = tpudist.keras.value_and_grad(compute_loss, self.model, has_aux=True)
        (_, losses), gradients = compute()
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.mean.update_state(losses)


class _ByHand(_Steps):
    """State in and out of a function under `jax.jit`."""

    def prepare(self) -> None:
        """Places the state and the rows."""
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        rows = jax.NamedSharding(mesh, jax.P("data"))
        whole = jax.NamedSharding(mesh, jax.P())
        parts = (self.model.trainable_variables, self.optimizer.variables, self.mean.variables)
        state = [[jnp.copy(v.value) for v in part] for part in parts]
        self._state = jax.device_put(state, whole)
        self._batch = jax.device_put((self.x, self.y), rows)
        self._train = jax.jit(self._compute, donate_argnums=0)

    def step(self) -> Any:
        """One step."""
        self._state = self._train(self._state, *self._batch)
        return self._state[2][0] / self._state[2][1]

    def _compute(self, state, x, y):
        weights, slots, counts = state

        def compute_loss(weights):
            logits, _ = self.model.stateless_call(weights, [], x, training=True)
            losses = self.losses(y, logits)
            return losses.mean(), losses

        (_, losses), gradients = jax.value_and_grad(compute_loss, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return [weights, slots, self.mean.stateless_update_state(counts, losses)]
