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
from jax.typing import DTypeLike

from tpudist.models.parts import attention
from tpudist.models.parts.logical import constrain

EMPTY = -1
"""Position of a slot without a token."""

_TILE_ROWS, _LANES = 8, 128
_MAX_INT8, _SMALLEST = 127, 1e-30


def block_size(dtype: DTypeLike) -> int:
    """Returns how many slots are written together; the number of slots is a multiple of it.

    For an update of one slot, or of a part of a tile, the TPU compiler would choose a layout in
    which the attention reads the cache three times.
    """
    return 32 if jnp.dtype(dtype) == jnp.int8 else 16


def split_width(dtype: DTypeLike, width: int) -> int:
    """Returns the number of parts of a head. Each part is stored like a head.

    The update of wider integers has other tiles than the cache, so XLA would copy all of it.
    """
    is_split = jnp.dtype(dtype) == jnp.int8 and width % _LANES == 0
    return width // _LANES if is_split else 1


class Stored(NamedTuple):
    """Keys and values of all layers, `[layers, batch, kv_heads, slots, head_dim]` each.

    Heads of integers are split into parts (`split_width`): `[..., kv_heads * parts, slots, width]`.
    The scales of integers are `[layers, batch, kv_heads, slots]`; None if they are not quantized.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


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
    block = block_size(stored.keys.dtype)
    start = slot - slot % block if is_single else slot
    zero = jnp.zeros_like(layer)

    def update(array: jax.Array, new: jax.Array) -> jax.Array:
        """Returns `array` `[layers, batch, kv_heads, slots, ...]` with `new` in the slots."""
        place = (layer, zero, zero, start, *(zero for _ in array.shape[4:]))
        if is_single:
            is_new = (jnp.arange(block) == slot - start).reshape(block, *(1 for _ in place[4:]))
            shape = (*new.shape[:3], block, *new.shape[4:])
            new = jnp.where(is_new, new, jax.lax.dynamic_slice(array, place, shape))
        array = jax.lax.dynamic_update_slice(array, new, place)
        return constrain(array, None, "batch", "kv_heads", *(None for _ in place[3:]))

    def update_both(
        array: jax.Array, scales: jax.Array | None, new: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        new = jnp.swapaxes(new, 1, 2)[None]  # [1, batch, kv_heads, length, width]
        if scales is not None:
            new = new.astype(jnp.float32)
            largest = jnp.abs(new).max(axis=-1, keepdims=True)
            # Rounded first, so that integers and stored scales match.
            scale = (jnp.maximum(largest, _SMALLEST) / _MAX_INT8).astype(scales.dtype)
            new = jnp.round(new / scale)
            scales = update(scales, scale[..., 0])
        one, batch, _, length, _ = new.shape
        parts = new.reshape(*new.shape[:4], -1, array.shape[-1])
        new = jnp.swapaxes(parts, 3, 4).reshape(one, batch, -1, length, array.shape[-1])
        return update(array, new.astype(array.dtype)), scales

    keys, key_scales = update_both(stored.keys, stored.key_scales, key)
    values, value_scales = update_both(stored.values, stored.value_scales, value)
    return Stored(keys, values, key_scales, value_scales)


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
    keys, values, key_scales, value_scales = (
        None if x is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        for x in stored
    )
    assert keys is not None
    assert values is not None
    distance = places.positions[:, :, None] - places.in_slots[:, None]  # [batch, length, slots]
    mask = (distance >= 0) & (places.in_slots >= 0)[:, None]
    if scores.window is not None:
        within = distance < scores.window
        mask &= within if has_window is None else within | ~has_window
    batch, length, heads, width = query.shape
    num_keys = keys.shape[1] * keys.shape[3] // width
    grouped = query.reshape(batch, length, num_keys, -1, width)
    num_queries = grouped.shape[3]
    if attention.platform() == "tpu":
        # Rows of zeros up to a tile: with fewer, the TPU compiler multiplies on the vector unit, or
        # less well on the matrix unit. On v5e it estimates 1.26 times the time of the reads, not
        # 1.62 (one query per key) or 1.44 (four).
        missing = -num_queries % _TILE_ROWS
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
        if sinks is not None:
            sinks = jnp.pad(sinks.reshape(num_keys, -1), ((0, 0), (0, missing)))
    # Integers are cast inside of the products, which the scales of their slots multiply. Each part
    # of a head has its own products: with parts as a dim of its own, XLA would copy the keys.
    num_parts, dtype = keys.shape[1] // num_keys, grouped.dtype
    parts = grouped.reshape(*grouped.shape[:4], num_parts, -1)
    parts = jnp.swapaxes(parts, 3, 4).reshape(batch, length, -1, *grouped.shape[3:4], keys.shape[3])
    products = jnp.einsum(
        "bqkgd,bksd->bkgqs", parts, keys.astype(dtype), preferred_element_type=jnp.float32
    )
    products = products.reshape(batch, num_keys, num_parts, *products.shape[2:]).sum(axis=2)
    products *= width**-0.5 if scores.scale is None else scores.scale
    products *= _of_products(key_scales)
    share = attention.shares(products, mask[:, None, None], scores.cap, sinks)
    share = (share * _of_products(value_scales)).astype(dtype)
    share = jnp.repeat(share, num_parts, axis=1)
    out = jnp.einsum("bkgqs,bksd->bqkgd", share, values.astype(dtype))
    out = jnp.swapaxes(out.reshape(batch, length, num_keys, num_parts, *out.shape[3:]), 3, 4)
    out = out.reshape(*grouped.shape)
    return out[:, :, :, :num_queries].reshape(query.shape).astype(query.dtype)


def _of_products(scales: jax.Array | None) -> jax.Array | float:
    """Returns scales `[batch, kv_heads, slots]` in the dims of the products; 1 without scales."""
    return 1.0 if scales is None else scales[:, :, None, None]
