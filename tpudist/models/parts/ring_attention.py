"""Causal attention over a sequence that is split over devices: keys and values go around a ring.

Each device keeps the queries of its part of the sequence. In n - 1 turns it receives the keys and
values of every other part, and merges its attention to them (Liu et al. 2023, arXiv 2310.01889). In
the backward pass they go around again, and the gradients of keys and values follow them. All
communication is permutes between neighbors, which overlap with computation.

The parts are in ring order, "zigzag": the sequence has 2n chunks, and device i has the chunks i
("low") and 2n - 1 - i ("high"). Then no device computes a masked block, and all have the same work
(Brandon et al. 2023, arXiv 2311.09431, and the zigzag order of the library ring-flash-attention).
At each turn, device i has the keys of device j:

- Its high queries see the low keys of every device.
- If j < i, its low queries see the low keys too. If j > i, its high queries see the high keys too.

So each turn is two blocks of chunk x chunk without a mask. Only the first block, the attention of a
device's part to itself, is causal: in ring order, positions on a device still ascend.
"""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpudist.models.parts import attention_tiles

_NOTHING = -1e30  # logarithm of the weight of a block that does not count


class Blocks(Protocol):
    """Attention of some queries to some keys on one device; see `attention_tiles`. Hashable."""

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the result, and the logarithms of the sums of the weights."""
        ...

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        log_weight: jax.Array,
        out_dot_d_out: jax.Array,
        d_out: jax.Array,
        is_causal: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of queries, keys and values."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis: str | None,
    name: str | None = None,
    blocks: Blocks = attention_tiles,
) -> jax.Array:
    """Returns causal attention `[batch, part, heads, width]`. The mesh axis `axis` must be manual.

    Args:
        query: Part of the sequence on this device, in ring order, `[batch, part, heads, width]`.
        key: `[batch, part, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        axis: Mesh axis that splits the sequence; None if the sequence is not split. `part` must be
            even if the axis has more than one device.
        name: Name, for `remat` policies, of the tensors that the backward pass needs: the result
            and the sums of the softmax.
        blocks: Implementation of attention on one device.
    """
    return _forward(query, key, value, axis, name, blocks)[0]


def into_ring_order(x: jax.Array, axis: str, dim: int = 1) -> jax.Array:
    """Returns a device's part of `x` in ring order; before, the parts are in order."""
    size, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    first, second = jnp.split(x, 2, axis=dim)  # chunks 2 i and 2 i + 1
    even = jax.lax.ppermute(first, axis, [(i, _owner(2 * i, size)) for i in range(size)])
    odd = jax.lax.ppermute(second, axis, [(i, _owner(2 * i + 1, size)) for i in range(size)])
    # The low chunk of device i is chunk i. Its high chunk has the other parity.
    is_even = here % 2 == 0
    low, high = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate((low, high), axis=dim)


def out_of_ring_order(x: jax.Array, axis: str, dim: int = 1) -> jax.Array:
    """Returns the inverse of `into_ring_order`."""
    size, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    low, high = jnp.split(x, 2, axis=dim)
    is_even = here % 2 == 0
    even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    first = jax.lax.ppermute(even, axis, [(_owner(2 * i, size), i) for i in range(size)])
    second = jax.lax.ppermute(odd, axis, [(_owner(2 * i + 1, size), i) for i in range(size)])
    return jnp.concatenate((first, second), axis=dim)


def ring_positions(length: int, size: int) -> jax.Array:
    """Returns the position in the sequence of each element in ring order, on `size` devices."""
    part = length // size
    chunk = part // 2
    device, offset = jnp.divmod(jnp.arange(length), part)
    low = device * chunk + offset
    return jnp.where(offset < chunk, low, (2 * size - 2 - device) * chunk + offset)


def _owner(chunk: int, size: int) -> int:
    """Returns the device that has a chunk in ring order."""
    return min(chunk, 2 * size - 1 - chunk)


def _forward(query, key, value, axis, name, blocks):
    arrays = _heads_first(_scale(query), key, value)
    query_, key_, value_ = arrays
    out, log_weight = blocks.forward(query_, key_, value_, True)
    if _size(axis) > 1:
        out, log_weight = _forward_turns(arrays, (out, log_weight), axis, blocks)
    (out,) = _heads_last(out.astype(query.dtype))
    if name is not None:
        out, log_weight = (checkpoint_name(x, name) for x in (out, log_weight))
    return out, (query, key, value, out, log_weight)


def _forward_turns(arrays, own, axis, blocks):
    """Merges the attention to the keys of all other devices into that to a device's own keys."""
    queries, *keys = map(_halves, arrays)
    here, last = _index(axis), _size(axis) - 1
    low, high = zip(*(_halves(x) for x in (own[0].astype(jnp.float32), own[1])), strict=True)

    def turn(state, keys, step):
        low, high = state
        is_earlier = step <= here  # the keys of device `here - step`, or of a later one
        (key, _), (value, _) = keys
        high = _merge(high, *blocks.forward(queries[1], key, value, False))
        query, key, value = (_select(is_earlier, x) for x in (queries, *keys))
        out, log_weight = blocks.forward(query, key, value, False)
        low = _merge(low, out, jnp.where(is_earlier, log_weight, _NOTHING))
        high = _merge(high, out, jnp.where(is_earlier, _NOTHING, log_weight))
        return low, high

    def turn_and_pass_on(carry, step):
        state, keys = carry
        upcoming = _pass_on(keys, axis)  # runs while these are merged
        return (turn(state, keys, step), upcoming), None

    # The last turn is outside of the scan, because it passes nothing on.
    carry = ((low, high), _pass_on(keys, axis))
    (state, keys), _ = jax.lax.scan(turn_and_pass_on, carry, jnp.arange(1, last))
    low, high = turn(state, keys, last)
    out, log_weight = (jnp.concatenate(x, axis=2) for x in zip(low, high, strict=True))
    return out, log_weight


def _merge(state, out, log_weight):
    """Returns attention to the keys of two disjoint blocks, from the attention to each."""
    total, old = state
    new = jnp.logaddexp(old, log_weight)
    shares = (jnp.exp(x - new)[..., None] for x in (old, log_weight))
    return sum(a * b.astype(jnp.float32) for a, b in zip(shares, (total, out), strict=True)), new


def _backward(axis, _name, blocks, saved, cotangent):
    query, key, value, out, log_weight = saved
    # The gradient of a softmax is share * (d_share - sum of share * d_share). The sum is over all
    # keys, most of them on other devices. But it equals the product of the result and its gradient.
    product = cotangent.astype(jnp.float32) * out.astype(jnp.float32)
    out_dot_d_out = jnp.moveaxis(product.sum(-1), 2, 1)
    scaled, *keys, d_out = _heads_first(_scale(query), key, value, cotangent)
    queries = (scaled, log_weight, out_dot_d_out, d_out)
    own = _block_gradients(blocks, queries, keys, True)
    if _size(axis) > 1:
        own = _backward_turns(queries, keys, own, axis, blocks)
    d_query, d_key, d_value = _heads_last(*own)
    d_query = d_query * query.shape[-1] ** -0.5
    return tuple(x.astype(y.dtype) for x, y in zip((d_query, d_key, d_value), saved, strict=False))


def _block_gradients(blocks, queries, keys, is_causal):
    scaled, *others = queries
    found = blocks.backward(scaled, *keys, *others, is_causal)
    return [x.astype(jnp.float32) for x in found]


def _backward_turns(queries, keys, own, axis, blocks):
    """Adds the gradients for the keys of all other devices to those for a device's own keys."""
    queries, keys = (tuple(map(_halves, x)) for x in (queries, keys))
    high_queries = tuple(high for _, high in queries)
    d_query, *gradients = map(_halves, own)
    here, size = _index(axis), _size(axis)

    def turn(carry, step, is_last=False):
        d_query, keys, gradients = carry
        # These transfers run while the current keys are used. No device needs keys after the last
        # turn. The previous device had these keys one turn ago, and sends their gradients so far.
        upcoming = keys if is_last else _pass_on(keys, axis)
        arrived = _pass_on(gradients, axis)
        is_earlier = step <= here
        low_keys = tuple(low for low, _ in keys)
        d_high, *for_low = _block_gradients(blocks, high_queries, low_keys, False)
        selected, selected_keys = (
            tuple(_select(is_earlier, x) for x in y) for y in (queries, keys)
        )
        d_selected, *for_selected = _block_gradients(blocks, selected, selected_keys, False)
        d_query = _add(_add(d_query, (0, d_high)), _split(is_earlier, d_selected))
        gradients = [
            _add(_add(old, (low, 0)), _split(is_earlier, new))
            for old, low, new in zip(arrived, for_low, for_selected, strict=True)
        ]
        return (d_query, upcoming, gradients), None

    carry = (d_query, _pass_on(keys, axis), gradients)
    carry, _ = jax.lax.scan(turn, carry, jnp.arange(1, size - 1))
    (d_query, _, gradients), _ = turn(carry, size - 1, is_last=True)
    # After n - 1 turns a device has the keys of the next device. One more transfer returns the
    # gradients to the owners of the keys.
    return [jnp.concatenate(x, axis=2) for x in (d_query, *_pass_on(gradients, axis))]


causal_attention.defvjp(_forward, _backward)


def _halves(x):
    """Returns the low and the high chunk of `[batch, heads, part, ...]`."""
    return tuple(jnp.split(x, 2, axis=2))


def _select(is_low, halves):
    return jnp.where(is_low, *halves)


def _split(is_low, x):
    """Returns low and high chunks: one is `x`, and the other is 0."""
    return jnp.where(is_low, x, 0), jnp.where(is_low, 0, x)


def _add(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _scale(query):
    return (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)


def _heads_first(*arrays):
    return tuple(jnp.moveaxis(x, 2, 1) for x in arrays)


def _heads_last(*arrays):
    return tuple(jnp.moveaxis(x, 1, 2) for x in arrays)


def _index(axis):
    return jnp.int32(0) if axis is None else jax.lax.axis_index(axis)


def _size(axis):
    return 1 if axis is None else jax.lax.axis_size(axis)


def _pass_on(values, axis):
    """Sends each value to the next device of the ring."""
    size = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), values)
