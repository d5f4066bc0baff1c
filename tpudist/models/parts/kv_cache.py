"""Keys and values of earlier tokens, which decoding reads again for each new token.

All layers are in two arrays, which a loop over the layers carries and updates in place. As inputs
and outputs of a scan, XLA would copy them at each layer. The new tokens of all sequences go to the
same slots, so that an update is one slice; each slot has the position of its token in its own
sequence. So sequences may have different lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpudist.models.parts import attention
from tpudist.models.parts.logical import constrain

EMPTY = -1
"""Position of a slot without a token."""

BLOCK = 16
"""Number of slots that are written together; the number of slots is a multiple of it. For an update
of one slot, the TPU compiler would choose a layout in which the attention reads the cache three
times."""
_TILE_ROWS = 8


class Stored(NamedTuple):
    """Keys and values of all layers, `[layers, batch, kv_heads, slots, head_dim]` each."""

    keys: jax.Array
    values: jax.Array


class Places(NamedTuple):
    """Places of tokens in their sequences."""

    first_slot: jax.Array
    """`[]`, slot of the first new token."""
    positions: jax.Array
    """`[batch, length]`, positions of the new tokens; `EMPTY` for padding."""
    in_slots: jax.Array
    """`[batch, slots]`, positions of all tokens, including the new ones; `EMPTY` for none."""


def write(
    stored: Stored, layer: jax.Array, places: Places, key: jax.Array, value: jax.Array
) -> Stored:
    """Returns the stored arrays with the new keys and values `[batch, length, kv_heads, width]`."""

    slot = places.first_slot
    is_single = key.shape[1] == 1
    start = slot - slot % BLOCK if is_single else slot

    def update(array: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.swapaxes(new, 1, 2)[None].astype(array.dtype)
        zero = jnp.zeros_like(layer)
        place = (layer, zero, zero, start, zero)
        if is_single:
            shape = (*new.shape[:3], BLOCK, new.shape[-1])
            is_new = jnp.arange(BLOCK)[:, None] == slot - start
            new = jnp.where(is_new, new, jax.lax.dynamic_slice(array, place, shape))
        array = jax.lax.dynamic_update_slice(array, new, place)
        return constrain(array, None, "batch", "kv_heads", None, None)

    return Stored(update(stored.keys, key), update(stored.values, value))


def attend(
    query: jax.Array,
    stored: Stored,
    layer: jax.Array,
    places: Places,
    scores: attention.Scores,
    has_window: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns attention of `query` `[batch, length, heads, width]` to the slots of a layer.

    `attention.attend` documents the other arguments.
    """
    keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stored)
    distance = places.positions[:, :, None] - places.in_slots[:, None]  # [batch, length, slots]
    mask = (distance >= 0) & (places.in_slots >= 0)[:, None]
    if scores.window is not None:
        within = distance < scores.window
        mask &= within if has_window is None else within | ~has_window
    batch, length, heads, width = query.shape
    grouped = query.reshape(batch, length, keys.shape[1], -1, width)
    num_queries = grouped.shape[3]
    if attention.platform() == "tpu":
        # Rows of zeros up to a tile: with fewer, the TPU compiler multiplies on the vector unit, or
        # less well on the matrix unit. On v5e it estimates 1.26 times the time of the reads, not
        # 1.62 (one query per key) or 1.44 (four).
        missing = -num_queries % _TILE_ROWS
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
        if sinks is not None:
            sinks = jnp.pad(sinks.reshape(keys.shape[1], -1), ((0, 0), (0, missing)))
    products = jnp.einsum(
        "bqkgd,bksd->bkgqs", grouped, keys, preferred_element_type=jnp.float32
    ) * (width**-0.5 if scores.scale is None else scores.scale)
    share = attention.shares(products, mask[:, None, None], scores.cap, sinks)
    out = jnp.einsum("bkgqs,bksd->bqkgd", share.astype(values.dtype), values)
    out = out[:, :, :, :num_queries]
    return out.reshape(query.shape).astype(query.dtype)
