"""Section "numbers": steps on the devices equal one device, and one device equals the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.cli.accelerator.item import Figures, Item
from tpudist.gradients.losses import compute_average_loss
from tpudist.gradients.optimizer import Optimizer
from tpudist.strategies.mirrored import MirroredStrategy
from tpudist.strategies.one_device import OneDeviceStrategy
from tpudist.strategies.tpu import TPUStrategy
from tpudist.strategy.strategy import Strategy

TOLERANCE = 2e-3
"""Largest relative distance of weights from those of the CPU after `STEPS` steps in float32.

It is larger than the rounding of one step: Adam divides a gradient by its own size, so each step
amplifies the rounding of small gradients.
"""
STEPS = 5
ROWS, WIDTH = 52, 16  # 52 rows: a partial batch on 8 replicas


def make_items(devices: Sequence[jax.Device]) -> list[Item]:
    """Returns a check of each step under each strategy that fits the devices."""
    strategies: dict[str, Callable[[], Strategy]] = {
        # Functions, so that a strategy that cannot be created fails its items, and not the section.
        "MirroredStrategy": lambda: MirroredStrategy(devices),
        "OneDeviceStrategy": lambda: OneDeviceStrategy(devices[0]),
    }
    number = len(devices)
    if number > 1:
        strategies[f"TPUStrategy(fsdp={number})"] = lambda: _make_split(devices, number)
    # Half of the devices inside a replica: then both axes of the mesh have more than one device.
    if number > 3 and number % 2 == 0:
        strategies[f"TPUStrategy(fsdp={number // 2})"] = lambda: _make_split(devices, number // 2)
    steps = {"mean loss": _make_regression, "network": _make_network, "sums": _make_sums}
    items = [
        Item(f"{step} on {name}", functools.partial(_verify, strategy, make))
        for (name, strategy), (step, make) in itertools.product(strategies.items(), steps.items())
    ]
    items += [
        Item(f"training on {name} against the CPU", functools.partial(_compare_with_cpu, strategy))
        for name, strategy in strategies.items()
    ]
    return items


def _make_split(devices: Sequence[jax.Device], fsdp: int) -> Strategy:
    return TPUStrategy(replica_axes={"fsdp": fsdp}, devices=list(devices))


def _verify(make_strategy: Callable[[], Strategy], make_step: Callable[[Strategy], Any]) -> Figures:
    strategy = make_strategy()
    # TPUs multiply float32 in bfloat16 by default, and the order of sums over devices would then
    # show as an error.
    with jax.default_matmul_precision("highest"):
        step, args = make_step(strategy)
        report = strategy.verify(step, args=args)
    return {"ok": report.ok, "report": str(report)}


def _rows(strategy: Strategy, count: int = ROWS) -> PyTree:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    data = strategy.experimental_make_numpy_dataset({"x": x, "y": x.sum(1, keepdims=True)})
    return next(iter(strategy.experimental_distribute_dataset(data.batch(count))))


def _make_regression(strategy: Strategy) -> Any:
    linear = functools.partial(nnx.Linear, WIDTH, 1)
    return _make_training(strategy, linear, optax.sgd(0.05))


def _make_network(strategy: Strategy) -> Any:
    return _make_training(strategy, _Network, optax.adam(0.01))


def _make_training(
    strategy: Strategy, make_model: Callable[..., Any], transform: optax.GradientTransformation
) -> Any:
    """Returns a training step, and its arguments."""
    with strategy.scope():
        model = make_model(rngs=nnx.Rngs(0))
        optimizer = Optimizer(transform, model)

    def step(model: PyTree, optimizer: Optimizer, batch: PyTree) -> jax.Array:
        def loss_fn(model: PyTree) -> jax.Array:
            return compute_average_loss(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer, _rows(strategy))


class _Network(nnx.Module):
    """Two layers, layer normalization and attention over the features: what models are made of."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * WIDTH, rngs=rngs)
        self.last = nnx.Linear(4 * WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.gelu(self.norm(self.first(x)))
        heads = x.reshape(len(x), 4, WIDTH)
        heads = jax.nn.dot_product_attention(
            heads[:, :, None], heads[:, :, None], heads[:, :, None]
        )
        return self.last(x + heads.reshape(x.shape))


def _make_sums(strategy: Strategy) -> Any:
    def step(weights: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        total = jax.lax.psum((batch["x"] @ weights).sum(0), "replica")
        count = jax.lax.psum(jnp.float32(len(batch["x"])), "replica")
        return weights + total / count, total

    return step, (jnp.ones((WIDTH, 8)), _rows(strategy))


def _compare_with_cpu(make_strategy: Callable[[], Strategy]) -> Figures:
    """Trains a network on the devices and on one CPU device, and compares the weights."""
    with jax.default_matmul_precision("highest"):
        weights = _train(make_strategy())
        expected = _train(OneDeviceStrategy(jax.devices("cpu")[0]))
    scale = max(float(np.abs(x).max()) for x in expected)
    # `np.max` keeps NaN; Python's `max` of several leaves may lose it, and the check would pass.
    distances = [np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)]
    distance = float(np.max(distances))
    distance = distance / scale if np.isfinite(distance) else float("inf")
    return {"ok": distance <= TOLERANCE, "relative_distance": distance, "tolerance": TOLERANCE}


def _train(strategy: Strategy) -> list[np.ndarray]:
    step, args = _make_network(strategy)
    for _ in range(STEPS):
        strategy.run(step, args=args)
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(args[0]))]
