"""Host memory for batches that is reused when the last array in it is gone.

New memory costs more than the copy into it, because the system clears and maps each page at the
first access: 5 to 10 ms for a batch of 19 MB, which is gathered in 2 ms into used memory. The
arrays are aligned, so that JAX on CPU uses them in place, without a copy.
"""

import collections
import math
import threading

import numpy as np

from tpudist.array_types import Shape

# JAX on CPU uses host memory in place if it begins at a multiple of this.
ALIGNMENT_BYTES = 64
# For smaller arrays the allocator of NumPy reuses memory itself.
_MIN_BYTES = 1 << 20
# Free blocks of each size: as many as fit in 256 MiB, but at most 8 (some elements are ready, one
# is being made, steps use others) and at least 2 (a loop that frees a block for each it takes).
_FREE_BYTES = 256 << 20
_MAX_FREE = 8
_MIN_FREE = 2
# Sizes with free blocks: the most recently used ones.
_MAX_SIZES = 8


def empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Returns an array without initial values; a large one in reused memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_BYTES:
        return np.empty(shape, dtype)
    return np.asarray(_Block(num_bytes)).view(dtype).reshape(shape)


def copy_of(array: np.ndarray) -> np.ndarray:
    """Returns a copy of an array; a large one in reused memory."""
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def align_for_parts(array: np.ndarray, num_parts: int) -> np.ndarray:
    """Returns `array`, or an aligned copy if its parts along dim 0 can then be used in place.

    JAX on CPU copies parts that are not aligned into new memory, which costs more than this copy.
    """
    if array.nbytes < _MIN_BYTES or array.nbytes % (num_parts * ALIGNMENT_BYTES):
        return array
    aligned = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0
    return array if aligned else copy_of(array)


class _Block:
    """A block of memory that becomes free when the last array in it is gone.

    NumPy and JAX keep the object with the `__array_interface__` alive as long as any view of the
    memory exists. So Python calls `__del__` after the last view.
    """

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, num_bytes: int):
        memory = _free.take(num_bytes)
        self._memory = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8) if memory is None else memory
        start = self._memory.ctypes.data
        start += -start % ALIGNMENT_BYTES
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (start, False),
        }

    def __del__(self):
        _free.add(self._memory)


class _FreeBlocks:
    """The blocks that are not in use, by size; the most recently requested sizes are last."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may call `add` during `take`, in the same thread.
        self._lock = threading.RLock()
        self._blocks: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()

    def take(self, num_bytes: int) -> np.ndarray | None:
        with self._lock:
            blocks = self._blocks.setdefault(num_bytes, [])
            self._blocks.move_to_end(num_bytes)
            while len(self._blocks) > _MAX_SIZES:
                self._blocks.popitem(last=False)
            return blocks.pop() if blocks else None

    def add(self, memory: np.ndarray) -> None:
        with self._lock:
            blocks = self._blocks.get(len(memory) - ALIGNMENT_BYTES)
            limit = max(_MIN_FREE, min(_FREE_BYTES // len(memory), _MAX_FREE))
            if blocks is not None and len(blocks) < limit:
                blocks.append(memory)


_free = _FreeBlocks()
