"""Low-rank adapters (LoRA): few parameters that are added to a model, and trained instead of it.

Next to a frozen matrix `W` there are two thin matrices, `A` and `B`. The transformer computes with
`W + alpha / rank * A @ B`, without computing that sum. `B` is initially zero, so that the results
of the model do not change at first. `merge` computes the sum and removes the adapters.

To train only adapters, differentiate by their parameters and pass only these to the optimizer:

    lora.add(model, rank=8)
    optimizer = tpudist.Optimizer(tx, model, wrt=lora.LoRAParam)
    of_adapters = nnx.DiffState(0, lora.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=of_adapters)(model)

Source: Hu et al. 2021, arXiv 2106.09685; the initial values are those of the package `peft`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from tpudist.context import get_strategy, has_strategy
from tpudist.models.parts.logical import axes
from tpudist.models.quantization import refuse_quantized
from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig

LoRAParam = nnx.LoRAParam
"""Type of the parameters of adapters: an NNX filter, for `nnx.DiffState` and optimizers."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a block that can have adapters, by their names in checkpoints."""
_ATTENTION_TARGETS = TARGETS[:4]


def add(
    model: Transformer,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Iterable[str] = TARGETS,
    rngs: nnx.Rngs | None = None,
) -> Transformer:
    """Adds adapters to a transformer in place, and returns it.

    Args:
        model: Transformer. Its blocks get float32 `LoRAParam`s, which the strategy of the current
            scope places.
        rank: Width of the thin matrices.
        alpha: Numerator of the factor `alpha / rank` of the adapters.
        targets: Matrices that get adapters, from `TARGETS`.
        rngs: Random keys; initial values come from `rngs.params()`. The default has seed 0.

    Raises:
        ValueError: If the model already has adapters or lacks a target, or `rank` is below 1.
    """
    targets = tuple(targets)
    _check(model, rank, targets)
    key = (nnx.Rngs(0) if rngs is None else rngs).params()

    def make() -> dict[str, nnx.Param]:
        adapters: dict[str, nnx.Param] = {}
        # A key per possible target, so that the values do not depend on the other targets.
        for name, key_of_target in zip(TARGETS, jax.random.split(key, len(TARGETS)), strict=True):
            if name in targets:
                adapters |= _make_pair(model.config, name, rank, key_of_target)
        return adapters

    adapters = get_strategy().create(make) if has_strategy() else make()
    # Attributes of `Blocks`, so that the scan over layers passes them to each block by name, and
    # `block._adapt` finds them there.
    for name, variable in adapters.items():
        setattr(model.blocks, name, variable)
    model.blocks.adapter_scale = alpha / rank
    return model


def merge(model: Transformer) -> Transformer:
    """Adds the adapters to the weights in place, removes them, and returns the model.

    The sums are computed in float32, one layer at a time, and rounded to the dtype of the weights.

    Raises:
        ValueError: If the model has no adapters, or is quantized.
    """
    refuse_quantized(model, "lora.merge")
    blocks = model.blocks
    variables = vars(blocks)
    targets = [name for name in TARGETS if f"{name}_lora_a" in variables]
    if not targets:
        raise ValueError(
            "lora.merge received a model without adapters. Call lora.add(model) first, and merge a "
            "model only once."
        )
    for name in targets:
        variable, part = _weight_of(model.config, name)
        weight = variables[variable]
        a, b = (variables[f"{name}_lora_{letter}"].get_raw_value() for letter in "ab")
        old = weight.get_raw_value()
        program = _merge_program(part, a.ndim, blocks.adapter_scale, old.sharding)
        weight.set_raw_value(program(old, a, b))
        for letter in "ab":
            delattr(blocks, f"{name}_lora_{letter}")
    blocks.adapter_scale = None
    return model


