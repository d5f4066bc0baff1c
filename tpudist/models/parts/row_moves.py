"""Moves of rows by index, such as tokens to experts, whose gradients are gathers too."""

from __future__ import annotations

import jax


@jax.custom_vjp
def move(values: jax.Array, source: jax.Array, uses: jax.Array) -> jax.Array:
    """Returns `values[b, source[b, i]]` as `[batch, i, embed]`, or 0 without a source.

    Args:
        values: `[batch, j, embed]`.
        source: `[batch, i]`; the size of `j` for no source.
        uses: Inverse of `source`, `[batch, j, use]`; the size of `i` for an unused value. It makes
            the gradient a gather too, where JAX would scatter.
    """
    return take(values, source, 0)


def _move_forward(values, source, uses):
    return move(values, source, uses), uses


def _move_backward(uses, gradient):
    return sum(take(gradient, uses[..., i], 0) for i in range(uses.shape[-1])), None, None


move.defvjp(_move_forward, _move_backward)


def take(values: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    """Returns `values[b, index[b, i]]`, or `fill` if the index is out of range."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=fill))(values, index)
