"""A multilayer perceptron: the smallest model with dims to split, for tests and examples."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from tpudist.models.parts.logical import axes


class MLP(nnx.Module):
    """Network from features `[batch, dims[0]]` to outputs `[batch, dims[-1]]`, with GELUs between.

    Weights are alternately `[embed, mlp]` and `[mlp, embed]`. So if a rule splits `mlp`, every
    other product needs no communication.

    Args:
        dims: Widths of the input, the hidden layers and the output.
        rngs: Random keys; parameters come from `rngs.params`.

    Raises:
        ValueError: If there are fewer than two dims.
    """

    def __init__(self, dims: Sequence[int], *, rngs: nnx.Rngs):
        if len(dims) < 2:
            raise ValueError(
                f"An MLP needs at least the dims of its input and output; got dims={tuple(dims)}."
            )
        names = ("embed", "mlp")
        self.layers = nnx.List(
            nnx.Linear(
                dims[i],
                dims[i + 1],
                kernel_metadata=axes(names[i % 2], names[(i + 1) % 2]),
                bias_metadata=axes(names[(i + 1) % 2]),
                rngs=rngs,
            )
            for i in range(len(dims) - 1)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns outputs `[batch, dims[-1]]`."""
        for layer in self.layers[:-1]:
            x = jax.nn.gelu(layer(x))
        return self.layers[-1](x)
