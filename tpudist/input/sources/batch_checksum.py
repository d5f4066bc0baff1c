"""The checksum of a batch, which shows whether a pass that is read again gives the same batches."""

import math
import zlib

import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.transfer import host_batch

# A larger array is sampled, in blocks that are spread evenly over it: rows often begin alike. So
# the checksum takes at most about a millisecond per array.
_MAX_BYTES = 1 << 22
_BLOCK_BYTES = 64


def checksum(element: PyTree, index: int) -> int:
    """Returns the CRC-32 of the arrays of `element`, which is batch `index` of its pass.

    Raises:
        TypeError: If a leaf is not an array of numbers.
    """
    leaves, _, _ = host_batch.as_arrays(element, f"Batch {index} of the dataset")
    found = 0
    for leaf in leaves:
        found = zlib.crc32(f"{leaf.dtype.str}{leaf.shape}".encode(), found)
        found = zlib.crc32(_sample(leaf), found)
    return found


def _sample(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, or every k-th block of them if there are many."""
    if array.nbytes <= _MAX_BYTES:
        return np.frombuffer(array.tobytes(), np.uint8)
    all_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    step = -(-array.nbytes // _MAX_BYTES)
    # Prime to the bytes of a row, so that the blocks are at different places in different rows.
    while math.gcd(step, array.nbytes // len(array)) > 1:
        step += 1
    num_blocks = array.nbytes // _BLOCK_BYTES
    blocks = all_bytes[: num_blocks * _BLOCK_BYTES].reshape(num_blocks, _BLOCK_BYTES)
    return np.ascontiguousarray(blocks[::step])
