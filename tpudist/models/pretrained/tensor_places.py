"""The places of a checkpoint's tensors in the variables of the transformer.

Checkpoints of PyTorch have a matrix `[out, in]` for each projection of each layer. The transformer
has one variable for all layers, in which input dims come before output dims, heads have dims of
their own, and queries, keys and values (or the branches of an MLP) share a variable. Families
differ in the names of tensors, and in which of them are one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from tpudist.array_types import Shape
from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig

Bounds = tuple[tuple[int, int], ...]
"""Start and end of a part of an array in each dim."""

OUTPUT = "lm_head.weight"
"""Matrix of the logits, which tied models lack."""


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor of a checkpoint in a variable.

    Attributes:
        tensor: Name of the tensor.
        shape: Shape of the tensor.
        variable: Name of the variable in the model, such as "blocks.mlp_in".
        part: Index of the tensor in each dim of the variable; None for the complete dim.
        view: Shape of the tensor with heads as a dim of their own.
        order: Dims of `view` in the order of the dims of the variable without an index.
        rows: Start and end of the rows of the tensor that the variable has; None for all.
    """

    tensor: str
    shape: Shape
    variable: str
    part: tuple[int | None, ...]
    view: Shape
    order: tuple[int, ...]
    rows: tuple[int, int] | None = None

    def view_as_variable(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with the dims of the variable that have no index, without a copy."""
        part = tensor if self.rows is None else tensor[slice(*self.rows)]
        return part.reshape(self.view).transpose(self.order)

    def find_in(self, bounds: Bounds) -> tuple[tuple[slice, ...], tuple[slice | int, ...]] | None:
        """Returns the overlap of the tensor and a shard of the variable; None if there is none.

        Args:
            bounds: Start and end of the shard in each dim of the variable.

        Returns:
            Index of the overlap in `view_as_variable`, and in the shard.
        """
        tensor_index: list[slice] = []
        shard_index: list[slice | int] = []
        for index, (start, stop) in zip(self.part, bounds, strict=True):
            if index is None:
                tensor_index.append(slice(start, stop))
                shard_index.append(slice(None))
            elif start <= index < stop:
                shard_index.append(index - start)
            else:
                return None
        return tuple(tensor_index), tuple(shard_index)


def variable_of(model: Transformer, place: TensorPlace) -> nnx.Param:
    """Returns the variable that contains a tensor."""
    owner: Any = model
    for name in place.variable.split("."):  # "blocks.mlp_in" or "embedding"
        owner = vars(owner)[name]
    return owner


# Dims of the variables of a layer, after `layers`; with experts, see `_Places.variable_dims`.
_VARIABLES = {
    "attention_norm": "embed",
    "attention_norm_bias": "embed",
    "attention_in": "embed query_key_value heads head_dim",
    "attention_bias": "query_key_value heads head_dim",
    "query_in": "embed heads head_dim",
    "query_bias": "heads head_dim",
    "key_value_in": "embed key_value kv_heads head_dim",
    "key_value_bias": "key_value kv_heads head_dim",
    "sinks": "heads",
    "attention_out": "heads head_dim embed",
    "attention_out_bias": "embed",
    "attention_out_norm": "embed",
    "mlp_norm": "embed",
    "mlp_norm_bias": "embed",
    "router": "embed router",
    "router_bias": "router",
    "mlp_in": "branches embed mlp",
    "mlp_in_bias": "branches mlp",
    "mlp_out": "mlp embed",
    "mlp_out_bias": "embed",
    "mlp_out_norm": "embed",
}
# Names of the router, of each expert, and of its gate, input and output.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
}
# Tensors of a layer of gpt2, whose matrices are `[in, out]`: name, variable and dims.
_GPT2 = (
    ("ln_1.weight", "attention_norm", "embed"),
    ("ln_1.bias", "attention_norm_bias", "embed"),
    ("attn.c_attn.weight", "attention_in", "embed (query_key_value heads head_dim)"),
    ("attn.c_attn.bias", "attention_bias", "(query_key_value heads head_dim)"),
    ("attn.c_proj.weight", "attention_out", "(heads head_dim) embed"),
    ("attn.c_proj.bias", "attention_out_bias", "embed"),
    ("ln_2.weight", "mlp_norm", "embed"),
    ("ln_2.bias", "mlp_norm_bias", "embed"),
    ("mlp.c_fc.weight", "mlp_in", "embed (branches mlp)"),
    ("mlp.c_fc.bias", "mlp_in_bias", "(branches mlp)"),
    ("mlp.c_proj.weight", "mlp_out", "mlp embed"),
    ("mlp.c_proj.bias", "mlp_out_bias", "embed"),
)
# Tensors of the experts of gpt-oss, in which the branches alternate.
_GPT_OSS = (
    ("mlp.router.weight", "router", "router embed"),
    ("mlp.router.bias", "router_bias", "router"),
    ("mlp.experts.gate_up_proj", "mlp_in", "expert embed (mlp branches)"),
    ("mlp.experts.gate_up_proj_bias", "mlp_in_bias", "expert (mlp branches)"),
    ("mlp.experts.down_proj", "mlp_out", "expert mlp embed"),
    ("mlp.experts.down_proj_bias", "mlp_out_bias", "expert embed"),
)


def tensor_places(config: TransformerConfig, family: str) -> Iterator[TensorPlace]:
    """Yields all tensors of a checkpoint of this model, in the order of their use.

    Args:
        config: Configuration of the model, which `hub_config` returned.
        family: `model_type` of the model.
    """
    places = _Places(config)
    is_gpt2 = family == "gpt2"
    names = ("wte", "ln_f") if is_gpt2 else ("model.embed_tokens", "model.norm")
    yield places.make(f"{names[0]}.weight", "embedding", "vocab embed", "vocab embed")
    if is_gpt2:
        yield places.make("wpe.weight", "positions", "position embed", "position embed")
    for layer in range(config.num_layers):
        yield from _layer_places(places, family, layer)
    yield places.make(f"{names[1]}.weight", "final_norm", "embed", "embed")
    if is_gpt2:
        yield places.make("ln_f.bias", "final_norm_bias", "embed", "embed")
    if not config.tied:
        yield places.make(OUTPUT, "unembedding", "vocab embed", "embed vocab")


def output_place(config: TransformerConfig) -> TensorPlace:
    """Returns the place of the matrix of logits that checkpoints of tied models may also store."""
    return _Places(config).make(OUTPUT, "embedding", "vocab embed", "vocab embed")


class _Places:
    """Makes places from the names of dims."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        self.sizes: dict[str, int] = {
            "vocab": config.vocabulary,
            "embed": config.embed_dim,
            "position": config.learned_positions or 0,
            "query_key_value": 3,
            "key_value": 2,
            "heads": config.num_heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "router": config.num_experts,
            "expert": config.num_experts,
            "branches": 2 if config.gated else 1,
            "mlp": config.mlp_dim,
        }

    def make(
        self, tensor: str, variable: str, dims: str, of_variable: str, **index: int
    ) -> TensorPlace:
        """Returns the place of a tensor whose dims have names; those in parentheses are one dim.

        Args:
            tensor: Name of the tensor.
            variable: Name of the variable.
            dims: Names of the dims of the tensor.
            of_variable: Names of the dims of the variable.
            index: Index of the tensor in dims of the variable that it does not have.
        """
        groups = [(a or b).split() for a, b in re.findall(r"\(([^)]*)\)|(\w+)", dims)]
        names = [name for group in groups for name in group]
        order = tuple(names.index(name) for name in of_variable.split() if name not in index)
        return TensorPlace(
            tensor,
            tuple(math.prod(self.sizes[name] for name in group) for group in groups),
            variable,
            tuple(index.get(name) for name in of_variable.split()),
            tuple(self.sizes[name] for name in names),
            order,
        )

    def of_layer(
        self, layer: int, tensor: str, variable: str, dims: str, **index: int
    ) -> TensorPlace:
        """Returns the place of a tensor of a layer; its name here is the name within the layer."""
        prefix = "h" if self.config.learned_positions else "model.layers"
        of_variable = self.variable_dims(variable)
        name = f"{prefix}.{layer}.{tensor}"
        return self.make(name, f"blocks.{variable}", dims, of_variable, layers=layer, **index)

    def variable_dims(self, variable: str) -> str:
        """Returns the dims of a variable of the blocks, `layers` first."""
        if self.config.norm_projections and variable in ("query_norm", "key_norm"):
            return f"layers {'heads' if variable == 'query_norm' else 'kv_heads'} head_dim"
        dims = "head_dim" if variable in ("query_norm", "key_norm") else _VARIABLES[variable]
        if not self.config.num_experts or not variable.startswith("mlp_") or "norm" in variable:
            return f"layers {dims}"
        # With experts, the branches follow `embed`.
        return f"layers expert {'embed branches mlp' if variable == 'mlp_in' else dims}"


