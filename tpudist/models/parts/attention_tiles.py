"""Attention of some queries to some keys, by matrix products with a tile of the keys at a time.

Ring attention uses it where there is no kernel. Scores exist for `_TILE` keys at a time, in
float32, so memory is proportional to the number of queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_TILE = 512
_MASKED = -1e30  # score of a masked key; finite, because exp(-inf - -inf) would be NaN


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the result, and the logarithms of the sums of the weights `[batch, heads, queries]`.

    Args:
        query: `[batch, heads, queries, width]`, scaled.
        key: `[batch, kv_heads, keys, width]`; `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        is_causal: Whether a query attends only to keys up to its own position.
    """
    grouped = _group(query, key.shape[1])
    state = (
        jnp.zeros(grouped.shape, jnp.float32),
        jnp.full(grouped.shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(grouped.shape[:-1], jnp.float32),
    )
    fold = functools.partial(_fold, grouped, is_causal)
    (total, largest, weight), _ = jax.lax.scan(fold, state, _tiles(key, value))
    out = (total / weight[..., None]).astype(query.dtype)
    return _ungroup(out), _ungroup(largest + jnp.log(weight))


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_weight: jax.Array,
    out_dot_d_out: jax.Array,
    d_out: jax.Array,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the float32 gradients of queries, keys and values.

    Args:
        query: See `forward`; this and the following ones.
        key: Keys.
        value: Values.
        log_weight: Logarithms of the sums of the weights, over all keys that the queries attend to:
            these and others.
        out_dot_d_out: Products of the result and its gradient, `[batch, heads, queries]`.
        d_out: Gradient of the result, in the shape of `query`.
        is_causal: Whether a query attends only to keys up to its own position.
    """
    kv_heads, num_keys = key.shape[1:3]
    queries = tuple(_group(x, kv_heads) for x in (query, d_out, log_weight, out_dot_d_out))
    d_query = jnp.zeros(queries[0].shape, jnp.float32)
    fold = functools.partial(_fold_back, queries, is_causal)
    d_query, gradients = jax.lax.scan(fold, d_query, _tiles(key, value))
    d_key, d_value = (_untile(x, num_keys) for x in gradients)
    return _ungroup(d_query), d_key, d_value


def _fold(grouped, is_causal, state, tile):
    """Folds the scores of one tile of keys into the running softmax of the queries `grouped`.

    The state has the sum of weighted values, the largest score and the sum of weights, per query.
    """
    key, value, positions = tile
    scores = _scores(grouped, key, positions, is_causal)
    total, largest, weight = state
    # Sums are in units of exp(largest), where `largest` is the largest score so far, so they cannot
    # overflow. A larger score changes the unit, and the earlier sums shrink.
    new_largest = jnp.maximum(largest, scores.max(axis=-1))
    shrink = jnp.exp(largest - new_largest)
    share = jnp.exp(scores - new_largest[..., None])
    new = _einsum("bkgqs,bksd->bkgqd", share.astype(value.dtype), value)
    total = total * shrink[..., None] + new
    return (total, new_largest, weight * shrink + share.sum(axis=-1)), None


def _fold_back(queries, is_causal, d_query, tile):
    """Adds the gradients of one tile of keys: to `d_query`, and new ones of the keys and values."""
    grouped, upstream, log_weight, out_dot_d_out = queries
    key, value, positions = tile
    scores = _scores(grouped, key, positions, is_causal)
    # The forward pass saved the sums of its softmax, so the shares need no second running softmax.
    share = jnp.exp(scores - log_weight[..., None])
    d_value = _einsum("bkgqs,bkgqd->bksd", share.astype(grouped.dtype), upstream)
    d_share = _einsum("bkgqd,bksd->bkgqs", upstream, value)
    d_scores = (share * (d_share - out_dot_d_out[..., None])).astype(grouped.dtype)
    d_query = d_query + _einsum("bkgqs,bksd->bkgqd", d_scores, key)
    return d_query, (_einsum("bkgqs,bkgqd->bksd", d_scores, grouped), d_value)


def _scores(query, key, positions, is_causal):
    """Returns scores `[batch, kv_heads, group, queries, tile]`; masked keys have `_MASKED`."""
    scores = _einsum("bkgqd,bksd->bkgqs", query, key)
    padding = jnp.iinfo(jnp.int32).max
    rows = jnp.arange(query.shape[3])[:, None] if is_causal else padding - 1
    return jnp.where(positions[None, :] <= rows, scores, _MASKED)


def _tiles(key, value):
    """Returns keys and values `[tiles, batch, kv_heads, tile, width]`, and their positions.

    Padding has positions after all others, so that it is masked.
    """
    length = key.shape[2]
    tile = min(_TILE, length)
    padding = -length % tile
    positions = jnp.arange(length)
    if padding:
        key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (key, value))
        positions = jnp.pad(positions, (0, padding), constant_values=jnp.iinfo(jnp.int32).max)
    key, value = (
        jnp.moveaxis(x.reshape(*x.shape[:2], -1, tile, x.shape[-1]), 2, 0) for x in (key, value)
    )
    return key, value, positions.reshape(-1, tile)


def _untile(x, length):
    """Returns `[batch, kv_heads, length, width]` for `[tiles, batch, kv_heads, tile, width]`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :length]


def _group(x, kv_heads):
    """Returns `[batch, kv_heads, group, queries, ...]` for `[batch, heads, queries, ...]`."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _ungroup(x):
    """Returns the inverse of `_group`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
