"""A diffusion model with Equinox.

Reimplements the example `score_based_diffusion` of Equinox: a network learns the score of
noisy images, at times that are spread over the batch; of handwritten digits here.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

LAST_TIME = 10.0

optimizer = optax.adabelief(1e-3)


class Mixer(eqx.Module):
    patches: list[eqx.nn.MLP]
    pixels: list[eqx.nn.MLP]
    norm: eqx.nn.LayerNorm

    def __init__(self, width: int, *, key: jax.Array):
        first, second = jax.random.split(key)
        make = lambda size, key: eqx.nn.MLP(size, size, width, 1, key=key)  # noqa: E731
        self.patches = [make(17, k) for k in jax.random.split(first, 2)]
        self.pixels = [make(4, k) for k in jax.random.split(second, 2)]
        self.norm = eqx.nn.LayerNorm((16, 4))

    def __call__(self, time, image):
        x = image.reshape(4, 2, 4, 2).transpose(0, 2, 1, 3).reshape(16, 4)
        for patches, pixels in zip(self.patches, self.pixels, strict=True):
            row = jnp.full((1, 4), time / LAST_TIME)
            x = x + jax.vmap(patches, 1, 1)(jnp.concatenate([self.norm(x), row]))[:16]
            x = x + jax.vmap(pixels)(self.norm(x))
        return x.reshape(4, 4, 2, 2).transpose(0, 2, 1, 3).reshape(8, 8)


def make_model(key: jax.Array, width: int) -> Mixer:
    return Mixer(width, key=key)


def single_loss(model, image, time, key):
    mean = image * jnp.exp(-0.5 * time)
    variance = jnp.maximum(1 - jnp.exp(-time), 1e-5)
    noise = jax.random.normal(key, image.shape)
    score = model(time, mean + jnp.sqrt(variance) * noise)
    return (1 - jnp.exp(-time)) * jnp.mean((score + noise / jnp.sqrt(variance)) ** 2)


def batch_loss(model, images, key):
    num_images = len(images)
    time_key, loss_key = jax.random.split(key)
    times = jax.random.uniform(time_key, (num_images,)) + jnp.arange(num_images)
    keys = jax.random.split(loss_key, num_images)
    losses = jax.vmap(single_loss, (None, 0, 0, 0))(
        model, images, times * LAST_TIME / num_images, keys
    )
    return losses.mean()


@eqx.filter_jit
def make_step(model, opt_state, images, key):
    loss, grads = eqx.filter_value_and_grad(batch_loss)(model, images, key)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def make_batches(batch_size: int, num_steps: int) -> Iterator[np.ndarray]:
    images = load_digits().images.astype(np.float32)
    images = (images - images.mean()) / images.std()
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        yield images[rng.choice(len(images), batch_size, replace=False)]


def main(num_steps: int = 60, batch_size: int = 64, width: int = 64) -> list[float]:
    model_key, key = jax.random.split(jax.random.key(0))
    model = make_model(model_key, width)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    dataset = make_batches(batch_size, num_steps)
    for images in dataset:
        key, step_key = jax.random.split(key)
        model, opt_state, loss = make_step(model, opt_state, images, step_key)
        losses.append(float(loss))
    print(f"loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}")
    return losses


if __name__ == "__main__":
    main()
