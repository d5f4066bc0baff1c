"""Matrices of a transformer as 8-bit integers, which halves the bytes that decoding reads.

The products stay in `TransformerConfig.dtype`: a matrix is dequantized where it is multiplied, and
the TPU compiler does that inside of the product. Each output channel of a matrix has a scale, and
zero is exact ("symmetric"). The table of embeddings, norms, biases and routers keep their numbers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tpudist.models.parts.logical import axes
from tpudist.models.parts.quantized_matrix import SCALE
from tpudist.models.transformer import Transformer

# The dims that a product with each matrix contracts; a scale is common to them.
_CONTRACTED = {
    "attention_in": ("embed",),
    "query_in": ("embed",),
    "key_value_in": ("embed",),
    "attention_out": ("heads", "head_dim"),
    "mlp_in": ("embed",),
    "mlp_out": ("mlp",),
    "unembedding": ("embed",),
}
_MAX_INT8 = 127


def quantize(model: Transformer) -> Transformer:
    """Replaces the matrices of a transformer by int8 in place, and returns it, for inference only.

    The table of embeddings is rounded to `TransformerConfig.dtype`, which a lookup does anyway.
    Call it on a loaded model, or in `Strategy.create` together with the creation of the model.

    Raises:
        ValueError: If the model is quantized already.
    """
    refuse_quantized(model, "quantize")
    for owner in (model.blocks, model):
        for name, dims in _CONTRACTED.items():
            if not isinstance(weight := vars(owner).get(name), nnx.Param):
                continue
            names: tuple[str | None, ...] = weight.get_metadata("out_sharding")
            over = tuple(i for i, dim in enumerate(names) if dim in dims)
            values, scale = _quantize(weight.get_raw_value(), over)
            weight.set_raw_value(values)
            kept = [None if i in over else dim for i, dim in enumerate(names)]
            setattr(owner, name + SCALE, nnx.Param(scale, **axes(*kept)))
    table = model.embedding
    table.set_raw_value(table.get_raw_value().astype(model.config.dtype))
    return model


def refuse_quantized(model: Transformer, name: str) -> None:
    """Raises an error if a model is quantized.

    Raises:
        ValueError: If it is.
    """
    if hasattr(model.blocks, "mlp_in" + SCALE):
        raise ValueError(
            f"{name} received a model whose matrices are int8 already. Pass the model as it was "
            "before tpudist.models.quantize."
        )


@functools.partial(jax.jit, static_argnums=1)
def _quantize(weight: jax.Array, over: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=over, keepdims=True) / _MAX_INT8
    scale = jnp.where(scale == 0, 1, scale)  # of a channel of zeros
    return jnp.round(weight / scale).astype(jnp.int8), scale
