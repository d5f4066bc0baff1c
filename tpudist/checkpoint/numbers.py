"""Converts between Python numbers, NumPy numbers and arrays `[]` when they are restored."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tpudist.checkpoint.entries import ARRAY, VALUE, Entry, describe
from tpudist.checkpoint.errors import CheckpointError

_KINDS = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
# The dtypes that Python numbers get in NumPy. Any other dtype of a float was chosen by somebody.
_DEFAULTS = ("float", "float64", "complex128")


def needs_conversion(entry: Entry, saved: Mapping[str, Any]) -> bool:
    """Returns whether a saved number has another type than its entry, such as `int32[]` and `int`.

    Both must be booleans, integers, floats or complex. Floats also need the same dtype, unless one
    is a Python float or a float64: rounding a float32 to a bfloat16 needs `cast=True`.
    """
    kinds = {entry.kind, saved["kind"]}
    same = len(kinds) == 1 and entry.dtype == saved["dtype"]
    if same or not kinds <= {ARRAY, VALUE} or entry.shape or tuple(saved["shape"]):
        return False
    kind = _number_kind(entry.dtype)
    if kind is None or kind != _number_kind(saved["dtype"]):
        return False
    return kind in (bool, int) or entry.dtype in _DEFAULTS or saved["dtype"] in _DEFAULTS


def convert(entry: Entry, saved: Mapping[str, Any], value: ArrayLike) -> object:
    """Returns a saved number as the type of `entry`: a Python number, or a NumPy array `[]`.

    Raises:
        CheckpointError: If the dtype of `entry` cannot hold the number.
    """
    number = np.asarray(value).item()
    if entry.kind == VALUE:
        return number
    dtype = jnp.dtype(entry.dtype)
    if _number_kind(entry.dtype) is int:
        limits = jnp.iinfo(dtype)
        fits = int(limits.min) <= number <= int(limits.max)
    else:
        with np.errstate(over="ignore"):
            fits = not np.isfinite(number) or bool(jnp.isfinite(np.asarray(number, dtype)))
    if not fits:
        here = describe(entry.kind, entry.shape, entry.dtype)
        there = describe(saved["kind"], saved["shape"], saved["dtype"])
        raise CheckpointError(
            f"{entry.name} is {here} in the objects, which cannot hold the {there} value of the "
            f"checkpoint: {number}. Nothing was restored. Give the object a wider dtype."
        )
    return np.asarray(number, dtype)


def _number_kind(dtype: str) -> type | None:
    if dtype == "str":
        return None
    known = jnp.dtype(dtype)
    return next((k for k, x in _KINDS.items() if jnp.issubdtype(known, x)), None)
