"""A language model with dropout, with Flax Linen.

Reimplements the example `lm1b` of Flax: a decoder of lines that are filled up with zeros,
which have no weight in the loss; of the lines of Python's standard library here, in bytes.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import argparse
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

LENGTH = 32


class Block(nn.Module):
    dropout_rate: float

    @nn.compact
    def __call__(self, x, mask, train: bool):
        width = x.shape[-1]
        y = nn.MultiHeadDotProductAttention(
            num_heads=4, dropout_rate=self.dropout_rate, deterministic=not train
        )(nn.LayerNorm()(x), mask=mask)
        x += nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        y = nn.Dense(width)(nn.relu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)


class Decoder(nn.Module):
    width: int
    dropout_rate: float

    @nn.compact
    def __call__(self, tokens, train: bool):
        inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        embed = nn.Embed(128, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, self.width))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(embed(inputs) + positions)
        mask = nn.combine_masks(nn.make_causal_mask(inputs))
        for _ in range(2):
            x = Block(self.dropout_rate)(x, mask, train)
        return embed.attend(nn.LayerNorm()(x))


def make_state(key: jax.Array, width: int, dropout_rate: float) -> TrainState:
    decoder = Decoder(width, dropout_rate)
    params = decoder.init(key, jnp.zeros((1, LENGTH), jnp.int32), train=False)["params"]
    tx = optax.adamw(2e-3, weight_decay=0.1)
    return TrainState.create(apply_fn=decoder.apply, params=params, tx=tx)


@jax.jit
def train_step(state, tokens, key):
    key = jax.random.fold_in(key, state.step)
    weights = (tokens > 0).astype(jnp.float32)
    num_tokens = weights.sum()

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens, train=True, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return (losses * weights).sum() / num_tokens

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def make_batches(batch_size: int, num_steps: int) -> Iterator[np.ndarray]:
    source = pathlib.Path(argparse.__file__).read_bytes()
    lines = [line for line in source.splitlines() if line.strip()]
    tokens = np.zeros((len(lines), LENGTH), np.int32)
    for row, line in zip(tokens, lines, strict=True):
        row[: min(len(line), LENGTH)] = [byte % 128 for byte in line[:LENGTH]]
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        yield tokens[rng.choice(len(tokens), batch_size, replace=False)]


def main(
    num_steps: int = 20, batch_size: int = 32, width: int = 32, dropout_rate: float = 0.1
) -> list[float]:
    state = make_state(jax.random.key(0), width, dropout_rate)
    key = jax.random.key(1)
    losses = []
    dataset = make_batches(batch_size, num_steps)
    for tokens in dataset:
        state, loss = train_step(state, tokens, key)
        losses.append(float(loss))
    print(f"nats per token {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
