"""Which tensor of a checkpoint is which part of which variable of the transformer.

Checkpoints of PyTorch have a matrix `[out, in]` for each projection of each layer. The transformer
has one variable for all layers, with what is projected from first, heads as dims of their own, and
queries, keys and values (or the branches of an MLP) beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tpudist.models.transformer_config import TransformerConfig


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


def tensor_places(config: TransformerConfig, prefix: str = "model.") -> Iterator[TensorPlace]:
    """All tensors of a checkpoint of this model.

    Args:
        config: The model.
        prefix: What the names of all tensors but that of the last projection begin with.
    """
    vocab, embed = config.vocabulary, config.embed_dim
    yield _plain(f"{prefix}embed_tokens.weight", (vocab, embed), "embedding")
    for layer in range(config.num_layers):
        yield from _of_layer(config, f"{prefix}layers.{layer}.", layer)
    yield _plain(f"{prefix}norm.weight", (embed,), "final_norm")
    if not config.tied:
        shape = (vocab, embed)
        yield TensorPlace("lm_head.weight", shape, "unembedding", (None, None), shape, (1, 0))


def _plain(tensor: str, shape: tuple[int, ...], variable: str) -> TensorPlace:
    dims = tuple(range(len(shape)))
    return TensorPlace(tensor, shape, variable, (None,) * len(shape), shape, dims)


def _of_layer(config: TransformerConfig, prefix: str, layer: int) -> Iterator[TensorPlace]:
    embed, mlp, width = config.embed_dim, config.mlp_dim, config.head_dim

    def place(name, variable, indices, view, order):
        shape = view[:1] + (view[1] * view[2],) if name == "self_attn.o_proj" else None
        if shape is None:
            shape = (view[0] * view[1], view[2]) if len(view) == 3 else view
        # Dims of the variable: the layer, perhaps one that is indexed, and those of the view.
        rest = [None] * len(view)
        for dim, index in indices.items():
            rest.insert(dim - 1, index)
        return TensorPlace(
            f"{prefix}{name}.weight", shape, f"blocks.{variable}", (layer, *rest), view, order
        )

    query, key = (config.num_heads, width, embed), (config.kv_heads, width, embed)
    yield place("input_layernorm", "attention_norm", {}, (embed,), (0,))
    if config.kv_heads == config.num_heads:
        for i, name in enumerate("qkv"):
            yield place(f"self_attn.{name}_proj", "attention_in", {2: i}, query, (2, 0, 1))
    else:
        yield place("self_attn.q_proj", "query_in", {}, query, (2, 0, 1))
        for i, name in enumerate("kv"):
            yield place(f"self_attn.{name}_proj", "key_value_in", {2: i}, key, (2, 0, 1))
    out = (embed, config.num_heads, width)
    yield place("self_attn.o_proj", "attention_out", {}, out, (1, 2, 0))
    yield place("post_attention_layernorm", "mlp_norm", {}, (embed,), (0,))
    for i, name in enumerate(("gate", "up")):
        yield place(f"mlp.{name}_proj", "mlp_in", {1: i}, (mlp, embed), (1, 0))
    yield place("mlp.down_proj", "mlp_out", {}, (embed, mlp), (1, 0))
