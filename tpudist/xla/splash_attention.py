"""Causal attention by JAX's Splash kernel, which never holds the scores of a sequence in memory.

The kernel is for TPUs; elsewhere it is interpreted, which is slow and computes the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
)

_LANES = 128  # the kernel's tiles are multiples of it
# What MaxText starts from (`sa_block_q` in its base.yml). The scores of such a tile take 1 MiB;
# much larger ones exceed the 16 MiB of VMEM that XLA gives a kernel unless told otherwise.
_BLOCK = 512
# The backward pass makes the gradient of the queries once per `_BACKWARD_PARTS` of the keys, and
# adds them up: few parts save memory traffic, many parts skip more of what is masked out. With a
# part of 2048 keys at most (MaxText's recipes for v6e) keys, values and their gradients fit.
_BACKWARD_PARTS = 4
_LARGEST_PART = 2048


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block: int | None = None,
    backward_block: int | None = None,
    name: str | None = None,
    interpret: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """What each position gathers from itself and those before it, `[batch, length, heads, width]`.

    Args:
        query: `[batch, length, heads, width]`, on one device.
        key: `[batch, length, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: As `key`.
        block: Rows and columns of a tile, a multiple of 128; None for what suits the length.
        backward_block: Keys that the backward pass takes at a time, a multiple of `block`; None for
            what suits the length.
        name: What remat policies call what the backward pass needs: the result, and the sums of
            the softmax.
        interpret: Whether to interpret the kernel, for want of a TPU.
        scale: What products of queries and keys are multiplied by; None for `width ** -0.5`.
        cap: Bound of the scores, by a tanh; None for none.
        window: How many positions one gathers from, with itself; None for all before it.

    Raises:
        ValueError: `block` is not a multiple of 128, or does not divide `backward_block`.
    """
    length, heads = query.shape[1:3]
    block = _block(length) if block is None else block
    if block % _LANES:
        raise ValueError(
            f"A tile of Splash attention must have a multiple of {_LANES} rows; got {block}. Use "
            f"{-(-block // _LANES) * _LANES}."
        )
    padding = -length % block
    if backward_block is None:
        backward_block = _part(length + padding, block)
    if backward_block % block:
        raise ValueError(
            f"The backward pass of Splash attention must take a whole number of tiles of {block} "
            f"keys at a time; got {backward_block}. Use {-(-backward_block // block) * block}."
        )
    padding = -length % backward_block
    # Nothing before the end attends to what is after it.
    pads = ((0, 0), (0, padding), (0, 0), (0, 0))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query = (query.astype(jnp.float32) * factor).astype(query.dtype)
    query, key, value = (
        jnp.moveaxis(jnp.pad(x, pads) if padding else x, 2, 1) for x in (query, key, value)
    )
    kernel = _kernel(length + padding, heads, block, backward_block, name, interpret, cap, window)
    out: Any = jax.vmap(kernel)(query, key, value)
    out = jnp.moveaxis(out, 1, 2)
    return out[:, :length] if padding else out


def _block(length: int) -> int:
    """The largest tile that pads `length` the least."""
    padded = -(-length // _LANES) * _LANES
    return next(size for size in (_BLOCK, 384, 256, 128) if padded % size == 0)


def _part(length: int, block: int) -> int:
    """How many keys the backward pass takes at a time: a divisor of `length`, in tiles."""
    tiles = length // block
    most = max(1, min(tiles // _BACKWARD_PARTS, _LARGEST_PART // block))
    return block * next(n for n in range(most, 0, -1) if tiles % n == 0)


def _kernel(
    length: int,
    heads: int,
    block: int,
    backward_block: int,
    name: str | None,
    interpret: bool,
    cap: float | None,
    window: int | None,
) -> splash.SplashAttentionKernel:
    size = (length, length)
    if window is None:
        of_head = masks.CausalMask(size)
    else:
        of_head = masks.LocalMask(size, (window - 1, 0), 0)
    mask = masks.MultiHeadMask([of_head] * heads)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=backward_block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha(
        mask,
        block_sizes=sizes,
        attn_logits_soft_cap=cap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=name,
        interpret=interpret,
    )
