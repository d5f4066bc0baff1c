"""The loss of a transformer, in nats per token, with little memory.

Logits `[batch, length, vocabulary]` are by far the largest activation of a small model with a large
vocabulary. They are kept once for the backward pass, in the dtype of the matrix products; float32
exists only inside fusions. With `TransformerConfig.loss_chunk`, only the logits of some positions
exist at a time.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from tpudist.models.parts.logical import constrain, inner_axes, split_over
from tpudist.models.transformer import Transformer, unembed


def next_token_nats(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Returns the nats `[batch, length]` of each token of `[batch, length + 1]` after the first."""
    return _nats_and_imbalance(model, tokens)[0]


def next_token_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Returns the training loss `[batch, length]`: `next_token_nats`, plus the expert imbalance.

    Without experts it equals `next_token_nats`.
    """
    nats, imbalance = _nats_and_imbalance(model, tokens)
    if imbalance is None:
        return nats
    # The imbalance is at least 1, so perfectly even experts add nothing.
    return nats + model.config.expert_balance * (imbalance[:, None] - 1)


def _nats_and_imbalance(
    model: Transformer, tokens: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    tokens = tokens.astype(jnp.int32)
    hidden, routing = model.hidden(tokens[:, :-1])
    targets, weight, chunk = tokens[:, 1:], model.output_weight(), model.config.loss_chunk
    cap = model.config.output_cap
    if chunk is None or chunk >= targets.shape[1]:
        nats = _nats(unembed(hidden, weight, cap), targets)
    else:
        nats = _nats_by_chunks(weight, hidden, targets, chunk, cap)
    return nats, None if routing is None else routing.imbalance


def _nats_by_chunks(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, chunk: int, cap: float | None
) -> jax.Array:
    """Returns nats `[batch, length]`, from the logits of `chunk` positions at a time.

    The backward pass computes the logits again. If a mesh axis splits the sequence, each of its
    devices has an equal part of every chunk.
    """
    batch, length = targets.shape
    parts = _num_parts("sequence", length)
    if chunk % parts or length % chunk:
        raise ValueError(
            f"loss_chunk={chunk} does not cut a sequence of {length} positions"
            f"{f' on {parts} devices' if parts > 1 else ''} into equal chunks. Use a divisor of "
            f"{length}{f' that is a multiple of {parts}' if parts > 1 else ''}."
        )

    def cut(x: jax.Array) -> jax.Array:  # [chunks, batch, chunk, ...]
        # A chunk has equally many positions of each part, so every device works on every chunk.
        rest = x.shape[2:]
        x = x.reshape(batch, parts, length // chunk, chunk // parts, *rest)
        return jnp.moveaxis(x, 2, 0).reshape(length // chunk, batch, chunk, *rest)

    # Outside of the scan: the backward pass then reduces the gradient of the weight once, after the
    # last chunk, and before the blocks begin.
    weight, hidden = _gradient_barrier(weight, hidden)
    # Split only over the vocabulary, so that XLA gathers it once and not for each chunk.
    weight = constrain(weight.astype(hidden.dtype), None, "vocab")
    nats = _nats_of_chunks(weight, cut(hidden), cut(targets), cap)
    nats = nats.reshape(length // chunk, batch, parts, chunk // parts)
    return jnp.moveaxis(nats, 0, 2).reshape(batch, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nats_of_chunks(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, cap: float | None
) -> jax.Array:
    """Returns nats `[chunks, batch, chunk]`; `hidden` is `[chunks, batch, chunk, embed]`."""

    def body(_, piece):
        hidden, targets = piece
        return None, _nats(unembed(hidden, weight, cap), targets)

    return jax.lax.scan(body, None, (hidden, targets))[1]


def _nats_of_chunks_forward(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, cap: float | None
):
    return _nats_of_chunks(weight, hidden, targets, cap), (weight, hidden, targets)


def _nats_of_chunks_backward(cap: float | None, saved, cotangent: jax.Array):
    # Each device sums the gradient of the weight over its own tokens of all chunks, in float32. The
    # sums of the devices stay separate until the last chunk, as
    # `[batch parts, sequence parts, embed, vocabulary]`.
    # Without these two dims XLA would reduce them over the devices once per chunk.
    weight, hidden, targets = saved
    _, batch, chunk, _ = hidden.shape
    batch_parts = _num_parts("batch", batch)
    # As many as of the whole length: a chunk is a multiple of them.
    sequence_parts = _num_parts("sequence", chunk)

    def group_by_device(x: jax.Array) -> jax.Array:
        """Returns `[batch parts, sequence parts, tokens of a device, ...]`."""
        positions, width = chunk // sequence_parts, x.shape[-1]
        x = x.reshape(batch_parts, batch // batch_parts, sequence_parts, positions, width)
        return jnp.moveaxis(x, 2, 1).reshape(batch_parts, sequence_parts, -1, width)

    def body(total, piece):
        hidden, targets, cotangent = piece
        # JAX's name of rematerialization, so that the planner does not count these FLOPs as work.
        with jax.named_scope("rematted_computation"):
            logits = unembed(hidden, weight, cap)
            _, residuals = _nats_forward(logits, targets)
        d_logits, _ = _nats_backward(residuals, cotangent)
        if cap is not None:  # the derivative of cap * tanh(x / cap)
            d_logits = d_logits * (1 - jnp.square(logits / cap))
        d_hidden = jnp.einsum("blv,ev->ble", d_logits, weight)
        new = jnp.einsum(
            "rpte,rptv->rpev",
            group_by_device(hidden),
            group_by_device(d_logits),
            preferred_element_type=jnp.float32,
        )
        return split(total + new), d_hidden

    def split(x: jax.Array) -> jax.Array:
        return constrain(x, "batch", "sequence", None, "vocab")

    total = split(jnp.zeros((batch_parts, sequence_parts, *weight.shape), jnp.float32))
    total, d_hidden = jax.lax.scan(body, total, (hidden, targets, cotangent))
    # Reduced in the dtype of the weight, as other gradients are; `jnp.sum` would send float32.
    d_weight = jax.lax.reduce(total.astype(weight.dtype), weight.dtype.type(0), jax.lax.add, (0, 1))
    return d_weight, d_hidden, None


_nats_of_chunks.defvjp(_nats_of_chunks_forward, _nats_of_chunks_backward)


@jax.custom_vjp
def _gradient_barrier(weight: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both arguments; orders the backward pass after it.

    XLA may delay the reduction of the weight's gradient, and until then every device keeps all of
    it. With the barrier, the backward pass of the blocks starts after that reduction.
    """
    return weight, hidden


