"""Allocates arrays in huge pages, which make random access to a large array faster.

A processor caches the addresses of some thousand pages. Rows of a table are spread over many more:
with pages of 4 KiB, half of the time of an update was spent on finding addresses.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

_PAGE_BYTES = 2 << 20
_DONTNEED, _HUGEPAGE = 4, 14  # from <linux/mman.h>


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, device: jax.Device) -> jax.Array:
    """Returns zeros in host memory, in huge pages if Linux provides them."""
    with jax.default_device(device):
        # `device_put` commits the array, so that programs which use it run on this device.
        array = jax.block_until_ready(jax.device_put(jnp.zeros(shape, dtype), device))
    advise = _madvise()
    start = -(-array.unsafe_buffer_pointer() // _PAGE_BYTES) * _PAGE_BYTES
    length = (array.unsafe_buffer_pointer() + array.nbytes) // _PAGE_BYTES * _PAGE_BYTES - start
    if advise is not None and length > 0 and advise(start, length, _HUGEPAGE) == 0:
        # JAX has written zeros into small pages. Releasing them is safe: the kernel provides zeros
        # at the next access, now in huge pages. That holds for private anonymous memory, which
        # JAX's allocator of the CPU uses. Only whole pages inside of the array are released.
        advise(start, length, _DONTNEED)
    return array


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
