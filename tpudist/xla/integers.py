"""Checks that values keep their numbers when they become JAX arrays.

Unless 64-bit numbers are enabled, JAX silently keeps the lower 32 bits of 64-bit integers. NumPy's
integers have 64 bits by default, but are usually small, so only larger numbers raise an error.
Masked arrays and buffers of bytes would also become other numbers. For arrays of other dtypes, the
check only reads the type.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.xla.settings import Setting

# Types of NumPy values, including subclasses in libraries, such as arrays in files.
HOST_TYPES = (np.ndarray, np.generic)

Name = str | Callable[[], str]


def refuse_masks_and_buffers(value: object, name: Name) -> None:
    """Raises an error for a masked array, whose mask would be lost, and for a buffer of bytes.

    Args:
        value: Any value.
        name: Name of the value for the message, or a function that returns it.

    Raises:
        TypeError: If `value` is a masked array or a buffer.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{_text_of(name)} is a masked numpy array of shape "
            f"{list(value.shape)}, but devices hold no masks: the step would compute with the "
            "masked elements. Pass x.filled(0), and pass the mask ~numpy.ma.getmaskarray(x) as a "
            "separate array."
        )
    if isinstance(value, bytearray | memoryview):
        raise TypeError(
            f"{_text_of(name)} is a {type(value).__name__}, a buffer "
            "whose bytes may be numbers of any dtype. Choose the dtype: numpy.frombuffer(x, "
            "dtype=numpy.uint8)."
        )


def _text_of(name: Name) -> str:
    return name if isinstance(name, str) else name()


def check_fit(value: object, name: Name) -> None:
    """Checks that JAX would not truncate integers of NumPy or Python to 32 bits.

    Args:
        value: Any value. Values other than NumPy's and `int` pass.
        name: Name of the value for the message, or a function that returns it.

    Raises:
        ValueError: If an integer does not fit JAX's dtype for it.
        TypeError: If `value` is a masked array or a buffer.
    """
    refuse_masks_and_buffers(value, name)
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
    jax_dtype, least, greatest = bounds
    smallest, largest = int(np.min(numbers)), int(np.max(numbers))
    if least <= smallest and largest <= greatest:
        return
    wrong = largest if largest > greatest else smallest
    raise ValueError(
        f"{_text_of(name)} holds the integer {wrong} as {dtype}. JAX "
        f"converts it to {jax_dtype}, from {least} to {greatest}, which would change the number. "
        "Use smaller numbers, convert them to floats, or enable integers of 64 bits (the "
        "environment variable JAX_ENABLE_X64=1)."
    )


@functools.lru_cache(maxsize=16)
def _bounds(dtype: np.dtype, x64: bool) -> tuple[str, int, int] | None:
    """Returns JAX's dtype for a dtype of integers, and its range; None if it is not smaller."""
    del x64  # only part of the cache key: `canonicalize_dtype` reads the setting itself
    jax_dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jax_dtype.itemsize >= dtype.itemsize:
        return None
    return str(jax_dtype), int(np.iinfo(jax_dtype).min), int(np.iinfo(jax_dtype).max)
