"""A variational autoencoder with Flax NNX.

Reimplements the example `vae` of Flax (there with Linen): an encoder, a decoder, and noise
between them; of handwritten digits here.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class VAE(nnx.Module):
    def __init__(self, width: int, num_latents: int, *, rngs: nnx.Rngs):
        self.encode = nnx.Linear(64, width, rngs=rngs)
        self.mean = nnx.Linear(width, num_latents, rngs=rngs)
        self.log_variance = nnx.Linear(width, num_latents, rngs=rngs)
        self.decode = nnx.Linear(num_latents, width, rngs=rngs)
        self.pixels = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, x, key):
        hidden = nnx.relu(self.encode(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = jax.random.normal(key, mean.shape)
        latents = mean + jnp.exp(0.5 * log_variance) * noise
        return self.pixels(nnx.relu(self.decode(latents))), mean, log_variance


def make_model(width: int) -> VAE:
    return VAE(width, 8, rngs=nnx.Rngs(0))


@nnx.jit
def train_step(model, optimizer, images, key):
    key = jax.random.fold_in(key, optimizer.step[...])

    def loss_fn(model):
        logits, mean, log_variance = model(images, key)
        nats = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
        divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
        return (nats + divergence).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def make_batches(batch_size: int, num_steps: int) -> Iterator[np.ndarray]:
    images = (load_digits().data > 7).astype(np.float32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        yield images[rng.choice(len(images), batch_size, replace=False)]


def main(num_steps: int = 60, batch_size: int = 128, width: int = 128) -> list[float]:
    model = make_model(width)
    tx = optax.adam(3e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    key = jax.random.key(1)
    losses = []
    dataset = make_batches(batch_size, num_steps)
    for images in dataset:
        loss = train_step(model, optimizer, images, key)
        losses.append(float(loss))
    print(f"nats per image {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
