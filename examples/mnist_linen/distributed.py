"""Handwritten digits with Flax Linen.

Reimplements the example `mnist` of Flax: two convolutions, momentum, a TrainState.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import tpudist


class CNN(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(2 * self.width, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((len(x), -1))
        x = nn.relu(nn.Dense(4 * self.width)(x))
        return nn.Dense(10)(x)


def make_state(key: jax.Array, width: int) -> TrainState:
    cnn = CNN(width)
    params = cnn.init(key, jnp.ones((1, 8, 8, 1)))["params"]
    tx = optax.sgd(0.05, momentum=0.9)
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)


def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, accuracy, grads = jax.lax.pmean((loss, accuracy, grads), "replica")
    return state.apply_gradients(grads=grads), loss, accuracy


def make_batches(batch_size: int, num_steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    labels = digits.target.astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        chosen = rng.choice(len(images), batch_size, replace=False)
        yield images[chosen], labels[chosen]


def main(num_steps: int = 60, batch_size: int = 128, width: int = 16) -> list[float]:
    strategy = tpudist.MirroredStrategy()
    state = strategy.create(lambda: make_state(jax.random.key(0), width))
    losses = []
    dataset = make_batches(batch_size, num_steps)
    dataset = strategy.experimental_distribute_dataset(dataset)
    for images, labels in dataset:
        state, loss, accuracy = strategy.run(train_step, args=(state, images, labels))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {float(accuracy):.2f}")
    return losses


if __name__ == "__main__":
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
    main()
