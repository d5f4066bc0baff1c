"""Causal attention, by the method that suits the devices; all methods have the same results.

`auto` chooses ring attention if a mesh axis splits the sequence, Splash attention (a kernel that
never keeps the scores of a sequence) on TPUs, and `jax.nn.dot_product_attention` elsewhere. On
TPUs, ring attention runs the kernel for each of its blocks.

XLA cannot partition kernels. So they run in a `jax.shard_map` over the axes inside a replica: the
logical-axis rules of the strategy split batch and heads, and each device computes its share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tpudist.models.parts import attention_tiles, ring_attention
from tpudist.models.parts.logical import (
    automatic_axes,
    inner_axes,
    split_over,
    with_single_axes,
)
from tpudist.programs.rows.row_kernels import rowwise
from tpudist.xla import splash_attention

Kernel = Callable[..., jax.Array]  # of queries, keys, values and perhaps sinks
_NAME = "attention"  # for remat policies


@dataclass(frozen=True)
class Scores:
    """Options of the scores before the softmax."""

    scale: float | None = None
    """Factor of the products of queries and keys; None for `width ** -0.5`."""
    cap: float | None = None
    """Bound of the absolute scores, by a tanh; None for no bound."""
    window: int | None = None
    """Number of positions that a token attends to, including itself; None for all before it."""

    def without_window(self) -> Scores:
        """Returns the options for a layer without a window."""
        return dataclasses.replace(self, window=None)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    method: str = "auto",
    splash_block: int | None = None,
    splash_backward_block: int | None = None,
    splash_fused_backward: bool = True,
    scores: Scores = Scores(),
    has_window: jax.Array | None = None,
    is_in_ring_order: bool = False,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns causal attention `[batch, length, heads, width]`.

    Args:
        query: `[batch, length, heads, width]`.
        key: `[batch, length, kv_heads, width]`; `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        method: "auto", "dot_product", "splash" or "ring".
        splash_block: Rows and columns of the tiles of Splash attention.
        splash_backward_block: Number of keys per tile of its backward pass.
        splash_fused_backward: Whether one kernel computes all its gradients, or two.
        scores: Options of the scores.
        has_window: Boolean `[]`, perhaps traced by a scan over layers: whether the window of
            `scores` applies. None means that it applies.
        is_in_ring_order: Whether the positions have the order of `choose_ring_order`.
        sinks: `[heads]`, a score that takes a share of the softmax of each query and has no value;
            None for none.

    Raises:
        ValueError: If the method is unknown or does not support these scores.
    """
    length = query.shape[1]
    if method == "auto":
        method = choose_method(length)
    if method == "dot_product":
        out = _dot_product(query, key, value, scores, has_window, sinks)
        return checkpoint_name(out, _NAME)
    # The other methods name the tensors that their backward passes need, for `remat`. A name for
    # the result here would save it a second time.
    if method == "ring":
        _check_ring(scores, sinks)
        return _ring(query, key, value, splash_block, splash_backward_block, is_in_ring_order)
    if method == "splash":
        run = functools.partial(
            _splash,
            block=splash_block,
            backward_block=splash_backward_block,
            fused_backward=splash_fused_backward,
        )
        windowed = functools.partial(run, scores=scores)
        arrays = (query, key, value) if sinks is None else (query, key, value, sinks)
        if has_window is None:
            return windowed(*arrays)
        # The mask is a part of the kernel, so each kind of layer needs its own.
        whole = functools.partial(run, scores=scores.without_window())
        return jax.lax.cond(has_window, windowed, whole, *arrays)
    raise ValueError(f"attention={method!r}: it must be 'auto', 'dot_product', 'splash' or 'ring'.")


def choose_method(length: int) -> str:
    """Returns the method of "auto" for this mesh and sequences of `length`."""
    # First, on every platform: the other methods would gather the whole sequence on each device.
    if split_over("sequence", length):
        return "ring"
    if platform() != "tpu":
        return "dot_product"
    # Without a mesh, XLA may split the program over any devices, which breaks a kernel.
    is_unknown = jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1
    return "dot_product" if is_unknown else "splash"


