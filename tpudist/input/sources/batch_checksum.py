"""Checksum of a batch, to detect a dataset that returns other batches when it is read again."""

import math
import zlib

import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.transfer import host_batch

# A larger array is sampled, so that the checksum takes at most about a millisecond per array. The
# blocks are spread evenly over the array, because rows often begin alike.
_MAX_BYTES = 1 << 22
_BLOCK_BYTES = 64


def checksum(element: PyTree, index: int) -> int:
    """Returns the CRC-32 of the arrays of `element`, which is batch `index` of its pass.

    Raises:
        TypeError: If a leaf is not an array of numbers.
    """
    leaves, _, _ = host_batch.as_arrays(element, f"Batch {index} of the dataset")
    crc = 0
    for leaf in leaves:
        crc = zlib.crc32(f"{leaf.dtype.str}{leaf.shape}".encode(), crc)
        crc = zlib.crc32(_sample(leaf), crc)
    return crc


def _sample(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, or every k-th block of them for a large array."""
    if array.nbytes <= _MAX_BYTES:
        return np.frombuffer(array.tobytes(), np.uint8)
    all_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    step = -(-array.nbytes // _MAX_BYTES)
    # `step` has no common divisor with the bytes of a row. So blocks are at different positions in
    # different rows, and every column is sampled. The loop ends at a prime, at the latest.
    while math.gcd(step, array.nbytes // len(array)) > 1:
        step += 1
    num_blocks = array.nbytes // _BLOCK_BYTES
    blocks = all_bytes[: num_blocks * _BLOCK_BYTES].reshape(num_blocks, _BLOCK_BYTES)
    return np.ascontiguousarray(blocks[::step])
