"""The places of a checkpoint's tensors in the variables of the transformer.

Checkpoints of PyTorch have a matrix `[out, in]` for each projection of each layer. The transformer
has one variable for all layers, in which input dims come before output dims, heads have dims of
their own, and queries, keys and values (or the branches of an MLP) share a variable.
"""

from __future__ import annotations

import math
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
    """

    tensor: str
    shape: Shape
    variable: str
    part: tuple[int | None, ...]
    view: Shape
    order: tuple[int, ...]

    def view_as_variable(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with the dims of the variable that have no index, without a copy."""
        return tensor.reshape(self.view).transpose(self.order)

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


def tensor_places(config: TransformerConfig) -> Iterator[TensorPlace]:
    """Yields all tensors of a checkpoint of this model, in the order of their use.

    MLPs must be gated and without experts; `config_export.make_config` rejects other models.
    """
    vocab, embed = config.vocabulary, config.embed_dim
    yield _plain_place("model.embed_tokens.weight", (vocab, embed), "embedding")
    for layer in range(config.num_layers):
        yield from _layer_places(config, layer)
    yield _plain_place("model.norm.weight", (embed,), "final_norm")
    if not config.tied:
        shape = (vocab, embed)
        yield TensorPlace(OUTPUT, shape, "unembedding", (None, None), shape, (1, 0))


def output_place(config: TransformerConfig) -> TensorPlace:
    """Returns the place of the matrix of logits that checkpoints of tied models may also store."""
    return _plain_place(OUTPUT, (config.vocabulary, config.embed_dim), "embedding")


def _plain_place(tensor: str, shape: Shape, variable: str) -> TensorPlace:
    dims = tuple(range(len(shape)))
    return TensorPlace(tensor, shape, variable, (None,) * len(shape), shape, dims)


def _layer_places(config: TransformerConfig, layer: int) -> Iterator[TensorPlace]:
    embed = config.embed_dim
    yield _norm_place(layer, "input_layernorm", "attention_norm", embed)
    yield from _attention_places(config, layer)
    if config.norm_outputs:
        # The same name means another norm: with four norms per layer (Gemma 2 and 3) it is after
        # attention and before the sum, with two it is before the MLP.
        yield _norm_place(layer, "post_attention_layernorm", "attention_out_norm", embed)
        yield _norm_place(layer, "pre_feedforward_layernorm", "mlp_norm", embed)
        yield _norm_place(layer, "post_feedforward_layernorm", "mlp_out_norm", embed)
    else:
        yield _norm_place(layer, "post_attention_layernorm", "mlp_norm", embed)
    shape = (config.mlp_dim, embed)
    for i, name in enumerate(("gate", "up")):
        yield _layer_place(layer, f"mlp.{name}_proj.weight", "mlp_in", shape, shape, (1, 0), i)
    yield _layer_place(layer, "mlp.down_proj.weight", "mlp_out", shape[::-1], shape[::-1], (1, 0))


def _attention_places(config: TransformerConfig, layer: int) -> Iterator[TensorPlace]:
    embed, width = config.embed_dim, config.head_dim
    for i, name in enumerate("qkv"):
        heads = config.num_heads if name == "q" else config.kv_heads
        if config.kv_heads == config.num_heads:  # one variable for all three; see `Blocks`
            matrix, bias, branch = "attention_in", "attention_bias", i
        elif name == "q":
            matrix, bias, branch = "query_in", "query_bias", None
        else:
            matrix, bias, branch = "key_value_in", "key_value_bias", i - 1
        view = (heads, width, embed)
        shape = (heads * width, embed)
        tensor = f"self_attn.{name}_proj"
        # attention_in is [layers, embed, branch, heads, width]; its bias has no `embed`.
        yield _layer_place(layer, f"{tensor}.weight", matrix, shape, view, (2, 0, 1), branch, at=2)
        if config.biased:
            yield _layer_place(layer, f"{tensor}.bias", bias, shape[:1], view[:2], (0, 1), branch)
    if config.norm_heads:
        yield _norm_place(layer, "self_attn.q_norm", "query_norm", width)
        yield _norm_place(layer, "self_attn.k_norm", "key_norm", width)
    view = (embed, config.num_heads, width)
    shape = (embed, math.prod(view[1:]))
    yield _layer_place(layer, "self_attn.o_proj.weight", "attention_out", shape, view, (1, 2, 0))


def _layer_place(
    layer: int,
    name: str,
    variable: str,
    shape: Shape,
    view: Shape,
    order: tuple[int, ...],
    branch: int | None = None,
    at: int = 1,
) -> TensorPlace:
    """Returns the place of a tensor of a layer.

    If several tensors share a variable, `branch` is the index of this one in dim `at` of it.
    """
    # One index per dim of the variable: the layer first, then the dims of the view, with the branch
    # inserted among them.
    part: list[int | None] = [layer, *(None for _ in view)]
    if branch is not None:
        part.insert(at, branch)
    tensor = f"model.layers.{layer}.{name}"
    return TensorPlace(tensor, shape, f"blocks.{variable}", tuple(part), view, order)


def _norm_place(layer: int, name: str, variable: str, size: int) -> TensorPlace:
    return _layer_place(layer, f"{name}.weight", variable, (size,), (size,), (0,))
