"""Integers of 64 bits on their way to JAX, which keeps the lower 32 and says nothing.

Unless 64-bit numbers are enabled. Most NumPy integers are of 64 bits and small; one that does not
fit is refused where it comes in. Arrays of other dtypes cost a look at their type.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.xla.settings import Setting

HOST_TYPES = (np.ndarray, np.generic)
"""What NumPy gives, and what libraries derive of it, such as arrays in files."""


def check_fit(value: Any, what: str | Callable[[], str]) -> None:
    """Refuses integers of NumPy's that JAX would cut to 32 bits; anything else is fine.

    Args:
        value: Any value; lists of integers are looked at as JAX would take them.
        what: What it is, for the message, or a function that says so.

    Raises:
        ValueError: An integer does not fit the dtype that JAX makes of its own.
    """
    if isinstance(value, np.ndarray | np.generic):
        dtype: np.dtype = value.dtype
    elif type(value) is int:
        dtype = np.dtype(np.int64)
    else:
        return
    numbers: Any = value
    if dtype.kind not in "iu" or dtype.itemsize < 8:
        return
    bounds = _bounds(dtype.newbyteorder("="), Setting.ENABLE_X64.read())
    if bounds is None or not np.size(numbers):
        return
    name, least, greatest = bounds
    smallest, largest = int(np.min(numbers)), int(np.max(numbers))
    if least <= smallest and largest <= greatest:
        return
    wrong = largest if largest > greatest else smallest
    raise ValueError(
        f"{what if isinstance(what, str) else what()} holds the integer {wrong} as {dtype}, of "
        f"which JAX makes {name}: it goes from {least} to {greatest}, and the number would become "
        f"another. Give smaller numbers, convert them to floats, or enable integers of 64 bits "
        f"(the environment variable JAX_ENABLE_X64=1)."
    )


@functools.lru_cache(maxsize=16)
def _bounds(dtype: np.dtype, x64: bool) -> tuple[str, int, int] | None:
    """The dtype that JAX makes of a dtype of integers, and its range; None if it is the same."""
    del x64  # which `canonicalize_dtype` reads for itself
    made = jax.dtypes.canonicalize_dtype(dtype)
    if made.itemsize >= dtype.itemsize:
        return None
    return str(made), int(np.iinfo(made).min), int(np.iinfo(made).max)