def platform() -> str:
    """Returns the platform of the current mesh, even if its devices are only described."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _dot_product(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    has_window: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns attention by matrix products; JAX has a function for that without a cap and sinks."""
    # Three cases, from the fastest to the most general: JAX's function with its own mask, the same
    # with an explicit mask, and products that can be capped between scaling and masking.
    is_plain = scores.cap is None and sinks is None
    if is_plain and has_window is None:
        local = None if scores.window is None else (scores.window - 1, 0)
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, scale=scores.scale, local_window_size=local
        )
    batch, length, heads, width = query.shape
    distance = jnp.arange(length)[:, None] - jnp.arange(length)  # [queries, keys]
    mask = distance >= 0
    if scores.window is not None:
        within = distance < scores.window
        mask &= within if has_window is None else within | ~has_window
    if is_plain:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scores.scale)
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    products = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32) * (
        width**-0.5 if scores.scale is None else scores.scale
    )
    share = shares(products, mask, scores.cap, sinks).astype(value.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", share, value).reshape(batch, length, heads, width)


def shares(
    products: jax.Array, mask: jax.Array, cap: float | None, sinks: jax.Array | None
) -> jax.Array:
    """Returns the softmax of scaled products `[batch, kv_heads, heads / kv_heads, queries, keys]`.

    Args:
        products: Float32 products of queries and keys.
        mask: Whether a query sees a key, of a shape that broadcasts; each sees at least one.
        cap: See `Scores`.
        sinks: See `attend`.
    """
    # Masked after the cap, which would turn -inf into -cap.
    if cap is not None:
        products = cap * jnp.tanh(products / cap)
    masked = jnp.where(mask, products, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(masked.dtype).reshape(1, masked.shape[1], -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*masked.shape[:-1], 1))
        masked = jnp.concatenate((masked, sink), axis=-1)
    return jax.nn.softmax(masked, axis=-1)[..., : products.shape[-1]]


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *sinks: jax.Array,
    block: int | None,
    backward_block: int | None,
    fused_backward: bool,
    scores: Scores,
) -> jax.Array:
    kernel = functools.partial(
        splash_attention.causal_attention,
        block=block,
        backward_block=backward_block,
        fused_backward=fused_backward,
        name=_NAME,
        # Elsewhere the kernel is interpreted, which is slow and only for tests.
        interpret=platform() != "tpu",
        scale=scores.scale,
        cap=scores.cap,
        window=scores.window,
    )
    return _run_on_each_device(kernel, query, key, value, *sinks, sequence=())


def _check_ring(scores: Scores, sinks: jax.Array | None) -> None:
    options = {**vars(scores), "sinks": sinks}
    if unsupported := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            "Ring attention, for a sequence that a mesh axis splits, supports only plain scores; "
            f"the scores of this model use {', '.join(unsupported)}. Split the batch or the heads "
            "instead: replica_axes without 'sequence'."
        )


def _ring(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block: int | None,
    backward_block: int | None,
    is_in_ring_order: bool,
) -> jax.Array:
    length = query.shape[1]
    over = _ring_axes(length)
    axis = over[0] if over else None
    blocks: ring_attention.Blocks = attention_tiles
    if platform() == "tpu":
        blocks = splash_attention.SplashBlocks(block, backward_block)

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = (query, key, value)
        if axis is None or is_in_ring_order:
            return ring_attention.causal_attention(*arrays, axis, _NAME, blocks)
        arrays = (ring_attention.into_ring_order(x, axis) for x in arrays)
        out = ring_attention.causal_attention(*arrays, axis, _NAME, blocks)
        return ring_attention.out_of_ring_order(out, axis)

    # Padding is at the end, and no position attends to a later one.
    padding = -length % _ring_multiple(length, block, backward_block)
    arrays = (query, key, value)
    if padding:
        arrays = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in arrays)
    out = _run_on_each_device(kernel, *arrays, sequence=over)
    return out[:, :length] if padding else out


