"""Zeros in large pages of memory, which random rows of a large array are found in sooner.

A processor knows the places of some thousand pages. Rows of a table are on other pages than those
of the call before, and with pages of 4 KiB half of the time of an update went to finding them.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

_PAGE_BYTES = 2 << 20
_DONTNEED, _HUGEPAGE = 4, 14  # of <linux/mman.h>


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, device: jax.Device) -> jax.Array:
    """Zeros in the host's memory; in large pages where Linux has them for who asks."""
    with jax.default_device(device):
        array = jax.block_until_ready(jax.device_put(jnp.zeros(shape, dtype), device))
    advise = _madvise()
    start = -(-array.unsafe_buffer_pointer() // _PAGE_BYTES) * _PAGE_BYTES
    length = (array.unsafe_buffer_pointer() + array.nbytes) // _PAGE_BYTES * _PAGE_BYTES - start
    if advise is not None and length > 0 and advise(start, length, _HUGEPAGE) == 0:
        # The small pages are given back: who reads there finds zeros again, in a new page.
        advise(start, length, _DONTNEED)
    return array


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
