"""Works with arrays of typed random keys of any shape, such as the keys of scanned layers."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def is_key(value: object) -> bool:
    """Whether a value is an array of typed random keys."""
    dtype = getattr(value, "dtype", None)  # any leaf of a pytree, such as an array or a shape
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def fold_in(keys: jax.Array, number: ArrayLike) -> jax.Array:
    """Folds a number, which may be traced, into each key of an array."""
    # `jax.random.fold_in` itself accepts only a scalar key.
    if not is_key(keys) or not keys.ndim:
        return jax.random.fold_in(keys, number)
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return folded.reshape(keys.shape)
