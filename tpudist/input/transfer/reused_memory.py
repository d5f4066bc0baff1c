"""Host memory for batches that is used again once nobody holds what was in it.

New memory costs more than what is written to it: the system clears every page and maps it when it
is first touched, 5 to 10 ms for a batch of 19 MB that is gathered in 2 ms into memory that has been
in use. On CPU, JAX uses arrays in place that begin where these do, and so copies nothing.
"""

import collections
import math
import threading

import numpy as np

# JAX uses host memory in place, on CPU, where it begins at a multiple of this many bytes.
ALIGNMENT_BYTES = 64
# Below this the allocator has memory in use at hand, and the care taken here costs more.
_MIN_BYTES = 1 << 20
# What waits to be used again, of each size: blocks of so many bytes in all, and at most as many as
# are held at once where some elements are ready, one is made and steps are at others; but never
# fewer than what steps need that give one back for each that is taken.
_FREE_BYTES = 256 << 20
_MAX_FREE = 8
_MIN_FREE = 2
# How many sizes are remembered.
_MAX_SIZES = 8


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose values are not set, in memory that was used before if it is a large one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_BYTES:
        return np.empty(shape, dtype)
    return np.asarray(_Block(num_bytes)).view(dtype).reshape(shape)


def copy_of(array: np.ndarray) -> np.ndarray:
    """A copy of an array, in such memory."""
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def align_for_parts(array: np.ndarray, num_parts: int) -> np.ndarray:
    """`array` or a copy of it: what costs less if the parts along dim 0 are to be put on CPU.

    JAX would copy the parts into new memory, if they are not aligned.
    """
    if array.nbytes < _MIN_BYTES or array.nbytes % (num_parts * ALIGNMENT_BYTES):
        return array
    aligned = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0
    return array if aligned else copy_of(array)


class _Block:
    """A block of memory, given back when the last array in it is gone."""

    __slots__ = ("__array_interface__", "_whole")

    # NumPy and JAX hold on to the object that gave an `__array_interface__` for as long as there is
    # any view of the memory, so `__del__` comes with the last one.

    def __init__(self, num_bytes: int):
        whole = _free.take(num_bytes)
        self._whole = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8) if whole is None else whole
        start = self._whole.ctypes.data
        start += -start % ALIGNMENT_BYTES
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (start, False),
        }

    def __del__(self):
        _free.give(self._whole)


class _Free:
    """The blocks that are not in use, the sizes asked for last at the end."""

    def __init__(self):
        # Giving back may happen in the middle of taking, when Python collects garbage.
        self._lock = threading.RLock()
        self._blocks: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()

    def take(self, num_bytes: int) -> np.ndarray | None:
        with self._lock:
            blocks = self._blocks.setdefault(num_bytes, [])
            self._blocks.move_to_end(num_bytes)
            while len(self._blocks) > _MAX_SIZES:
                self._blocks.popitem(last=False)
            return blocks.pop() if blocks else None

    def give(self, whole: np.ndarray) -> None:
        with self._lock:
            blocks = self._blocks.get(len(whole) - ALIGNMENT_BYTES)
            room = max(_MIN_FREE, min(_FREE_BYTES // len(whole), _MAX_FREE))
            if blocks is not None and len(blocks) < room:
                blocks.append(whole)


_free = _Free()
