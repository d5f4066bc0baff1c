"""Causal attention over a sequence that is split over devices: keys and values go around a ring.

Each device keeps the queries of its part. In n - 1 turns it sees the keys and values of every other
part, and folds each into a running softmax (Liu et al. 2023, arXiv 2310.01889). The backward pass
goes around again, and the gradients of keys and values travel after them. All communication is
permutes of neighbours, each under way while something else is folded. Scores exist for `_TILE` keys
at a time, in float32, so that memory is in proportion to a device's part of the sequence.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_TILE = 512  # keys whose scores are held at a time
_MASKED = -1e30  # finite: a row that is masked out whole must not become NaN


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis: str | None,
    name: str | None = None,
) -> jax.Array:
    """What each position gathers from itself and those before it, `[batch, part, heads, width]`.

    To be called where `axis` is manual.

    Args:
        query: This device's part of the sequence, `[batch, part, heads, width]`.
        key: `[batch, part, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: As `key`.
        axis: The mesh axis that splits the sequence, in order; None if nothing does.
        name: What remat policies call what the backward pass needs: the result, and the sums of
            the softmax.
    """
    return _forward(query, key, value, axis, name)[0]


def _forward(query, key, value, axis, name):
    """The result, and what the backward pass needs."""
    grouped = _group(query, key.shape[2])
    shape = grouped.shape
    state = (
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
    )
    here = _index(axis)

    def fold(state, key, value, source):
        def tile(state, tiled):
            key, value, positions = tiled
            scores = _scores(grouped, key, here * grouped.shape[3], positions)
            total, most, weight = state
            # Sums so far are in units of exp(most), the largest score seen, so that none overflows.
            # A larger one changes the unit: what was added up shrinks.
            now = jnp.maximum(most, scores.max(axis=-1))
            shrink = jnp.exp(most - now)
            share = jnp.exp(scores - now[..., None])
            new = jnp.einsum(
                "bkgqs,bskd->bkgqd",
                share.astype(value.dtype),
                value,
                preferred_element_type=jnp.float32,
            )
            total = total * shrink[..., None] + new
            return (total, now, weight * shrink + share.sum(axis=-1)), None

        return jax.lax.scan(tile, state, _tiles(key, value, source))[0]

    def fold_if_earlier(state, key, value, step):
        source = here - step  # what came from later positions is masked out whole
        return jax.lax.cond(source >= 0, fold, lambda state, *_: state, state, key, value, source)

    def turn(carry, step):
        state, key, value = carry
        upcoming = _pass_on((key, value), axis)  # while these are folded
        return (fold_if_earlier(state, key, value, step), *upcoming), None

    last = _size(axis) - 1
    carry, _ = jax.lax.scan(turn, (state, key, value), jnp.arange(last))
    total, most, weight = fold_if_earlier(*carry, last)
    out = _ungroup(total / weight[..., None]).astype(query.dtype)
    log_weight = most + jnp.log(weight)
    if name is not None:
        out, log_weight = (checkpoint_name(x, name) for x in (out, log_weight))
    return out, (query, key, value, out, log_weight)


def _backward(axis, _name, saved, cotangent):
    query, key, value, out, log_weight = saved
    kv_heads = key.shape[2]
    grouped, upstream = _group(query, kv_heads), _group(cotangent, kv_heads)
    scale = query.shape[-1] ** -0.5
    # The gradient of a softmax is share * (d_share - sum of share * d_share). The sum is over all
    # keys, most of them elsewhere; but it is the product of the result and its gradient, at hand.
    along = _group(cotangent.astype(jnp.float32) * out.astype(jnp.float32), kv_heads).sum(-1)
    here = _index(axis)

    def fold(d_query, key, value, source):
        """With what these queries add to the gradients of keys and values."""

        def tile(d_query, tiled):
            (key, value, positions) = tiled
            scores = _scores(grouped, key, here * grouped.shape[3], positions)
            share = jnp.exp(scores - log_weight[..., None])
            d_value = _einsum("bkgqs,bkgqd->bskd", share.astype(query.dtype), upstream)
            d_share = _einsum("bkgqd,bskd->bkgqs", upstream, value)
            d_scores = (share * (d_share - along[..., None]) * scale).astype(query.dtype)
            d_query = d_query + _einsum("bkgqs,bskd->bkgqd", d_scores, key)
            return d_query, (_einsum("bkgqs,bkgqd->bskd", d_scores, grouped), d_value)

        d_query, new = jax.lax.scan(tile, d_query, _tiles(key, value, source))
        return d_query, *(_untile(x, key.shape[1]) for x in new)

    def skip(d_query, key, value, source):
        return d_query, *(jnp.zeros(x.shape, jnp.float32) for x in (key, value))

    def turn(carry, step, is_last=False):
        d_query, key, value, *gradients = carry
        # All that travels does so while these are folded.
        upcoming = (key, value) if is_last else _pass_on((key, value), axis)
        # The device before had these keys a turn ago: what it passes on are their gradients so far.
        arrived = _pass_on(gradients, axis)
        source = here - step
        d_query, *new = jax.lax.cond(source >= 0, fold, skip, d_query, key, value, source)
        return (d_query, *upcoming, *(a + b for a, b in zip(arrived, new, strict=True))), None

    size = _size(axis)
    d_query, *gradients = fold(jnp.zeros(grouped.shape, jnp.float32), key, value, here)
    if size > 1:
        carry = (d_query, *_pass_on((key, value), axis), *gradients)
        carry, _ = jax.lax.scan(turn, carry, jnp.arange(1, size - 1))
        (d_query, _, _, *gradients), _ = turn(carry, size - 1, is_last=True)
    # After n - 1 turns the keys at hand are those of the next device: one more, and they are home.
    d_key, d_value = _pass_on(gradients, axis)
    return (
        _ungroup(d_query).astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
    )


causal_attention.defvjp(_forward, _backward)


def _scores(query, key, first, positions):
    """Scores `[batch, kv_heads, group, part, tile]`; those of later or padded keys masked out."""
    scores = _einsum("bkgqd,bskd->bkgqs", query, key) * query.shape[-1] ** -0.5
    rows = first + jnp.arange(query.shape[3])
    return jnp.where(positions[None, :] <= rows[:, None], scores, _MASKED)


def _tiles(key, value, source):
    """Keys and values in tiles, `[tiles, batch, tile, ...]`, and their positions in the sequence.

    Positions of padding are after all others.
    """
    length = key.shape[1]
    tile = min(_TILE, length)
    padding = -length % tile
    positions = source * length + jnp.arange(length)
    if padding:
        pads = ((0, 0), (0, padding), (0, 0), (0, 0))
        key, value = jnp.pad(key, pads), jnp.pad(value, pads)
        positions = jnp.pad(positions, (0, padding), constant_values=jnp.iinfo(jnp.int32).max)
    key, value = (
        jnp.moveaxis(x.reshape(x.shape[0], -1, tile, *x.shape[2:]), 1, 0) for x in (key, value)
    )
    return key, value, positions.reshape(-1, tile)


def _untile(x, length):
    """`[tiles, batch, tile, ...]` to `[batch, length, ...]`."""
    tiles, batch, tile = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, tiles * tile, *x.shape[3:])[:, :length]


def _group(x, kv_heads):
    """`[batch, part, heads, ...]` to `[batch, kv_heads, group, part, ...]`."""
    batch, part, heads = x.shape[:3]
    x = x.reshape(batch, part, kv_heads, heads // kv_heads, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungroup(x):
    """The inverse of `_group`."""
    batch, kv_heads, group, part = x.shape[:4]
    return jnp.moveaxis(x, 3, 1).reshape(batch, part, kv_heads * group, *x.shape[4:])


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _index(axis):
    return jnp.int32(0) if axis is None else jax.lax.axis_index(axis)


def _size(axis):
    return 1 if axis is None else jax.lax.axis_size(axis)


def _pass_on(values, axis):
    """Each value from the device before, around the ring."""
    if axis is None:
        return values
    size = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), values)
