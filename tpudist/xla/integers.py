"""Integers of 64 bits on their way to JAX, which keeps the lower 32 and says nothing.

Unless 64-bit numbers are enabled. Most NumPy integers are of 64 bits and small; one that does not
fit is refused where it comes in. Arrays of other dtypes cost a look at their type. Masked arrays
and buffers of bytes are refused at the same places: they too would become other numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.xla.settings import Setting

HOST_TYPES = (np.ndarray, np.generic)
"""What NumPy gives, and what libraries derive of it, such as arrays in files."""


def refuse_masks_and_buffers(value: Any, what: str | Callable[[], str]) -> None:
    """Refuses masked arrays, whose masks would be lost, and buffers of bytes.

    Args:
        value: Any value.
        what: Name of the value, for the message, or a function that returns it.

    Raises:
        TypeError: If `value` is one.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{what if isinstance(what, str) else what()} is a masked numpy array of shape "
            f"{list(value.shape)}, but devices hold no masks: the step would compute with the "
            "masked elements. Pass x.filled(0), and pass the mask ~numpy.ma.getmaskarray(x) as a "
            "separate array."
        )
    if isinstance(value, bytearray | memoryview):
        raise TypeError(
            f"{what if isinstance(what, str) else what()} is a {type(value).__name__}, a buffer "
            "whose bytes may be numbers of any dtype. Choose the dtype: numpy.frombuffer(x, "
            "dtype=numpy.uint8)."
        )


def check_fit(value: Any, what: str | Callable[[], str]) -> None:
    """Refuses integers of NumPy's that JAX would cut to 32 bits; anything else is fine.

    Args:
        value: Any value; lists of integers are looked at as JAX would take them.
        what: What it is, for the message, or a function that says so.

    Raises:
        ValueError: An integer does not fit the dtype that JAX makes of its own.
        TypeError: If `value` is a masked array or a buffer.
    """
    refuse_masks_and_buffers(value, what)
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
        f"{what if isinstance(what, str) else what()} holds the integer {wrong} as {dtype}. JAX "
        f"converts it to {name}, from {least} to {greatest}, which would change the number. Use "
        "smaller numbers, convert them to floats, or enable integers of 64 bits (the environment "
        "variable JAX_ENABLE_X64=1)."
    )


@functools.lru_cache(maxsize=16)
def _bounds(dtype: np.dtype, x64: bool) -> tuple[str, int, int] | None:
    """The dtype that JAX makes of a dtype of integers, and its range; None if it is the same."""
    del x64  # which `canonicalize_dtype` reads for itself
    made = jax.dtypes.canonicalize_dtype(dtype)
    if made.itemsize >= dtype.itemsize:
        return None
    return str(made), int(np.iinfo(made).min), int(np.iinfo(made).max)
