"""Attention and MLP of one block of the transformer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpudist.models.parts import attention, kv_cache, rotary
from tpudist.models.parts.activation import activate, activation_product
from tpudist.models.parts.logical import constrain, split_over
from tpudist.models.parts.norm import normalize
from tpudist.models.transformer_config import TransformerConfig


def constrain_residual(x: jax.Array) -> jax.Array:
    """Splits the residual stream `[batch, length, embed]` by the rules for its three dims."""
    residual = "residual" if split_over("residual", x.shape[-1]) else None
    return constrain(x, "batch", sequence_name(x), residual)


def sequence_name(x: jax.Array) -> str | None:
    """Returns the logical name of the length of `x` if an axis splits it; None keeps it whole."""
    return "sequence" if split_over("sequence", x.shape[1]) else None


def project(x: jax.Array, weight: jax.Array, num_dims: int = 1, heads: bool = False) -> jax.Array:
    """Contracts the last `num_dims` dims of `x` with the first of `weight`, in the dtype of `x`.

    Args:
        x: `[batch, length, *features]`.
        weight: `[*features, *outputs]`.
        num_dims: Number of features.
        heads: Whether the features or the outputs have a dim of heads. The product then keeps batch
            and length apart on TPUs.
    """
    leading, features = x.shape[:-num_dims], x.shape[-num_dims:]
    if not sequence_name(x) and not (heads and attention.platform() == "tpu"):
        # With batch and length as one dim, the gradient of a weight contracts one dim, which is
        # twice as fast on XLA:CPU. If the sequence is split, XLA would gather it for that. On TPUs
        # the kernel of attention takes `[batch, heads, length, width]`. Without the reshape, the
        # product writes that layout directly; with it, XLA would copy.
        x = x.reshape(-1, *features)
    out = jnp.tensordot(x, weight.astype(x.dtype), axes=num_dims)
    return out.reshape(*leading, *weight.shape[num_dims:])


def _query_key_value(
    x: jax.Array, weights: dict[str, jax.Array], config: TransformerConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries `[batch, length, heads, head_dim]`, and keys and values with `kv_heads`."""
    sequence = sequence_name(x)

    def apply(name: str, bias: str, *dims: str | None) -> jax.Array:
        out = project(x, weights[name], heads=True)
        out = constrain(out, "batch", sequence, *dims, None)
        return out + weights[bias].astype(x.dtype) if config.biased else out

    if "attention_in" in weights:  # as many keys as queries: one product for all three
        together = apply("attention_in", "attention_bias", None, "heads")
        query, key, value = jnp.moveaxis(together, 2, 0)
        return query, key, value
    query = apply("query_in", "query_bias", "heads")
    key, value = jnp.moveaxis(apply("key_value_in", "key_value_bias", None, "kv_heads"), 2, 0)
    return query, key, value


def attend(
    x: jax.Array,
    weights: dict[str, jax.Array],
    rotations: tuple[rotary.Rotation, ...],
    config: TransformerConfig,
    adapter_scale: float,
    is_in_ring_order: bool,
    stored: kv_cache.Stored | None,
    places: kv_cache.Places | None,
) -> tuple[jax.Array, kv_cache.Stored | None]:
    """Returns the output of attention, and the keys and values that are stored for later tokens.

    Args:
        x: Normalized input, `[batch, length, embed]`.
        weights: Parameters of the layer, and its number `layer` if keys are stored.
        rotations: See `rotary.rotation_of_layer`.
        config: Sizes and options.
        adapter_scale: Factor of adapters.
        is_in_ring_order: See `attention.attend`.
        stored: Keys and values of earlier tokens; None to store none.
        places: Places of the tokens in `stored`.
    """
    query, key, value = _query_key_value(x, weights, config)
    adapt = functools.partial(_adapt, weights=weights, scale=adapter_scale, heads=True)
    query = adapt(query, x, name="q_proj")
    key, value = adapt(key, x, name="k_proj"), adapt(value, x, name="v_proj")
    if config.norm_heads or config.norm_projections:
        query = normalize(query, weights, "query_norm", config)
        key = normalize(key, weights, "key_norm", config)
    has_window = weights.get("has_window")
    if rotations:
        rotation = rotary.rotation_of_layer(rotations, has_window)
        query, key = rotary.rotate(query, rotation), rotary.rotate(key, rotation)
    query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
    value = checkpoint_name(value, "value")
    scores = attention.Scores(config.query_scale, config.attention_cap, config.attention_window)
    sinks = weights.get("sinks")
    if stored is not None and places is not None:
        stored = kv_cache.write(stored, weights["layer"], places, key, value)
    if stored is not None and places is not None and query.shape[1] == 1:
        attended = kv_cache.attend(
            query, stored, weights["layer"], places, scores, has_window, sinks
        )
    else:  # the first tokens of their sequences
        attended = attention.attend(  # [batch, length, heads, head_dim]
            query,
            key,
            value,
            method=config.attention,
            splash_block=config.splash_block,
            splash_backward_block=config.splash_backward_block,
            splash_fused_backward=config.splash_fused_backward,
            scores=scores,
            has_window=has_window,
            is_in_ring_order=is_in_ring_order,
            sinks=sinks,
        )
    out = project(attended, weights["attention_out"], num_dims=2, heads=True)
    if config.biased_outputs:
        out += weights["attention_out_bias"].astype(out.dtype)
    return adapt(out, attended, name="o_proj", num_dims=2), stored


def mlp(
    x: jax.Array,
    weights: dict[str, jax.Array],
    config: TransformerConfig,
    adapter_scale: float,
) -> jax.Array:
    """Returns the output of the MLP; `attend` documents the arguments."""
    adapt = functools.partial(_adapt, weights=weights, scale=adapter_scale)
    # mlp_in is [branches, embed, mlp]; each branch is [batch, length, mlp]
    branches = [project(x, weight) for weight in weights["mlp_in"]]
    names = ("gate_proj", "up_proj")[-len(branches) :]  # without a gate, only `up_proj`
    branches = [adapt(y, x, name=name) for y, name in zip(branches, names, strict=True)]
    if config.biased_mlp:
        branches = [
            y + b.astype(y.dtype) for y, b in zip(branches, weights["mlp_in_bias"], strict=True)
        ]
    branches = [constrain(y, "batch", sequence_name(x), "mlp") for y in branches]
    branches = tuple(checkpoint_name(y, "mlp_in") for y in branches)
    # `activation_product` computes its backward pass in place, in pieces of the sequence. It needs
    # a whole sequence, and supports no adapter of `down_proj`.
    has_adapter = "down_proj_lora_a" in weights
    if attention.platform() == "tpu" and not sequence_name(x) and not has_adapter:
        out = activation_product(branches, weights["mlp_out"].astype(x.dtype), config.gelu)
    else:
        hidden = activate(*branches, gelu=config.gelu)
        out = adapt(project(hidden, weights["mlp_out"]), hidden, name="down_proj")
    return out + weights["mlp_out_bias"].astype(out.dtype) if config.biased_mlp else out


def _adapt(
    out: jax.Array,
    x: jax.Array,
    *,
    weights: dict[str, jax.Array],
    scale: float,
    name: str,
    num_dims: int = 1,
    heads: bool = False,
) -> jax.Array:
    """Returns `out`, the product of `x` and the matrix `name`, plus that with its adapter."""
    if f"{name}_lora_a" not in weights:
        return out
    low = project(x, weights[f"{name}_lora_a"], num_dims, heads)
    return out + scale * project(low, weights[f"{name}_lora_b"], 1, heads)
