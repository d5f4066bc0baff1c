"""The activation of an MLP and the product after it, with a backward pass that works in place.

An MLP's tensors are the widest of a block. Its backward pass reads what the activation was given
and the gradient of what it gave, and writes what it gave once more and the gradients of what it was
given: as many as it reads, and the compilers of TPUs hold all of them at once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tpudist.models.parts.logical import constrain

# Positions at a time: what they make is much less than what is saved, and much more than a tile.
_MOST, _LEAST = 128, 16


def activate(gate: jax.Array, *up: jax.Array, gelu: bool = False) -> jax.Array:
    """SwiGLU of two branches (with `gelu` GeGLU), or GELU of one: `[..., mlp]`, as each of them.

    GELU is that of the tanh.
    """
    if not up:
        return jax.nn.gelu(gate)
    return (jax.nn.gelu(gate) if gelu else jax.nn.silu(gate)) * up[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def activation_product(
    branches: tuple[jax.Array, ...], weight: jax.Array, gelu: bool = False
) -> jax.Array:
    """`activate(*branches, gelu=gelu) @ weight`, `[batch, length, embed]`; of `[mlp, embed]`.

    The backward pass overwrites the branches and the gradient, some positions at a time, so no
    axis may split the length. Of a step of a model with 16 billion parameters on v5e-256 it saves
    1.6 of 10.4 GB, and takes no time.
    """
    batch, length, _ = branches[0].shape
    return (_flat(activate(*branches, gelu=gelu)) @ weight).reshape(batch, length, -1)


def _forward(branches: tuple[jax.Array, ...], weight: jax.Array, gelu: bool):
    return activation_product(branches, weight, gelu), (branches, weight)


def _backward(gelu: bool, saved: tuple[tuple[jax.Array, ...], jax.Array], d_out: jax.Array):
    branches, weight = saved
    d_hidden = jnp.einsum("te,me->tm", _flat(d_out), weight).reshape(branches[0].shape)
    d_hidden = constrain(d_hidden, "batch", None, "mlp")
    length = d_hidden.shape[1]
    size = _piece(length)

    def overwrite(i: jax.Array, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pieces = [jax.lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in tensors]
        hidden, back = jax.vjp(functools.partial(activate, gelu=gelu), *pieces[:-1])
        made = (*back(pieces[-1]), hidden)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, new, i * size, 1)
            for x, new in zip(tensors, made, strict=True)
        )

    *d_branches, hidden = jax.lax.fori_loop(0, length // size, overwrite, (*branches, d_hidden))
    return tuple(d_branches), jnp.einsum("tm,te->me", _flat(hidden), _flat(d_out))


activation_product.defvjp(_forward, _backward)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _piece(length: int) -> int:
    """The most positions that cut a length into equal pieces; all, if it has no such divisor."""
    divisors = [size for size in range(_LEAST, _MOST + 1) if length % size == 0]
    return max(divisors, default=length)