def _layer_places(places: _Places, family: str, layer: int) -> Iterator[TensorPlace]:
    config = places.config
    place = functools.partial(places.of_layer, layer)
    if family == "gpt2":
        for name, variable, dims in _GPT2:
            yield place(name, variable, dims)
        return
    if config.norm_inputs:
        yield place("input_layernorm.weight", "attention_norm", "embed")
    yield from _attention_places(places, family, layer)
    after = "post_attention_layernorm.weight"
    if config.norm_outputs:
        # The same name means another norm: with norms of outputs (Gemma 2 and 3, OLMo 2) it is
        # after attention and before the sum, without them it is before the MLP.
        yield place(after, "attention_out_norm", "embed")
        if config.norm_inputs:
            yield place("pre_feedforward_layernorm.weight", "mlp_norm", "embed")
        yield place("post_feedforward_layernorm.weight", "mlp_out_norm", "embed")
    else:
        yield place(after, "mlp_norm", "embed")
    if family == "gpt_oss":
        for name, variable, dims in _GPT_OSS:
            yield place(name, variable, dims)
    elif family in _EXPERTS:
        router, expert, names = _EXPERTS[family]
        yield place(f"{router}.weight", "router", "router embed")
        for i in range(config.num_experts):
            prefix = f"{expert.format(i)}."
            for branch, name in enumerate(names[:2]):
                index = {"expert": i, "branches": branch}
                yield place(f"{prefix}{name}.weight", "mlp_in", "mlp embed", **index)
            yield place(f"{prefix}{names[2]}.weight", "mlp_out", "embed mlp", expert=i)
    else:
        if family == "phi3":
            yield place("mlp.gate_up_proj.weight", "mlp_in", "(branches mlp) embed")
        else:
            for i, name in enumerate(("gate", "up")):
                yield place(f"mlp.{name}_proj.weight", "mlp_in", "mlp embed", branches=i)
        yield place("mlp.down_proj.weight", "mlp_out", "embed mlp")


