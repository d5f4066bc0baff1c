"""What a variable may hold: its initial value, and values that fit what it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.options import shorten
from tpudist.values.array_like import ReadsAsArray
from tpudist.xla import integers, internals
from tpudist.xla.traces import is_traced, run_eagerly


def check_member(kind: type, value: Any, what: str, name: str) -> Any:
    """`value`, if it is a member of the enum `kind`; else a ValueError."""
    if not isinstance(value, kind):
        names = ", ".join(f"{kind.__name__}.{m}" for m in kind.__members__)
        raise ValueError(
            f"Variable '{name}' was made with {what}={shorten(value)}. Use one of {names}."
        )
    return value


def initial_array(initial_value: Any, dtype: Any, name: str) -> jax.Array:
    """The initial value as an array; one that is computed in a trace stays a traced one.

    Raises:
        ValueError: It has integers that do not fit the dtype of variable `name`.
    """
    value = initial_value
    with run_eagerly():
        if callable(value):
            value = value()
        if isinstance(value, ReadsAsArray):
            value = value.read_value()
        integers.refuse_masks_and_buffers(value, f"The initial value of variable '{name}'")
        if not is_traced(value):
            if _has_no_precision(value):
                value = _convert_integers(value, name, dtype)
            return _as_array(value, dtype)
    return _as_array(value, dtype)


def check_shape(shape: Any, value: jax.Array, name: str) -> None:
    """Refuses a `shape` that the initial value does not have; None fits."""
    if shape is None:
        return
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    sizes = zip(dims, value.shape, strict=False)
    if len(dims) != value.ndim or any(dim not in (None, size) for dim, size in sizes):
        raise ValueError(
            f"Variable '{name}' was made with shape={shorten(shape)} and an initial value of shape "
            f"{value.shape}. The shape of a variable does not change. Omit `shape`."
        )


def _as_array(value: Any, dtype: Any) -> jax.Array:
    with internals.place_explicitly():
        array = jnp.asarray(value, dtype)
    # A Python number makes a weakly typed array, whose dtype would change in the first assignment.
    return jax.lax.convert_element_type(array, array.dtype)


def shares(value: jax.Array, n: int) -> jax.Array:
    """`[n, ...]` parts that sum to `value`: equal, but integers with the rest in the first."""
    with internals.place_explicitly():
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return jnp.broadcast_to(value / n, (n, *value.shape)).astype(value.dtype)
        first = (jnp.arange(n) < jnp.expand_dims(value % n, -1)).astype(value.dtype)
        return jnp.expand_dims(value // n, 0) + jnp.moveaxis(first, -1, 0)


def conform(value: Any, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`value` as an array of a variable's shape and dtype.

    Raises:
        ValueError: The shape is another, the dtype does not convert without loss of kind, or an
            integer does not fit.
    """
    value = value.read_value() if isinstance(value, ReadsAsArray) else value
    integers.refuse_masks_and_buffers(value, f"A value for variable '{name}'")
    plain = _has_no_precision(value)
    with internals.place_explicitly():
        array = jnp.asarray(_convert_integers(value, name, dtype) if plain else value)
    same = array.dtype == dtype  # as that of random keys, which NumPy does not know
    converts = not same and (plain or getattr(array, "weak_type", False))
    fits = same or (converts and np.can_cast(array.dtype, dtype, "same_kind"))
    if array.shape != shape or not fits:
        raise ValueError(
            f"Variable '{name}' holds {dtype}{list(shape)}, but was assigned "
            f"{array.dtype}{list(array.shape)}. Convert the value: the shape and dtype of a "
            "variable do not change."
        )
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return array if is_key else array.astype(dtype)  # which makes a weak type a strong one


def _convert_integers(value: Any, name: str, dtype: Any) -> Any:
    """Integers in a variable's dtype: JAX makes int32 of them first, in which larger ones wrap."""
    numbers = np.asarray(value)
    if numbers.dtype == object and numbers.size and _are_integers(numbers):
        raise ValueError(
            f"Variable '{name}' received integers up to {max(map(abs, numbers.flat))}, which no "
            "dtype can hold. Use smaller numbers, or floats."
        )
    if not np.issubdtype(numbers.dtype, np.integer):
        return value
    if dtype is None:  # of an initial value: that of the value, as JAX takes it
        made = jnp.int_ if not isinstance(value, np.ndarray | np.generic) else numbers.dtype
        dtype = jax.dtypes.canonicalize_dtype(made)
    if jnp.issubdtype(dtype, jnp.inexact):
        return numbers.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) and numbers.size:
        least, greatest = int(numbers.min()), int(numbers.max())
        if least < jnp.iinfo(dtype).min or greatest > jnp.iinfo(dtype).max:
            raise ValueError(
                f"Variable '{name}' has dtype {jnp.dtype(dtype)}, from {jnp.iinfo(dtype).min} to "
                f"{jnp.iinfo(dtype).max}, but received integers from {least} to {greatest}. Make "
                "the variable with a larger dtype."
            )
    return value


def _are_integers(numbers: np.ndarray) -> bool:
    return all(isinstance(x, int) for x in numbers.flat)


def _has_no_precision(value: Any) -> bool:
    """Whether a host value is a number, or numbers, that no dtype was chosen for."""
    if isinstance(value, list | tuple):
        return all(map(_has_no_precision, value))
    if isinstance(value, np.generic | np.ndarray):
        return np.issubdtype(value.dtype, np.integer)
    return isinstance(value, int | float | complex | bool)


def computes_here() -> bool:
    """Whether operations run at once, as they do inside `jax.ensure_compile_time_eval()`."""
    return not is_traced(jnp.add(0, 0))
