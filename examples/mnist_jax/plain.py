"""Handwritten digits with only JAX.

Reimplements the examples `mnist_classifier_fromscratch` and its parallel sister
`spmd_mnist_classifier_fromscratch` of JAX: a list of weights, epochs whose last batch is smaller.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

STEP_SIZE = 0.1


def make_params(key: jax.Array, sizes: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (m, n)) / jnp.sqrt(m), jnp.zeros(n))
        for key, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, images):
    activations = images
    for weight, bias in params[:-1]:
        activations = jnp.tanh(activations @ weight + bias)
    weight, bias = params[-1]
    return jax.nn.log_softmax(activations @ weight + bias)


def loss_fn(params, images, targets):
    return -(predict(params, images) * targets).sum(1).mean()


@jax.jit
def update(params, images, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, images, targets)
    return jax.tree.map(lambda x, dx: x - STEP_SIZE * dx, params, grads), loss


def make_batches(batch_size: int, num_epochs: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    digits = load_digits()
    images = digits.data.astype(np.float32) / 16
    targets = np.eye(10, dtype=np.float32)[digits.target]
    rng = np.random.default_rng(0)
    for _ in range(num_epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images), batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], targets[chosen]


def main(
    num_epochs: int = 3, batch_size: int = 128, sizes: tuple[int, ...] = (64, 128, 128, 10)
) -> list[float]:
    params = make_params(jax.random.key(0), sizes)
    losses = []
    dataset = make_batches(batch_size, num_epochs)
    for images, targets in dataset:
        params, loss = update(params, images, targets)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
