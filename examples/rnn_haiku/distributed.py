"""A recurrent language model with Haiku.

Reimplements the example `rnn` of Haiku: LSTMs with skip connections, unrolled over time;
of the source text of Python's own standard library, in bytes. Batches come first, then time.

`plain.py` trains on one device, `distributed.py` the same on all of them.
"""

import argparse
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState


def make_network(width: int) -> hk.Transformed:
    def unroll(tokens):
        core = hk.deep_rnn_with_skip_connections([hk.LSTM(width), hk.LSTM(width)])
        inputs = hk.Embed(256, width)(tokens)
        outputs, _ = hk.dynamic_unroll(
            core, inputs, core.initial_state(len(tokens)), time_major=False
        )
        return hk.BatchApply(hk.Linear(256))(outputs)

    return hk.without_apply_rng(hk.transform(unroll))


network = make_network(width=32)
optimizer = optax.adam(5e-3)


def make_state(key: jax.Array, length: int) -> TrainingState:
    params = network.init(key, jnp.zeros((1, length), jnp.int32))
    return TrainingState(params, optimizer.init(params))


def update(state, tokens):
    def loss_fn(params):
        logits = network.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), "replica")
    updates, opt_state = optimizer.update(grads, state.opt_state)
    return TrainingState(optax.apply_updates(state.params, updates), opt_state), loss


def make_batches(batch_size: int, length: int, num_steps: int) -> Iterator[np.ndarray]:
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        starts = rng.integers(len(text) - length, size=batch_size)
        yield text[starts[:, None] + np.arange(length + 1)]


def main(num_steps: int = 30, batch_size: int = 16, length: int = 32) -> list[float]:
    strategy = tpudist.MirroredStrategy()
    state = strategy.create(lambda: make_state(jax.random.PRNGKey(0), length))
    losses = []
    dataset = make_batches(batch_size, length, num_steps)
    dataset = strategy.experimental_distribute_dataset(dataset)
    for tokens in dataset:
        state, loss = strategy.run(update, args=(state, tokens))
        losses.append(float(loss))
    print(f"nats per byte {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
    main()
