"""The loss of a transformer: nats of each token given those before it, without waste of memory.

Logits are by far the largest activation of a small model with a large vocabulary: `[batch, length,
vocabulary]`. They are kept for the backward pass once, in the dtype of the matrix products, and
read in float32; with `TransformerConfig.loss_chunk`, only some positions' at a time exist at all.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from tpudist.models.parts.logical import constrain, inner_axes, split_over
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
    cap = model.config.output_cap
    if chunk is None or chunk >= targets.shape[1]:
        nats = _nats(unembed(hidden, weight, cap), targets)
    else:
        nats = _nats_by_chunks(weight, hidden, targets, chunk, cap)
    return nats, None if routing is None else routing.imbalance


def _nats_by_chunks(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, chunk: int, cap: float | None
) -> jax.Array:
    """The same, `chunk` positions at a time; the backward pass computes their logits again.

    Where an axis splits the sequence, each of its devices has an equal part of every chunk.
    """
    batch, length = targets.shape
    parts = _num_parts("sequence", length)
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

    weight, hidden = _gradient_barrier(weight, hidden)
    # Whole but for the vocabulary, so that it is gathered once and not for each chunk.
    weight = constrain(weight.astype(hidden.dtype), None, "vocab")
    nats = _nats_of_chunks(weight, cut(hidden), cut(targets), cap)
    nats = nats.reshape(length // chunk, batch, parts, chunk // parts)
    return jnp.moveaxis(nats, 0, 2).reshape(batch, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nats_of_chunks(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, cap: float | None
) -> jax.Array:
    """Nats `[chunks, batch, chunk]` of targets under `hidden @ weight`, a chunk at a time."""

    def body(_, piece):
        hidden, targets = piece
        return None, _nats(unembed(hidden, weight, cap), targets)

    return jax.lax.scan(body, None, (hidden, targets))[1]


def _nats_of_chunks_forward(
    weight: jax.Array, hidden: jax.Array, targets: jax.Array, cap: float | None
):
    return _nats_of_chunks(weight, hidden, targets, cap), (weight, hidden, targets)


def _nats_of_chunks_backward(cap: float | None, saved, cotangent: jax.Array):
    """Each device sums the weight's gradient over its own tokens of all chunks, in float32.

    The sums of the devices stay apart, `[rows, parts, embed, vocabulary]`, until the last chunk is
    done: added up earlier, they would be so for each chunk.
    """
    weight, hidden, targets = saved
    _, batch, chunk, embed = hidden.shape
    rows, parts = _num_parts("batch", batch), _num_parts("sequence", chunk)

    def group_by_device(x: jax.Array) -> jax.Array:  # [rows, parts, tokens of a device, ...]
        x = x.reshape(rows, batch // rows, parts, chunk // parts, x.shape[-1])
        return jnp.moveaxis(x, 2, 1).reshape(rows, parts, -1, x.shape[-1])

    def body(total, piece):
        hidden, targets, cotangent = piece
        with jax.named_scope("rematted_computation"):
            logits = unembed(hidden, weight, cap)
            _, read = _nats_forward(logits, targets)
        d_logits, _ = _nats_backward(read, cotangent)
        if cap is not None:  # of the tanh
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

    total = split(jnp.zeros((rows, parts, *weight.shape), jnp.float32))
    total, d_hidden = jax.lax.scan(body, total, (hidden, targets, cotangent))
    # In the weight's dtype, as other weights' gradients are (`jnp.sum` would send float32).
    d_weight = jax.lax.reduce(total.astype(weight.dtype), weight.dtype.type(0), jax.lax.add, (0, 1))
    return d_weight, d_hidden, None


_nats_of_chunks.defvjp(_nats_of_chunks_forward, _nats_of_chunks_backward)


@jax.custom_vjp
def _gradient_barrier(weight: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; the blocks' backward pass begins when both have their gradients.

    XLA reduces the weight's gradient when it likes, and until then holds all of it on every device.
    """
    return weight, hidden


def _gradient_barrier_backward(_: None, gradients: tuple[jax.Array, jax.Array]):
    d_weight, d_hidden = gradients
    return jax.lax.optimization_barrier((constrain(d_weight, "embed", "vocab"), d_hidden))


_gradient_barrier.defvjp(
    lambda weight, hidden: ((weight, hidden), None), _gradient_barrier_backward
)


def _num_parts(name: str, size: int) -> int:
    """In how many parts a dim called `name` of this size is split."""
    inner = inner_axes()
    return math.prod(inner[axis] for axis in split_over(name, size))


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
