"""Norms of a transformer: parameters, and RMSNorm or LayerNorm in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from tpudist.models.parts.logical import axes


class NormSettings(Protocol):
    """Fields of `TransformerConfig` that this module reads; see there."""

    @property
    def norm(self) -> Literal["rms", "layer"]:
        """Kind of the norms."""
        ...

    @property
    def param_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the parameters."""
        ...

    @property
    def norm_epsilon(self) -> float:
        """Number that norms add to the mean square."""
        ...

    @property
    def norm_offset(self) -> bool:
        """Whether to multiply by 1 plus the parameters."""
        ...


def add_norm(owner: nnx.Module, name: str, config: NormSettings, dims: Mapping[str, int]) -> None:
    """Adds the parameters of a norm to a module: `name`, and with LayerNorm `name_bias`.

    Args:
        owner: Module.
        name: Name of the attribute.
        config: Kind of the norm.
        dims: Logical names and sizes of the dims of the parameters, in order.
    """
    start = jnp.zeros if config.norm_offset else jnp.ones
    setattr(owner, name, nnx.Param(start(tuple(dims.values()), config.param_dtype), **axes(*dims)))
    if config.norm == "layer":
        zeros = jnp.zeros(tuple(dims.values()), config.param_dtype)
        setattr(owner, f"{name}_bias", nnx.Param(zeros, **axes(*dims)))


def normalize(
    x: jax.Array, weights: dict[str, jax.Array], name: str, config: NormSettings
) -> jax.Array:
    """Returns `x` normalized over its last dims, as many as the parameters have."""
    scale, bias = weights[name], weights.get(f"{name}_bias")
    over = tuple(range(-scale.ndim, 0))
    x32 = x.astype(jnp.float32)
    if config.norm == "layer":
        x32 = x32 - jnp.mean(x32, axis=over, keepdims=True)
    mean_square = jnp.mean(jnp.square(x32), axis=over, keepdims=True)
    inverse = jax.lax.rsqrt(mean_square + config.norm_epsilon)
    if config.norm_offset:
        scale = 1 + scale.astype(jnp.float32)
    # Rounded once, after the scale.
    out = x32 * inverse * scale
    return (out if bias is None else out + bias).astype(x.dtype)
