"""Causal attention with JAX's Splash kernel, which never stores all scores of a sequence.

The kernel is for TPUs. `interpret=True` computes the same result on other devices, slowly.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
)

_LANES = 128  # tiles of the kernel are multiples of this
# MaxText's default (`sa_block_q` in its base.yml). The scores of such a tile take 1 MiB. Much
# larger tiles exceed the 16 MiB of VMEM that XLA gives a kernel by default.
_BLOCK = 512
# The backward pass computes the gradient of the queries once per part of the keys and adds the
# results. Few parts save memory traffic, many parts skip more of the masked scores. With at most
# 2048 keys per part (MaxText's recipes for v6e) keys, values and their gradients fit into VMEM.
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
    """Returns the attention of each position to itself and earlier ones, in `query`'s shape.

    Args:
        query: `[batch, length, heads, width]`, on one device.
        key: `[batch, length, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        block: Rows and columns of a tile, a multiple of 128; by default chosen by the length.
        backward_block: Keys per part of the backward pass, a multiple of `block`; by default
            chosen by the length.
        name: Name for remat policies of the values that the backward pass needs: the result, and
            the sums of the softmax.
        interpret: Whether to interpret the kernel.
        scale: Factor of the scores; by default `width ** -0.5`.
        cap: Bound of the scores, by a tanh; None for no bound.
        window: Number of positions to attend to, including itself; None for all.

    Raises:
        ValueError: If `block` is not a positive multiple of 128 or does not divide
            `backward_block`, or `window` is not positive.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a position attends at least to itself. Use at least 1.")
    length, heads = query.shape[1:3]
    block, backward_block = _block_sizes(length, block, backward_block)
    # Padding is at the end, and no position attends to a later one.
    padding = -length % backward_block
    pads = ((0, 0), (0, padding), (0, 0), (0, 0))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query = (query.astype(jnp.float32) * factor).astype(query.dtype)
    query, key, value = (
        jnp.moveaxis(jnp.pad(x, pads) if padding else x, 2, 1) for x in (query, key, value)
    )
    options = _Options(heads, block, backward_block, name, interpret, cap, window)
    out: Any = jax.vmap(_kernel(length + padding, options))(query, key, value)
    out = jnp.moveaxis(out, 1, 2)
    return out[:, :length] if padding else out


def _block_sizes(length: int, block: int | None, backward_block: int | None) -> tuple[int, int]:
    if block is None:  # the largest tile that needs the least padding
        padded = -(-length // _LANES) * _LANES
        block = next(size for size in range(_BLOCK, 0, -_LANES) if padded % size == 0)
    if block < 1 or block % _LANES:
        raise ValueError(
            f"A tile of Splash attention must have a multiple of {_LANES} rows; got {block}. Use "
            f"{max(1, -(-block // _LANES)) * _LANES}."
        )
    if backward_block is None:  # a divisor of the length, in tiles
        tiles = -(-length // block)
        largest = max(1, min(tiles // _BACKWARD_PARTS, _LARGEST_PART // block))
        backward_block = block * next(n for n in range(largest, 0, -1) if tiles % n == 0)
    if backward_block % block:
        raise ValueError(
            f"The backward pass of Splash attention must take a whole number of tiles of {block} "
            f"keys at a time; got {backward_block}. Use {-(-backward_block // block) * block}."
        )
    return block, backward_block


@dataclasses.dataclass(frozen=True)
class _Options:
    heads: int
    block: int
    backward_block: int
    name: str | None
    interpret: bool
    cap: float | None
    window: int | None


def _kernel(length: int, options: _Options) -> splash.SplashAttentionKernel:
    size, block = (length, length), options.block
    if options.window is None:
        mask = masks.CausalMask(size)
    else:
        mask = masks.LocalMask(size, (options.window - 1, 0), 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=options.backward_block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * options.heads),
        block_sizes=sizes,
        attn_logits_soft_cap=options.cap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=options.name,
        interpret=options.interpret,
    )
