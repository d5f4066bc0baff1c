"""Classifies the direction of spirals, with Equinox.

Reimplements the example `train_rnn` of Equinox: a recurrent network reads the points of a
spiral one after another, and predicts whether it turns left or right.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import os
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist

optimizer = optax.adam(1e-2)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, width: int, *, key: jax.Array):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, width, key=first)
        self.linear = eqx.nn.Linear(width, "scalar", key=second)

    def __call__(self, points):
        def read(hidden, point):
            return self.cell(point, hidden), None

        hidden, _ = jax.lax.scan(read, jnp.zeros(self.cell.hidden_size), points)
        return self.linear(hidden)


def make_model(key: jax.Array, width: int) -> RNN:
    return RNN(width, key=key)


def compute_loss(model, points, labels):
    logits = jax.vmap(model)(points)
    loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
    return loss, ((logits > 0) == labels).mean()


def make_step(model, opt_state, points, labels):
    compute = eqx.filter_value_and_grad(compute_loss, has_aux=True)
    (loss, accuracy), grads = compute(model, points, labels)
    loss, accuracy, grads = jax.lax.pmean((loss, accuracy, grads), "replica")
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss, accuracy


def make_batches(batch_size: int, num_steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    time = np.linspace(0, 2 * np.pi, 16)
    for _ in range(num_steps):
        start = rng.uniform(0, 2 * np.pi, (batch_size, 1))
        labels = rng.integers(0, 2, batch_size)
        angle = start + time * (2 * labels[:, None] - 1)
        points = np.stack([np.cos(angle), np.sin(angle)], -1) / (1 + time[:, None])
        # A label is 1 where the spiral turns left.
        yield points.astype(np.float32), labels.astype(np.float32)


def main(num_steps: int = 300, batch_size: int = 128, width: int = 16) -> list[float]:
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(lambda: make_model(jax.random.key(0), width))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    dataset = make_batches(batch_size, num_steps)
    dataset = strategy.experimental_distribute_dataset(dataset)
    for points, labels in dataset:
        args = (model, opt_state, points, labels)
        model, opt_state, loss, accuracy = strategy.run(make_step, args=args)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {float(accuracy):.2f}")
    return losses


if __name__ == "__main__":
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
    main()
