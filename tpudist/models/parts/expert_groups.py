"""Experts by grouped products: sorted by expert, all tokens of a device are one product per matrix.

Each device sorts the choices of its own tokens by expert and multiplies each group by the matrix of
its expert (`jax.lax.ragged_dot`). There is no capacity, so no choice is dropped and nothing is
padded. XLA cannot partition these products, so they run in a `jax.shard_map`. Each device gathers
the experts' matrices over the axes that split `embed`, as it does for other weights, and adds its
part of the outputs over the axes that split `mlp`.

Source: MegaBlocks (arXiv 2211.15841). The TPU compiler has a kernel for these products.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tpudist.array_types import Shape
from tpudist.models.parts.activation import activate
from tpudist.models.parts.attention import platform
from tpudist.models.parts.logical import (
    automatic_axes,
    inner_axes,
    split_over,
    with_single_axes,
)
from tpudist.models.parts.row_moves import move
from tpudist.programs.rows.row_kernels import rowwise
from tpudist.xla.collectives import is_16_bit_float

Weights = dict[str, jax.Array]
# Logical names of the dims of the weights: of each branch, its bias, and the output.
_DIMS = {
    "branch": ("expert", "embed", "mlp"),
    "bias": ("expert", "mlp"),
    "out": ("expert", "mlp", "embed"),
}


def num_groups(num_experts: int) -> int:
    """Returns the number of devices among which the mesh splits the experts."""
    return math.prod(inner_axes()[axis] for axis in split_over("expert", num_experts))


def apply(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: Weights, limit: float | None
) -> jax.Array:
    """Returns the weighted sum of the outputs of the chosen experts of each token, in `x`'s shape.

    Args:
        x: `[batch, group, token, embed]`; each device of the axis `expert` computes one group.
        chosen: `[batch, group, token, choice]`, numbers of experts within the group; the number of
            its experts for no choice.
        shares: `[batch, group, token, choice]`, weights of the outputs.
        weights: `mlp_in` `[expert, embed, branches, mlp]`, `mlp_out` `[expert, mlp, embed]` and
            perhaps `mlp_in_bias` `[expert, branches, mlp]`.
        limit: See `activate`.

    Cost: an all-gather of the weights over the axes that split them, except the axis `expert`, and
    an all-reduce of the result over the axes that split `mlp`.
    """
    dtype = x.dtype
    # The gradients of gathered weights are sums over devices, which XLA:CPU cannot compute in
    # 16 bits here.
    is_widened = platform() == "cpu" and bool(inner_axes()) and is_16_bit_float(dtype)
    # One matrix per branch, sliced and cast before it is gathered.
    parts = {"out": weights["mlp_out"]}
    for i in range(weights["mlp_in"].shape[2]):
        parts[f"branch {i}"] = weights["mlp_in"][:, :, i]
        if (bias := weights.get("mlp_in_bias")) is not None:
            parts[f"bias {i}"] = bias[:, i]
    parts = jax.tree.map(lambda w: w.astype(jnp.float32 if is_widened else dtype), parts)
    run = functools.partial(_run_on_each_share, dtype, limit)
    return rowwise(run, in_dims=(0, 0, 0, None))(x, chosen, shares, parts)


def _run_on_each_share(
    dtype: jnp.dtype,
    limit: float | None,
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: Weights,
) -> jax.Array:
    if not inner_axes():
        return _compute(x, chosen, shares, weights, limit)
    group = split_over("expert", x.shape[1])
    batch = split_over("expert_batch" if group else "batch", x.shape[0])
    sequence = split_over("sequence", x.shape[2])
    rows = PartitionSpec(with_single_axes(batch), group or None, sequence or None)
    axes = {name: _axes_of(_dims_of(name), w.shape) for name, w in weights.items()}
    specs = {name: PartitionSpec(*(over or None for over in axes[name])) for name in axes}
    summed = axes["out"][1]

    def compute(x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: Weights) -> jax.Array:
        gathered = {name: _gather(w, name, axes[name]).astype(dtype) for name, w in weights.items()}
        out = _compute(x, chosen, shares, gathered, limit)
        if not summed:
            return out
        wide = out.astype(jnp.float32) if platform() == "cpu" else out
        return jax.lax.psum(wide, summed).astype(out.dtype)

    return jax.shard_map(
        compute,
        in_specs=(rows, rows, rows, specs),
        out_specs=rows,
        axis_names=set(automatic_axes()),
        check_vma=False,
    )(x, chosen, shares, weights)


def _dims_of(name: str) -> tuple[str, ...]:
    return _DIMS[name.split()[0]]


def _axes_of(dims: tuple[str, ...], shape: Shape) -> list[tuple[str, ...]]:
    """Returns the axes that split each dim of a weight; no axis twice."""
    axes: list[tuple[str, ...]] = []
    for dim, size in zip(dims, shape, strict=True):
        over = split_over(dim, size)
        axes.append(() if any(axis in used for used in axes for axis in over) else over)
    return axes


def _gather(weight: jax.Array, name: str, axes: list[tuple[str, ...]]) -> jax.Array:
    # Here and not before the `shard_map`: the gradient then is a reduce-scatter.
    for dim, over in enumerate(axes):
        if over and _dims_of(name)[dim] == "embed":
            return jax.lax.all_gather(weight, over, axis=dim, tiled=True)
    return weight


def _compute(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: Weights, limit: float | None
) -> jax.Array:
    """Returns the result of `apply` for the tokens and experts of one device."""
    num_experts, num_choices = weights["out"].shape[0], chosen.shape[-1]
    expert = chosen.reshape(-1)
    # Stable sorts, so a choice keeps its place among those of its expert. The second sort is the
    # inverse of the first.
    order = jnp.argsort(expert, stable=True)
    place = jnp.argsort(order)
    sizes = jnp.sum(jax.nn.one_hot(expert, num_experts, dtype=jnp.int32), axis=0)
    tokens = x.reshape(1, -1, x.shape[-1])
    sent = move(tokens, order[None] // num_choices, place.reshape(1, -1, num_choices))[0]
    out = _products(sent, expert[order], sizes, weights, limit)
    received = move(out[None], place[None], order[None, :, None])
    received = received.reshape(-1, num_choices, x.shape[-1])
    share = shares.reshape(-1, num_choices).astype(x.dtype)
    return jnp.einsum("tke,tk->te", received, share).reshape(x.shape)


def _products(
    x: jax.Array, expert: jax.Array, sizes: jax.Array, weights: Weights, limit: float | None
) -> jax.Array:
    """Returns the outputs of the experts for rows `[choice, embed]`, sorted by expert."""

    def multiply(name: str) -> jax.Array:
        hidden = jax.lax.ragged_dot(x, weights[f"branch {name}"], sizes)
        if (bias := weights.get(f"bias {name}")) is not None:
            # A product, because the gradient of indexing would be a scatter; it is not work of the
            # model (planner/model_flops.py).
            with jax.named_scope("in_place_of_scatter"):
                one_hot = jax.nn.one_hot(expert, len(bias), dtype=x.dtype)
                hidden += jnp.einsum("cs,sm->cm", one_hot, bias)
        return checkpoint_name(hidden, "mlp_in")

    branches = [multiply(name.split()[1]) for name in sorted(weights) if "branch" in name]
    return jax.lax.ragged_dot(activate(*branches, limit=limit), weights["out"], sizes)
