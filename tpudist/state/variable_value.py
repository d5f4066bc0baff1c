"""Converts values to arrays that fit a Variable, and rejects values that do not fit.

Integers are checked here before JAX converts them, because JAX's conversion to int32 wraps around.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tpudist.array_types import Shape
from tpudist.options import shorten
from tpudist.values.array_like import ReadsAsArray
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, internals
from tpudist.xla.traces import is_traced, run_eagerly


class SupportsArray(Protocol):
    """An array of another library, such as a PyTorch tensor."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns the NumPy array."""
        ...


# A value that can be assigned to a Variable: whatever `jax.numpy.asarray` converts, a Variable, or
# (in a replica function) a PerReplica.
VariableValue: TypeAlias = ArrayLike | SupportsArray | Sequence[Any] | PerReplica


def initial_array(
    initial_value: VariableValue | Callable[[], VariableValue], dtype: DTypeLike | None, name: str
) -> jax.Array:
    """Returns the initial value as an array, which is traced if the value is traced.

    Raises:
        ValueError: If it has integers that do not fit the dtype of variable `name`.
    """
    # The function is called eagerly also inside a trace. So its arrays are concrete, unless it
    # uses a traced value of the surrounding function. Only such a value is converted in the trace.
    with run_eagerly():
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, ReadsAsArray):
            value = value.read_value()
        integers.refuse_masks_and_buffers(value, f"The initial value of variable '{name}'")
        if not is_traced(value):
            if _has_default_dtype(value):
                value = _convert_integers(value, name, dtype)
            return _as_array(value, dtype)
    return _as_array(value, dtype)


def check_shape(shape: int | Sequence[int | None] | None, value: jax.Array, name: str) -> None:
    """Raises `ValueError` if the initial value does not have `shape`; None matches any size."""
    if shape is None:
        return
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    sizes = zip(dims, value.shape, strict=False)
    if len(dims) != value.ndim or any(dim not in (None, size) for dim, size in sizes):
        raise ValueError(
            f"Variable '{name}' was made with shape={shorten(shape)} and an initial value of shape "
            f"{value.shape}. The shape of a variable does not change. Omit `shape`."
        )


def _as_array(value: VariableValue, dtype: DTypeLike | None) -> jax.Array:
    with internals.place_explicitly():
        array = jnp.asarray(value, dtype)
    # A Python number makes a weakly typed array, whose dtype would change in the first assignment.
    return jax.lax.convert_element_type(array, array.dtype)


def shares(value: jax.Array, n: int) -> jax.Array:
    """Returns `[n, ...]` parts that sum to `value`.

    Parts of a float are equal. For an integer, the first `value % n` parts are larger by 1.
    """
    with internals.place_explicitly():
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return jnp.broadcast_to(value / n, (n, *value.shape)).astype(value.dtype)
        extra = (jnp.arange(n) < jnp.expand_dims(value % n, -1)).astype(value.dtype)  # 0 or 1
        return jnp.expand_dims(value // n, 0) + jnp.moveaxis(extra, -1, 0)


def conform(value: VariableValue, name: str, shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Returns `value` as an array of the shape and dtype of variable `name`.

    Raises:
        ValueError: If the shape differs, the dtype does not convert without loss of kind, or an
            integer does not fit.
    """
    value = value.read_value() if isinstance(value, ReadsAsArray) else value
    integers.refuse_masks_and_buffers(value, f"A value for variable '{name}'")
    has_default_dtype = _has_default_dtype(value)
    with internals.place_explicitly():
        array = jnp.asarray(_convert_integers(value, name, dtype) if has_default_dtype else value)
    # Equality comes first: NumPy's `can_cast` does not know the dtype of random keys. A chosen
    # dtype is never converted, so that float64 values do not lose digits unnoticed.
    is_same = array.dtype == dtype
    converts = not is_same and (has_default_dtype or jax.typeof(array).weak_type)
    fits = is_same or (converts and np.can_cast(array.dtype, dtype, "same_kind"))
    if array.shape != shape or not fits:
        raise ValueError(
            f"Variable '{name}' holds {dtype}{list(shape)}, but was assigned "
            f"{array.dtype}{list(array.shape)}. Convert the value: the shape and dtype of a "
            "variable do not change."
        )
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return array if is_key else array.astype(dtype)  # `astype` also makes a weak type strong


def _convert_integers(value: VariableValue, name: str, dtype: DTypeLike | None) -> VariableValue:
    """Converts host integers for a dtype, and raises `ValueError` if they do not fit.

    Must run before `jnp.asarray`: JAX converts to int32 first, where larger integers wrap around.
    """
    numbers = np.asarray(value)
    if numbers.dtype == object and numbers.size and _are_integers(numbers):
        raise ValueError(
            f"Variable '{name}' received integers up to {max(map(abs, numbers.flat))}, which no "
            "dtype can hold. Use smaller numbers, or floats."
        )
    if not np.issubdtype(numbers.dtype, np.integer):
        return value
    if dtype is None:  # an initial value without `dtype`: the dtype that JAX would choose
        default = numbers.dtype if isinstance(value, np.ndarray | np.generic) else jnp.int_
        dtype = jax.dtypes.canonicalize_dtype(default)
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


def _has_default_dtype(value: object) -> bool:
    """Whether a host value consists of numbers for which nobody chose a dtype.

    NumPy integers of any width count: an int64 usually comes from Python integers, and no integer
    loses digits, because `_convert_integers` checks that it fits.
    """
    if isinstance(value, list | tuple):
        return all(map(_has_default_dtype, value))
    if isinstance(value, np.generic | np.ndarray):
        return np.issubdtype(value.dtype, np.integer)
    return isinstance(value, int | float | complex | bool)


def computes_here() -> bool:
    """Whether JAX operations run at once, also inside `jax.ensure_compile_time_eval()`."""
    # `traces.is_eager` reports a trace inside `ensure_compile_time_eval`; only an operation tells.
    return not is_traced(jnp.add(0, 0))