def _ring_axes(length: int) -> tuple[str, ...]:
    """Returns the mesh axis of the ring, or no axis."""
    over = split_over("sequence", length)
    if len(over) > 1:
        raise ValueError(
            "Ring attention uses one mesh axis, but the logical-axis rules split 'sequence' over "
            f"{over}. Map it to one of them."
        )
    return over


def _ring_multiple(length: int, block: int | None, backward_block: int | None) -> int:
    """Returns the divisor that ring attention needs in a length: two chunks per device."""
    over, inner = _ring_axes(length), inner_axes()
    num_chunks = 2 * inner[over[0]] if over else 1
    is_kernel = platform() == "tpu"
    return num_chunks * (backward_block or block or splash_attention.LANES if is_kernel else 1)


@dataclass(frozen=True)
class RingOrder:
    """Order of a sequence in which ring attention needs no exchange of its own.

    A model moves its activations into this order once, and not at each layer.
    """

    axis: str
    size: int

    def into(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream `x` `[batch, length, width]` in this order."""
        return self._exchange(x, ring_attention.into_ring_order)

    def out_of(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream `x` in the order of the sequence."""
        return self._exchange(x, ring_attention.out_of_ring_order)

    def positions(self, length: int) -> jax.Array:
        """Returns the position in the sequence of each element, `[length]`."""
        return ring_attention.ring_positions(length, self.size)

    def _exchange(self, x: jax.Array, exchange: Callable[..., jax.Array]) -> jax.Array:
        run = functools.partial(_exchange_shares, exchange, self.axis)
        return rowwise(run)(x)


def _exchange_shares(exchange: Callable[..., jax.Array], axis: str, x: jax.Array) -> jax.Array:
    spec = PartitionSpec(
        with_single_axes(split_over("batch", x.shape[0])),
        axis,
        split_over("residual", x.shape[2]) or None,
    )
    return jax.shard_map(
        functools.partial(exchange, axis=axis),
        in_specs=spec,
        out_specs=spec,
        axis_names=set(automatic_axes()),
        check_vma=False,
    )(x)


def choose_ring_order(
    length: int, method: str, block: int | None, backward_block: int | None
) -> RingOrder | None:
    """Returns the order for a model with these options of `attend`; None for the usual order."""
    method = choose_method(length) if method == "auto" else method
    over = _ring_axes(length) if method == "ring" else ()
    if not over or length % _ring_multiple(length, block, backward_block):
        return None
    return RingOrder(over[0], inner_axes()[over[0]])


def _run_on_each_device(
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *sinks: jax.Array,
    sequence: tuple[str, ...],
) -> jax.Array:
    """Runs `kernel` on the share of each device: of batch, heads, and with a ring the sequence."""
    run = functools.partial(_run_on_each_share, kernel, sequence)
    in_dims = (0, 0, 0, *(None for _ in sinks))
    return rowwise(run, in_dims=in_dims)(query, key, value, *sinks)  # rows are independent


def _run_on_each_share(
    kernel: Kernel,
    sequence: tuple[str, ...],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *sinks: jax.Array,
) -> jax.Array:
    inner = inner_axes()
    if not inner:
        return kernel(query, key, value, *sinks)
    heads = split_over("heads", query.shape[2])
    num_parts, num_keys = math.prod(inner[axis] for axis in heads), key.shape[2]
    if num_keys % num_parts:
        # Each device needs the keys of its own queries. If the number of devices is a multiple of
        # the number of keys, each key is repeated for the devices that share it. Otherwise every
        # query gets its own copy of its key, which always splits as the queries do.
        num_copies = (num_parts if num_parts % num_keys == 0 else query.shape[2]) // num_keys
        key, value = (jnp.repeat(x, num_copies, axis=2) for x in (key, value))
    batch = with_single_axes(split_over("batch", query.shape[0]))
    spec = PartitionSpec(batch, sequence or None, heads or None)
    return jax.shard_map(
        kernel,
        in_specs=(spec, spec, spec, *(PartitionSpec(heads or None) for _ in sinks)),
        out_specs=spec,
        axis_names=set(automatic_axes()),
        check_vma=False,
    )(query, key, value, *sinks)
