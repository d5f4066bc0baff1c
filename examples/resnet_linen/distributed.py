"""A residual network with batch normalisation, with Flax Linen.

Reimplements the example `imagenet` of Flax: a TrainState that holds the batch statistics,
a warm-up and a cosine of the learning rate, a penalty on the weights; of handwritten digits here.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

import tpudist


class TrainState(train_state.TrainState):
    batch_stats: Any


class Block(nn.Module):
    width: int
    norm: Any
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.width, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(self.norm()(y))
        y = nn.Conv(self.width, (3, 3), use_bias=False)(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.norm()(nn.Conv(self.width, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train: bool):
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            axis_name="replica",
        )
        x = nn.relu(norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
        x = Block(self.width, norm)(x)
        x = Block(2 * self.width, norm, strides=2)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def make_state(key: jax.Array, width: int, num_steps: int) -> TrainState:
    resnet = ResNet(width)
    variables = resnet.init(key, jnp.ones((1, 8, 8, 1)), train=False)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.2, num_steps // 5, num_steps)
    return TrainState.create(
        apply_fn=resnet.apply,
        params=variables["params"],
        tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
    )


def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changes = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        penalty = sum((x**2).sum() for x in jax.tree.leaves(params) if x.ndim > 1)
        return losses.mean() + 0.5e-4 * penalty, changes["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), "replica")
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def make_batches(batch_size: int, num_steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    labels = digits.target.astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        chosen = rng.choice(len(images), batch_size, replace=False)
        yield images[chosen], labels[chosen]


def main(num_steps: int = 30, batch_size: int = 64, width: int = 8) -> list[float]:
    strategy = tpudist.MirroredStrategy()
    state = strategy.create(lambda: make_state(jax.random.key(0), width, num_steps))
    losses = []
    dataset = make_batches(batch_size, num_steps)
    dataset = strategy.experimental_distribute_dataset(dataset)
    for images, labels in dataset:
        state, loss = strategy.run(train_step, args=(state, images, labels))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
    main()
