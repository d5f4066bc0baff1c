"""Handwritten digits with Haiku.

Reimplements the example `mnist` of Haiku: an MLP, Adam, a penalty on the weights, and a
moving average of the parameters that is evaluated.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class TrainingState(NamedTuple):
    params: hk.Params
    avg_params: hk.Params
    opt_state: optax.OptState


network = hk.without_apply_rng(
    hk.transform(lambda images: hk.nets.MLP([300, 100, 10])(hk.Flatten()(images)))
)
optimizer = optax.adam(1e-3)


def make_state(key: jax.Array) -> TrainingState:
    params = network.init(key, jnp.zeros((1, 8, 8)))
    return TrainingState(params, params, optimizer.init(params))


@jax.jit
def update(state, images, labels):
    def loss_fn(params):
        logits = network.apply(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        penalty = 0.5 * sum((x**2).sum() for x in jax.tree.leaves(params))
        return losses.mean() + 1e-4 * penalty

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, step_size=0.05)
    return TrainingState(params, avg_params, opt_state), loss


@jax.jit
def evaluate(params, images, labels):
    return (network.apply(params, images).argmax(-1) == labels).mean()


def make_batches(batch_size: int, num_steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    digits = load_digits()
    images, labels = digits.images.astype(np.float32) / 16, digits.target.astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        chosen = rng.choice(len(images), batch_size, replace=False)
        yield images[chosen], labels[chosen]


def main(num_steps: int = 50, batch_size: int = 128) -> list[float]:
    state = make_state(jax.random.PRNGKey(0))
    losses = []
    dataset = make_batches(batch_size, num_steps)
    for images, labels in dataset:
        state, loss = update(state, images, labels)
        losses.append(float(loss))
    [(images, labels)] = make_batches(1024, 1)
    accuracy = float(evaluate(state.avg_params, images, labels))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.2f}")
    return losses


if __name__ == "__main__":
    main()
