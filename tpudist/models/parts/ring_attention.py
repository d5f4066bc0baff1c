"""Causal attention over a sequence that is split over devices: keys and values go around a ring.

Each device keeps the queries of its part of the sequence. In n - 1 turns it receives the keys and
values of every other part, and folds them into a running softmax (Liu et al. 2023, arXiv
2310.01889). In the backward pass they go around again, and the gradients of keys and values follow
them. All communication is permutes between neighbors, which overlap with computation. Scores exist
for `_TILE` keys at a time, in float32, so memory is proportional to a device's part.

The parts are in order, so device i computes i + 1 of n turns, and the last device determines the
time. Striped parts would balance this, but need another order of the tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_TILE = 512  # keys whose scores exist at a time
_MASKED = -1e30  # score of a masked key; finite, because exp(-inf - -inf) would be NaN


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis: str | None,
    name: str | None = None,
) -> jax.Array:
    """Returns causal attention `[batch, part, heads, width]`. The mesh axis `axis` must be manual.

    Args:
        query: Part of the sequence on this device, `[batch, part, heads, width]`.
        key: `[batch, part, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        axis: Mesh axis that splits the sequence, in order; None if the sequence is not split.
        name: Name, for `remat` policies, of the tensors that the backward pass needs: the result
            and the sums of the softmax.
    """
    return _forward(query, key, value, axis, name)[0]


def _fold_tile(grouped, first_position, state, tile):
    """Folds the scores of one tile of keys into the running softmax of the queries `grouped`.

    The state has the sum of weighted values, the largest score and the sum of weights, per query.
    """
    key, value, positions = tile
    scores = _scores(grouped, key, first_position, positions)
    total, largest, weight = state
    # Sums are in units of exp(largest), where `largest` is the largest score so far, so they cannot
    # overflow. A larger score changes the unit, and the earlier sums shrink.
    new_largest = jnp.maximum(largest, scores.max(axis=-1))
    shrink = jnp.exp(largest - new_largest)
    share = jnp.exp(scores - new_largest[..., None])
    new = _einsum("bkgqs,bskd->bkgqd", share.astype(value.dtype), value)
    total = total * shrink[..., None] + new
    return (total, new_largest, weight * shrink + share.sum(axis=-1)), None


def _forward(query, key, value, axis, name):
    grouped = _group(query, key.shape[2])
    shape = grouped.shape
    state = (
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
    )
    here = _index(axis)

    def fold(state, key, value, source):
        tile = functools.partial(_fold_tile, grouped, here * grouped.shape[3])
        return jax.lax.scan(tile, state, _tiles(key, value, source))[0]

    def fold_if_earlier(state, key, value, step):
        # Device i has the keys of device i - step now. A negative number wraps around to a later
        # part of the sequence, which these queries must not see.
        source = here - step
        return jax.lax.cond(source >= 0, fold, lambda state, *_: state, state, key, value, source)

    def turn(carry, step):
        state, key, value = carry
        upcoming = _pass_on((key, value), axis)  # runs while these are folded
        return (fold_if_earlier(state, key, value, step), *upcoming), None

    # The last turn is outside of the scan, because it passes nothing on.
    last = _size(axis) - 1
    carry, _ = jax.lax.scan(turn, (state, key, value), jnp.arange(last))
    total, largest, weight = fold_if_earlier(*carry, last)
    out = _ungroup(total / weight[..., None]).astype(query.dtype)
    log_weight = largest + jnp.log(weight)
    if name is not None:
        out, log_weight = (checkpoint_name(x, name) for x in (out, log_weight))
    return out, (query, key, value, out, log_weight)


def _fold_tile_back(queries, first_position, scale, d_query, tile):
    """Adds the gradients of one tile of keys: to `d_query`, and new ones of the keys and values.

    `queries` has the queries, the gradient of the result, the logarithms of the sums of weights,
    and `out_dot_d_out` of `_backward`, all in groups.
    """
    grouped, upstream, log_weight, out_dot_d_out = queries
    key, value, positions = tile
    scores = _scores(grouped, key, first_position, positions)
    # The forward pass saved the sums of its softmax, so the shares need no second running softmax.
    share = jnp.exp(scores - log_weight[..., None])
    d_value = _einsum("bkgqs,bkgqd->bskd", share.astype(grouped.dtype), upstream)
    d_share = _einsum("bkgqd,bskd->bkgqs", upstream, value)
    d_scores = (share * (d_share - out_dot_d_out[..., None]) * scale).astype(grouped.dtype)
    d_query = d_query + _einsum("bkgqs,bskd->bkgqd", d_scores, key)
    return d_query, (_einsum("bkgqs,bkgqd->bskd", d_scores, grouped), d_value)


def _backward(axis, _name, saved, cotangent):
    query, key, value, out, log_weight = saved
    kv_heads = key.shape[2]
    grouped, upstream = _group(query, kv_heads), _group(cotangent, kv_heads)
    scale = query.shape[-1] ** -0.5
    # The gradient of a softmax is share * (d_share - sum of share * d_share). The sum is over all
    # keys, most of them on other devices. But it equals the product of the result and its gradient.
    product = cotangent.astype(jnp.float32) * out.astype(jnp.float32)
    out_dot_d_out = _group(product, kv_heads).sum(-1)
    here = _index(axis)
    queries = (grouped, upstream, log_weight, out_dot_d_out)
    tile = functools.partial(_fold_tile_back, queries, here * grouped.shape[3], scale)

    def fold(d_query, key, value, source):
        d_query, new = jax.lax.scan(tile, d_query, _tiles(key, value, source))
        return d_query, *(_untile(x, key.shape[1]) for x in new)

    # For keys of a later part, which these queries do not see. `cond` needs the same shapes and
    # dtypes.
    def skip(d_query, key, value, source):
        return d_query, *(jnp.zeros(x.shape, jnp.float32) for x in (key, value))

    def turn(carry, step, is_last=False):
        d_query, key, value, *gradients = carry
        # These transfers run while the current keys are folded. No device needs keys after the last
        # turn.
        upcoming = (key, value) if is_last else _pass_on((key, value), axis)
        # The previous device had these keys one turn ago, and sends their gradients so far.
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
    # After n - 1 turns a device has the keys of the next device. One more transfer returns the
    # gradients to the owners of the keys.
    d_key, d_value = _pass_on(gradients, axis)
    return (
        _ungroup(d_query).astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
    )


causal_attention.defvjp(_forward, _backward)


def _scores(query, key, first_position, positions):
    """Returns scores `[batch, kv_heads, group, part, tile]`; later and padded keys are masked."""
    scores = _einsum("bkgqd,bskd->bkgqs", query, key) * query.shape[-1] ** -0.5
    rows = first_position + jnp.arange(query.shape[3])
    return jnp.where(positions[None, :] <= rows[:, None], scores, _MASKED)


def _tiles(key, value, source):
    """Returns keys and values `[tiles, batch, tile, ...]`, and positions `[tiles, tile]`.

    Padding has positions after all others, so that the causal mask removes it.
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
    """Returns `[batch, length, ...]` for `[tiles, batch, tile, ...]`."""
    tiles, batch, tile = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, tiles * tile, *x.shape[3:])[:, :length]


def _group(x, kv_heads):
    """Returns `[batch, kv_heads, group, part, ...]` for `[batch, part, heads, ...]`."""
    batch, part, heads = x.shape[:3]
    x = x.reshape(batch, part, kv_heads, heads // kv_heads, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungroup(x):
    """Returns the inverse of `_group`."""
    batch, kv_heads, group, part = x.shape[:4]
    return jnp.moveaxis(x, 3, 1).reshape(batch, part, kv_heads * group, *x.shape[4:])


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _index(axis):
    return jnp.int32(0) if axis is None else jax.lax.axis_index(axis)


def _size(axis):
    return 1 if axis is None else jax.lax.axis_size(axis)


def _pass_on(values, axis):
    """Sends each value to the next device of the ring."""
    if axis is None:
        return values
    size = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), values)