def _attention_places(places: _Places, family: str, layer: int) -> Iterator[TensorPlace]:
    config = places.config
    place = functools.partial(places.of_layer, layer)
    first, total = 0, (config.num_heads + 2 * config.kv_heads) * config.head_dim
    for i, name in enumerate("qkv"):
        heads = "heads" if name == "q" else "kv_heads"
        index: dict[str, int] = {}
        if config.kv_heads == config.num_heads:  # one variable for all three; see `Blocks`
            matrix, bias, heads = "attention_in", "attention_bias", "heads"
            index["query_key_value"] = i
        elif name == "q":
            matrix, bias = "query_in", "query_bias"
        else:
            matrix, bias = "key_value_in", "key_value_bias"
            index["key_value"] = i - 1
        dims = f"({heads} head_dim)"
        found = place(f"self_attn.{name}_proj.weight", matrix, f"{dims} embed", **index)
        if family == "phi3":  # one tensor for all three
            rows = (first, first := first + found.shape[0])
            tensor = found.tensor.replace(f"{name}_proj", "qkv_proj")
            found = dataclasses.replace(
                found, tensor=tensor, shape=(total, config.embed_dim), rows=rows
            )
        yield found
        if config.biased:
            yield place(f"self_attn.{name}_proj.bias", bias, dims, **index)
    if config.norm_heads or config.norm_projections:
        for name, heads in (("query", "heads"), ("key", "kv_heads")):
            dims = f"({heads} head_dim)" if config.norm_projections else "head_dim"
            yield place(f"self_attn.{name[0]}_norm.weight", f"{name}_norm", dims)
    if config.attention_sinks:
        yield place("self_attn.sinks", "sinks", "heads")
    yield place("self_attn.o_proj.weight", "attention_out", "embed (heads head_dim)")
    if config.biased_outputs:
        yield place("self_attn.o_proj.bias", "attention_out_bias", "embed")