@functools.lru_cache
def _merge_program(
    part: tuple[int | None, ...], ndim: int, scale: float, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns `merge_all(weight, a, b)` for variables `[layers, ...]` with a target at `part`.

    Cached, so that targets of the same shape share one compiled program.
    """
    index = tuple(slice(None) if i is None else i for i in part)

    def merge_layer(_: None, layer: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        weight, a, b = layer
        change = jnp.tensordot(a, b, axes=1, precision="highest") * scale
        new = weight[index].astype(jnp.float32) + change
        return None, weight.at[index].set(new.astype(weight.dtype))

    def merge_all(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        # A scan, so that only one layer at a time exists in float32.
        return jax.lax.scan(merge_layer, None, (weight, a, b))[1]

    return jax.jit(merge_all, out_shardings=sharding)


def _make_pair(
    config: TransformerConfig, name: str, rank: int, key: jax.Array
) -> dict[str, nnx.Param]:
    into, out = _dims_of(config, name)
    # A is [layers, *into, rank], B is [layers, rank, *out].
    layers = {"layers": config.num_layers}
    dims_of_a = layers | into | {"lora_rank": rank}
    dims_of_b = layers | {"lora_rank": rank} | out
    # `peft` fills A with `kaiming_uniform_(a=sqrt(5))`. Its bound is sqrt(3) * sqrt(2 / (1 + 5)) /
    # sqrt(inputs), and the first two factors cancel.
    bound = math.prod(into.values()) ** -0.5
    a = jax.random.uniform(key, tuple(dims_of_a.values()), jnp.float32, -bound, bound)
    b = jnp.zeros(tuple(dims_of_b.values()), jnp.float32)
    return {
        f"{name}_lora_a": LoRAParam(a, **axes(*dims_of_a)),
        f"{name}_lora_b": LoRAParam(b, **axes(*dims_of_b)),
    }


def _dims_of(config: TransformerConfig, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the input and the output dims of a matrix, by their logical names."""
    embed, mlp = {"embed": config.embed_dim}, {"mlp": config.mlp_dim}
    heads = {"heads": config.num_heads, "head_dim": config.head_dim}
    # The names must be those of the variable that contains the matrix, or the adapter and its
    # matrix would be split over different mesh axes: `attention_in` has "heads" for keys as well.
    kv_heads = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
    if config.kv_heads == config.num_heads:
        kv_heads = heads
    return {
        "q_proj": (embed, heads),
        "k_proj": (embed, kv_heads),
        "v_proj": (embed, kv_heads),
        "o_proj": (heads, embed),
        "gate_proj": (embed, mlp),
        "up_proj": (embed, mlp),
        "down_proj": (mlp, embed),
    }[name]


def _weight_of(config: TransformerConfig, name: str) -> tuple[str, tuple[int | None, ...]]:
    """Returns the variable that contains a matrix, and the index of the matrix in one layer of it.

    The index has a number for each dim of a layer, or None for a whole dim, up to the last number.
    """
    if name in ("q_proj", "k_proj", "v_proj"):
        if config.kv_heads == config.num_heads:
            return "attention_in", (None, "qkv".index(name[0]))
        if name == "q_proj":
            return "query_in", ()
        return "key_value_in", (None, "kv".index(name[0]))
    if name in ("gate_proj", "up_proj"):
        # Branches are (gate, up), or only up.
        return "mlp_in", (0 if name == "gate_proj" or not config.gated else 1,)
    return ("attention_out", ()) if name == "o_proj" else ("mlp_out", ())


def _check(model: Transformer, rank: int, targets: tuple[str, ...]) -> None:
    config = model.config
    possible = [name for name in TARGETS if config.gated or name != "gate_proj"]
    if config.num_experts:
        # Experts have their own code without adapters (`experts.mlp`); attention is the same.
        possible = [name for name in possible if name in _ATTENTION_TARGETS]
    unknown = [name for name in targets if name not in possible]
    if unknown or not targets:
        raise ValueError(
            f"lora.add(targets=...) cannot add adapters to {', '.join(unknown) or 'nothing'}. Use "
            f"some of the matrices of this model: {', '.join(possible)}."
        )
    if rank < 1:
        raise ValueError(
            f"rank={rank}: the width of an adapter must be at least 1. Use for example 8."
        )
    if model.blocks.adapter_scale is not None:
        raise ValueError(
            "The model already has adapters. Merge them first (lora.merge), or name all targets in "
            "one call."
        )
