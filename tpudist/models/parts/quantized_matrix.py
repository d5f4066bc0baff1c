"""Quantized matrices: 8-bit integers, and next to them a scale of each output channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

SCALE = "_scale"
"""Suffix of the name of a scale, after the name of its matrix."""


class QuantizedMatrix:
    """Product of integers and scales, which is computed when it is cast.

    Each use casts its own part, inside of its product. If two products shared the result, XLA would
    write it to memory.

    Args:
        values: Integers.
        scale: Scales, of a shape that broadcasts.
    """

    def __init__(self, values: jax.Array, scale: jax.Array):
        self.values, self.scale, self.shape = values, scale, values.shape

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the matrix in a dtype."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)

    def __getitem__(self, index: Any) -> QuantizedMatrix:
        """Returns a part; dims with a common scale are complete in it."""
        return QuantizedMatrix(self.values[index], self.scale[index])

    def __iter__(self) -> Iterator[QuantizedMatrix]:
        return (self[i] for i in range(self.shape[0]))


def join_scales(weights: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns weights by name, without scales; a matrix with a scale is a `QuantizedMatrix`."""
    return {
        name: QuantizedMatrix(x, weights[name + SCALE]) if name + SCALE in weights else x
        for name, x in weights.items()
        if not name.endswith(SCALE)
    }