def _gradient_barrier_backward(_: None, gradients: tuple[jax.Array, jax.Array]):
    d_weight, d_hidden = gradients
    return jax.lax.optimization_barrier((constrain(d_weight, "embed", "vocab"), d_hidden))


_gradient_barrier.defvjp(
    lambda weight, hidden: ((weight, hidden), None), _gradient_barrier_backward
)


def _num_parts(name: str, size: int) -> int:
    """Returns the number of parts into which the mesh splits a dim with this logical name."""
    inner = inner_axes()
    return math.prod(inner[axis] for axis in split_over(name, size))


@jax.custom_vjp
def _nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the cross-entropy in float32 of targets `[...]` under logits `[..., vocabulary]`."""
    return _nats_forward(logits, targets)[0]


def _nats_forward(logits: jax.Array, targets: jax.Array):
    logits32 = logits.astype(jnp.float32)
    log_normalizer = jax.nn.logsumexp(logits32, axis=-1)
    # A one-hot mask, which XLA fuses: it never exists in memory. Indexing the logits aborts the
    # partitioner (jaxlib 0.10.2) if a mesh axis splits the vocabulary.
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits32, 0), axis=-1)
    # Kept in their own dtype: a float32 copy of bfloat16 logits would double the largest
    # activation.
    return log_normalizer - chosen, (logits, targets, log_normalizer)


def _nats_backward(saved, cotangent: jax.Array):
    logits, targets, log_normalizer = saved
    probability = jnp.exp(logits.astype(jnp.float32) - log_normalizer[..., None])
    gradient = (probability - _is_target(logits, targets)) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


_nats.defvjp(_nats_forward, _nats_backward)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]
