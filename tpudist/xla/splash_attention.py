"""Attention with JAX's Splash kernel, which never stores all scores of a sequence.

The kernel is for TPUs. `interpret=True` computes the same result on other devices, slowly.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
    splash_attention_mask_info as mask_info,
)

LANES = 128
"""The sizes of the tiles of the kernel are multiples of this number."""
BLOCK = 512
"""Most rows and columns of a tile by default: MaxText's default (`sa_block_q` in its base.yml).

The scores of such a tile take 1 MiB. A kernel with tiles of 1024, for heads of width 256, or of
2048 exceeds the 16 MiB of VMEM that XLA gives a kernel, unless an option of the compiler changes
that.
"""
# The backward pass computes the gradient of the queries once per part of the keys and adds the
# results. Few parts save memory traffic, many parts skip more of the masked scores. With at most
# 2048 keys per part (MaxText's recipes for v6e) keys, values and their gradients fit into VMEM.
# That is for heads of width 128; wider heads have fewer keys per part.
_BACKWARD_PARTS = 4
_LARGEST_PART = 2048
# A kernel of the backward pass writes the gradient of the queries once per part. For a whole long
# sequence these copies would grow with the square of its length.
_MOST_PARTS = 8
_NO_MASK = mask_info.MaskInfo(None, None, None, None, None)
_LAYOUT = splash.QKVLayout.HEAD_DIM_MINOR


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
    *,
    block: int | None = None,
    backward_block: int | None = None,
    fused_backward: bool = True,
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
        sinks: `[heads]`, a score without a value in the softmax of each query; None for none.
        block: Rows and columns of a tile, a multiple of 128; by default chosen by the length.
        backward_block: Keys per part of the backward pass, a multiple of `block`; by default
            chosen by the length.
        fused_backward: Whether one kernel computes all gradients. Two kernels, one of them for the
            gradient of the queries, compute the weights twice, but store no partial sums.
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
    length, heads, width = query.shape[1:]
    block, backward_block = _block_sizes(length, width, block, backward_block, _BACKWARD_PARTS)
    # Padding is at the end, and no position attends to a later one.
    padding = -length % backward_block
    pads = ((0, 0), (0, padding), (0, 0), (0, 0))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query = (query.astype(jnp.float32) * factor).astype(query.dtype)
    query, key, value = (
        jnp.moveaxis(jnp.pad(x, pads) if padding else x, 2, 1) for x in (query, key, value)
    )
    options = _Options(heads, block, backward_block, name, interpret, cap, window, fused_backward)
    kernel = _kernel(length + padding, options)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> Any:
        return kernel(query, key, value, sinks=sinks)

    out: Any = jax.vmap(attend, in_axes=(0, 0, 0, None))(query, key, value, sinks)
    out = jnp.moveaxis(out, 1, 2)
    return out[:, :length] if padding else out


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Attention of some queries to some keys, for `models.parts.ring_attention`.

    The lengths of queries and keys are equal, and multiples of 128 and of the tiles.
    """

    block: int | None = None
    """Rows and columns of a tile; see `causal_attention`."""
    backward_block: int | None = None
    """Keys per part of the backward pass; see `causal_attention`."""
    interpret: bool = False
    """Whether to interpret the kernel."""

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the result, and the logarithms of the sums of the weights.

        See `models.parts.attention_tiles.forward`.
        """
        options = self._options(query, is_causal)
        if is_causal:
            kernel = _kernel(query.shape[2], options, save_residuals=True)
        else:
            kernel = _kernel_without_mask(options)
        out, (log_weight,) = jax.vmap(kernel)(query, key, value)
        return out, log_weight

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
        """Returns the gradients of queries, keys and values.

        See `models.parts.attention_tiles.backward`.
        """
        queries, keys = (query, log_weight, out_dot_d_out, d_out), (key, value)
        chunk = self._chunk(query, is_causal)
        if chunk == query.shape[2]:
            return self._backward(queries, keys, is_causal)
        queries, keys = (tuple(_cut(x, chunk) for x in y) for y in (queries, keys))
        count = len(keys[0])
        # One kernel for all chunks on the diagonal, and one in a loop over the other pairs.
        if is_causal:
            rows = (tuple(jnp.concatenate(x) for x in y) for y in (queries, keys))
            found = self._backward(*rows, is_causal)
            totals = tuple(x.reshape(count, -1, *x.shape[1:]).astype(jnp.float32) for x in found)
        else:
            totals = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries[0], *keys))

        def add_pair(
            totals: tuple[jax.Array, ...], pair: jax.Array
        ) -> tuple[tuple[jax.Array, ...], None]:
            of_queries, of_keys = pair
            found = self._backward(
                tuple(_take(x, of_queries) for x in queries),
                tuple(_take(x, of_keys) for x in keys),
                False,
            )
            places = (of_queries, of_keys, of_keys)
            return tuple(map(_add_at, totals, places, found)), None

        pairs = [(i, j) for i in range(count) for j in range(i if is_causal else count)]
        totals, _ = jax.lax.scan(add_pair, totals, jnp.array(pairs))
        d_query, d_key, d_value = (jnp.concatenate(tuple(x), axis=2) for x in totals)
        return d_query, d_key, d_value

    def _chunk(self, query: jax.Array, is_causal: bool) -> int:
        """Returns the number of queries, and of keys, of one kernel of the backward pass."""
        size = self._options(query, is_causal).backward_block
        parts = query.shape[2] // size
        return size * next(n for n in range(min(parts, _MOST_PARTS), 0, -1) if parts % n == 0)

    def _backward(
        self, queries: tuple[jax.Array, ...], keys: tuple[jax.Array, ...], is_causal: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, log_weight, out_dot_d_out, d_out = queries
        key, value = keys
        options = self._options(query, is_causal)
        mask, mask_function = _NO_MASK, None
        if is_causal:
            kernel = _kernel(query.shape[2], options)
            assert kernel.dkv_mask_info is not None, "its block sizes have a backward pass"
            mask, mask_function = kernel.dkv_mask_info, kernel.kwargs["mask_function"]

        # JAX's public function computes the sums of weights again, of only these keys, and does not
        # accept those of all keys.
        def run(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            log_weight: jax.Array,
            product: jax.Array,
            d_out: jax.Array,
        ) -> Any:
            return splash._splash_attention_bwd_dkv(
                query, key, value, None, None, log_weight, d_out, product,
                bq=options.block,
                bkv=options.backward_block,
                bkv_compute=options.block,
                is_mqa=False,
                mask_info=mask,
                mask_value=splash.DEFAULT_MASK_VALUE,
                attn_logits_soft_cap=None,
                use_fused_bwd_kernel=True,
                q_layout=_LAYOUT,
                k_layout=_LAYOUT,
                v_layout=_LAYOUT,
                mask_function=mask_function,
                interpret=self.interpret,
            )  # fmt: skip

        return jax.vmap(run)(query, key, value, log_weight, out_dot_d_out, d_out)

    def _options(self, query: jax.Array, is_causal: bool) -> "_Options":
        heads, length, width = query.shape[1:]
        # Without a mask there is nothing to skip, so few parts are best.
        parts = _BACKWARD_PARTS if is_causal else 1
        sizes = _block_sizes(length, width, self.block, self.backward_block, parts)
        return _Options(heads, *sizes, None, self.interpret, None, None)


def _cut(x: jax.Array, chunk: int) -> jax.Array:
    """Returns the chunks `[chunks, batch, heads, chunk, ...]` of `[batch, heads, length, ...]`."""
    return jnp.stack(jnp.split(x, x.shape[2] // chunk, axis=2))


def _take(chunks: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunks, place, keepdims=False)


def _add_at(total: jax.Array, place: jax.Array, x: jax.Array) -> jax.Array:
    new = _take(total, place) + x.astype(total.dtype)
    return jax.lax.dynamic_update_index_in_dim(total, new, place, 0)


def _block_sizes(
    length: int, width: int, block: int | None, backward_block: int | None, parts: int
) -> tuple[int, int]:
    if block is None:  # the largest tile that needs the least padding
        padded = -(-length // LANES) * LANES
        block = next(size for size in range(BLOCK, 0, -LANES) if padded % size == 0)
    if block < 1 or block % LANES:
        raise ValueError(
            f"A tile of Splash attention must have a multiple of {LANES} rows; got {block}. Use "
            f"{max(1, -(-block // LANES)) * LANES}."
        )
    if backward_block is None:  # a divisor of the length, in tiles
        tiles = -(-length // block)
        largest_part = _LARGEST_PART * LANES // max(width, LANES)
        largest = max(1, min(tiles // parts, largest_part // block))
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
    fused_backward: bool = True


def _kernel(
    length: int, options: _Options, save_residuals: bool = False
) -> splash.SplashAttentionKernel:
    size = (length, length)
    if options.window is None:
        mask = _CausalMask(size)
    else:
        mask = _LocalMask(size, (options.window - 1, 0), 0)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * options.heads),
        block_sizes=_splash_sizes(options),
        save_residuals=save_residuals,
        attn_logits_soft_cap=options.cap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=options.name,
        interpret=options.interpret,
    )


def _kernel_without_mask(options: _Options) -> splash.SplashAttentionKernel:
    # Not of `masks.FullMask`, which gives a kernel tables of its blocks and a masked block's work.
    return splash.SplashAttentionKernel(
        _NO_MASK,
        None,
        None,
        block_sizes=_splash_sizes(options),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=None,
        interpret=options.interpret,
    )


def _splash_sizes(options: _Options) -> splash.BlockSizes:
    block = options.block
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=options.backward_block,
        block_kv_dkv_compute=block,
        block_q_dq=None if options.fused_backward else block,
        block_kv_dq=None if options.fused_backward else block,
        use_fused_bwd_kernel=options.fused_backward,
    )


class _LazyTiles(masks.Mask):
    """Tiles of a mask that are computed only on its edges.

    JAX asks for all tiles of a mask, to see which are empty and which are full. Elementwise, that
    takes minutes at 131,072 positions. A tile that is empty or full has one element here.
    """

    def _window(self) -> float:
        return math.inf

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = idx
        farthest, nearest = rows.stop - 1 - columns.start, rows.start - (columns.stop - 1)
        window = self._window()
        if farthest < 0 or nearest >= window:
            return np.zeros((1, 1), bool)
        if nearest >= 0 and farthest < window:
            return np.ones((1, 1), bool)
        return super().__getitem__(idx)


class _CausalMask(_LazyTiles, masks.CausalMask):
    """Mask that keeps all keys up to the position of a query."""


class _LocalMask(_LazyTiles, masks.LocalMask):
    """Mask that keeps the last keys up to the position of a query."""

    def _window(self) -> float:
        before, _ = self.window_size
        return math.inf if before is None else before + 1
