"""Typed random keys, alone or in arrays of any shape, as those of scanned layers are."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def fold_in(keys: jax.Array, number: Any) -> jax.Array:
    """Keys of the same shape, each folded with a number, which may be traced."""
    if not is_key(keys) or not keys.ndim:
        return jax.random.fold_in(keys, number)
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return folded.reshape(keys.shape)
