"""The loss of a transformer: nats of each token given those before it, without waste of memory.

Logits are by far the largest activation of a small model with a large vocabulary: `[batch, length,
vocabulary]`. They are kept for the backward pass once, in the dtype of the matrix products, and
read in float32; with `TransformerConfig.loss_chunk`, only some positions' at a time exist at all.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tpudist.models.logical import inner_axes, split_over
from tpudist.models.transformer import Transformer, unembed


def next_token_nats(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Nats of each token given those before it: `[batch, length + 1]` to `[batch, length]`."""
    return _nats_and_imbalance(model, tokens)[0]


def next_token_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """What to train by: the nats, and with experts also how unevenly a row's tokens are spread.

    `[batch, length + 1]` to `[batch, length]`, as `next_token_nats`, to which it is equal without
    experts.
    """
    nats, imbalance = _nats_and_imbalance(model, tokens)
    if imbalance is None:
        return nats
    # 1 is the least there is.
    return nats + model.config.expert_balance * (imbalance[:, None] - 1)


def _nats_and_imbalance(
    model: Transformer, tokens: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    tokens = tokens.astype(jnp.int32)
    hidden, routing = model.hidden(tokens[:, :-1])
    targets, weight, chunk = tokens[:, 1:], model.output_weight(), model.config.loss_chunk
    if chunk is None or chunk >= targets.shape[1]:
        nats = _nats(unembed(hidden, weight), targets)
    else:
        nats = _by_chunks(weight, hidden, targets, chunk)
    return nats, None if routing is None else routing.imbalance


def _by_chunks(weight: jax.Array, hidden: jax.Array, targets: jax.Array, chunk: int) -> jax.Array:
    """The same, `chunk` positions at a time; the backward pass computes their logits again.

    Where an axis splits the sequence, each of its devices has an equal part of every chunk.
    """
    batch, length = targets.shape
    inner = inner_axes()
    parts = 1
    for axis in split_over("sequence", length):
        parts *= inner[axis]
    if chunk % parts or length % chunk:
        raise ValueError(
            f"loss_chunk={chunk} does not cut a sequence of {length} positions"
            f"{f' on {parts} devices' if parts > 1 else ''} into equal chunks. Use a divisor of "
            f"{length}{f' that is a multiple of {parts}' if parts > 1 else ''}."
        )

    def cut(x: jax.Array) -> jax.Array:  # [chunks, batch, parts * chunk / parts, ...]
        rest = x.shape[2:]
        x = x.reshape(batch, parts, length // chunk, chunk // parts, *rest)
        return jnp.moveaxis(x, 2, 0).reshape(length // chunk, batch, chunk, *rest)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # the scan keeps XLA from undoing it
    def of_chunk(weight, hidden, targets):
        return _nats(unembed(hidden, weight), targets)

    def body(_, piece):
        return None, of_chunk(weight, *piece)

    _, nats = jax.lax.scan(body, None, (cut(hidden), cut(targets)))
    nats = nats.reshape(length // chunk, batch, parts, chunk // parts)
    return jnp.moveaxis(nats, 0, 2).reshape(batch, length)


@jax.custom_vjp
def _nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy in float32 of each target `[...]` under `logits`, `[..., vocabulary]`."""
    return _nats_forward(logits, targets)[0]


def _nats_forward(logits: jax.Array, targets: jax.Array):
    logits32 = logits.astype(jnp.float32)
    log_weight = jax.nn.logsumexp(logits32, axis=-1)
    # One-hot targets, which XLA fuses: picking a logit by index aborts the partitioner (jaxlib
    # 0.10.2) where a mesh axis splits the vocabulary.
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits32, 0), axis=-1)
    return log_weight - chosen, (logits, targets, log_weight)


def _nats_backward(saved, cotangent: jax.Array):
    logits, targets, log_weight = saved
    probability = jnp.exp(logits.astype(jnp.float32) - log_weight[..., None])
    gradient = (probability - _is_target(logits, targets)) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


_nats.defvjp(_nats_forward, _nats_backward)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]
