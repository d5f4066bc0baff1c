"""A small GPT with Flax NNX.

Reimplements nanoGPT (Karpathy): causal attention, tied embeddings, AdamW that decays
matrices only, clipped gradients; of the source text of Python's own standard library, in bytes.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import argparse
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (y.reshape(heads) for y in jnp.split(self.qkv(x), 3, axis=-1))
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, width: int, num_layers: int, length: int, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, rngs=rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def make_model(width: int, length: int) -> GPT:
    return GPT(width, 2, length, rngs=nnx.Rngs(0))


def make_tx(num_steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, num_steps // 10, num_steps, 2e-4)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=0.1,
            mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        ),
    )


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def make_batches(batch_size: int, length: int, num_steps: int) -> Iterator[np.ndarray]:
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        starts = rng.integers(len(text) - length, size=batch_size)
        yield text[starts[:, None] + np.arange(length + 1)]


def main(
    num_steps: int = 30, batch_size: int = 16, width: int = 32, length: int = 32
) -> list[float]:
    model = make_model(width, length)
    optimizer = nnx.Optimizer(model, make_tx(num_steps), wrt=nnx.Param)
    losses = []
    dataset = make_batches(batch_size, length, num_steps)
    for tokens in dataset:
        loss = train_step(model, optimizer, tokens)
        losses.append(float(loss))
    print(f"nats per byte {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
