"""Which tensor of a checkpoint is which part of which variable of the transformer.

Checkpoints of PyTorch have a matrix `[out, in]` for each projection of each layer. The transformer
has one variable for all layers, with what is projected from first, heads as dims of their own, and
queries, keys and values (or the branches of an MLP) beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig

OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a checkpoint, and the part of a variable that it is.

    Attributes:
        tensor: Its name.
        shape: Its shape.
        variable: The variable's name in the model, as "blocks.mlp_in".
        part: For each dim of the variable the one index that the tensor is, or None for all.
        view: The tensor's shape with heads as dims of their own.
        order: The dims of `view` in the order of the dims of the variable that are not indexed.
    """

    tensor: str
    shape: tuple[int, ...]
    variable: str
    part: tuple[int | None, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]

    def view_as_variable(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with the dims of the variable, but for those that are indexed; no copy."""
        return tensor.reshape(self.view).transpose(self.order)

    def find_in(
        self, bounds: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[slice, ...], tuple[Any, ...]] | None:
        """Where a part of the variable has something of the tensor, or None if it has nothing.

        Args:
            bounds: For each dim of the variable where the part begins and ends.

        Returns:
            The part of `view_as_variable`, and where it is in the part of the variable.
        """
        of: list[slice] = []
        to: list[Any] = []
        for index, (start, stop) in zip(self.part, bounds, strict=True):
            if index is None:
                of.append(slice(start, stop))
                to.append(slice(None))
            elif start <= index < stop:
                to.append(index - start)
            else:
                return None
        return tuple(of), tuple(to)


def variable_of(model: Transformer, place: TensorPlace) -> Any:
    """The model's variable of which a tensor is a part."""
    owner: Any = model
    for name in place.variable.split("."):
        owner = getattr(owner, name)
    return owner


def tensor_places(config: TransformerConfig) -> Iterator[TensorPlace]:
    """All tensors of a checkpoint of this model, in the order in which it computes with them."""
    vocab, embed = config.vocabulary, config.embed_dim
    yield _plain("model.embed_tokens.weight", (vocab, embed), "embedding")
    for layer in range(config.num_layers):
        yield from _of_layer(config, layer)
    yield _plain("model.norm.weight", (embed,), "final_norm")
    if not config.tied:
        shape = (vocab, embed)
        yield TensorPlace(OUTPUT, shape, "unembedding", (None, None), shape, (1, 0))


def output_place(config: TransformerConfig) -> TensorPlace:
    """The last projection of a tied model, where a checkpoint has it though it is the embedding."""
    return _plain(OUTPUT, (config.vocabulary, config.embed_dim), "embedding")


def _plain(tensor: str, shape: tuple[int, ...], variable: str) -> TensorPlace:
    dims = tuple(range(len(shape)))
    return TensorPlace(tensor, shape, variable, (None,) * len(shape), shape, dims)


def _of_layer(config: TransformerConfig, layer: int) -> Iterator[TensorPlace]:
    def place(
        name: str,
        variable: str,
        shape: tuple[int, ...],
        view: tuple[int, ...],
        order: tuple[int, ...],
        branch: int | None = None,
        at: int = 1,
    ) -> TensorPlace:
        """A tensor; `branch` is its index in the dim `at` of the variable."""
        part: list[int | None] = [layer, *(None for _ in view)]
        if branch is not None:
            part.insert(at, branch)
        tensor = f"model.layers.{layer}.{name}"
        return TensorPlace(tensor, shape, f"blocks.{variable}", tuple(part), view, order)

    def norm(name: str, variable: str, size: int) -> TensorPlace:
        return place(f"{name}.weight", variable, (size,), (size,), (0,))

    embed, mlp, width = config.embed_dim, config.mlp_dim, config.head_dim
    yield norm("input_layernorm", "attention_norm", embed)
    together = config.kv_heads == config.num_heads
    for i, name in enumerate("qkv"):
        heads = config.num_heads if name == "q" else config.kv_heads
        if together:
            matrix, bias, branch = "attention_in", "attention_bias", i
        elif name == "q":
            matrix, bias, branch = "query_in", "query_bias", None
        else:
            matrix, bias, branch = "key_value_in", "key_value_bias", i - 1
        view = (heads, width, embed)
        shape = (heads * width, embed)
        tensor = f"self_attn.{name}_proj"
        yield place(f"{tensor}.weight", matrix, shape, view, (2, 0, 1), branch, at=2)
        if config.biased:
            yield place(f"{tensor}.bias", bias, shape[:1], view[:2], (0, 1), branch)
    if config.norm_heads:
        yield norm("self_attn.q_norm", "query_norm", width)
        yield norm("self_attn.k_norm", "key_norm", width)
    view = (embed, config.num_heads, width)
    shape = (embed, math.prod(view[1:]))
    yield place("self_attn.o_proj.weight", "attention_out", shape, view, (1, 2, 0))
    if config.norm_outputs:
        yield norm("post_attention_layernorm", "attention_out_norm", embed)
        yield norm("pre_feedforward_layernorm", "mlp_norm", embed)
        yield norm("post_feedforward_layernorm", "mlp_out_norm", embed)
    else:
        yield norm("post_attention_layernorm", "mlp_norm", embed)
    for i, name in enumerate(("gate", "up")):
        shape = (mlp, embed)
        yield place(f"mlp.{name}_proj.weight", "mlp_in", shape, shape, (1, 0), i)
    yield place("mlp.down_proj.weight", "mlp_out", (embed, mlp), (embed, mlp), (1, 0))
