"""Looks up rows of a table, with a gradient that stays split as the batch is.

The gradient of `table[tokens]` is a scatter, for which XLA gathers the gradients of all tokens on
every device that they are split over (25 GB for 1536 sequences of 2048 tokens and a width of 4096).
As the product with one-hot rows, which a TPU's compiler never holds, each device sums over its own
tokens and only the table's gradient is reduced. Other compilers would hold these rows, and one
device has nothing to gather: there it is a scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpudist.models.attention import platform
from tpudist.models.logical import inner_axes


@jax.custom_vjp
def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table`, `[vocabulary, embed]`, for `tokens`, `[batch, length]`: one for each.

    A token that is no row, below 0 or from `vocabulary` on, gets the nearest row, and none of what
    it asks for in the gradient.
    """
    return table.at[tokens].get(mode="clip", wrap_negative_indices=False)


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return lookup(table, tokens), (tokens, table.shape[0])


def _backward(saved: tuple[jax.Array, int], gradient: jax.Array) -> tuple[jax.Array, None]:
    tokens, vocabulary = saved
    if platform() == "tpu" and inner_axes():
        # As work, a lookup is nothing (see planner/work.py).
        with jax.named_scope("in_place_of_scatter"):
            rows = jax.nn.one_hot(tokens, vocabulary, dtype=gradient.dtype)
            return jnp.einsum("blv,ble->ve", rows, gradient), None
    total = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    total = total.at[tokens].add(
        gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False
    )
    return total.astype(gradient.dtype), None


lookup.defvjp(_forward, _backward)
