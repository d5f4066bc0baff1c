"""CRC-32C of many byte strings at once, as TFRecord files mask it. NumPy only.

A CRC without its final and initial inversion is linear: leading zeros do not change it, and that of
two strings one after the other follows from those of both. So all strings are cut in lanes of equal
length, which go through the table side by side, and their results are joined.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected; RFC 3720, appendix B.4
_MIN_LANE, _MAX_LANE = 64, 4096  # bytes, powers of two
_BLOCK = 4096  # lanes at a time, which fit in the cache: 390 MB/s; 300 MB/s with 16384
_MASK_DELTA = 0xA282EAD8  # TensorFlow, core/lib/hash/crc32c.h


def compute_masked(strings: Sequence[bytes | memoryview]) -> np.ndarray:
    """The masked CRC-32C of each string, uint32 `[len(strings)]`."""
    crc = crc32c(strings).astype(np.uint64)
    rotated = (crc >> np.uint64(15)) | (crc << np.uint64(17))
    return ((rotated + np.uint64(_MASK_DELTA)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def crc32c(strings: Sequence[bytes | memoryview]) -> np.ndarray:
    """The CRC-32C of each string, uint32 `[len(strings)]`."""
    if not strings:
        return np.zeros(0, np.uint32)
    # The initial value, all ones, comes of four bytes before the string: a register of zeros, which
    # the padding leaves as it is, is all ones after them.
    longest = max(map(len, strings)) + 4
    # As many steps along a lane, of two bytes each, as there are to join the lanes.
    lane = 1 << round(math.log2(math.sqrt(2 * longest)))
    lane = min(max(lane, _MIN_LANE), _MAX_LANE)
    num_lanes = -(-longest // lane)
    padded = np.zeros((len(strings), num_lanes * lane), np.uint8)
    for row, string in zip(padded, strings, strict=True):
        start = len(row) - len(string)
        row[start - 4 : start] = _ALL_ONES
        row[start:] = np.frombuffer(string, np.uint8)
    words = padded.view("<u2").reshape(-1, lane // 2)
    parts = [_raw_crc(words[i : i + _BLOCK]) for i in range(0, len(words), _BLOCK)]
    crc = np.concatenate(parts).reshape(len(strings), num_lanes)
    joined = np.zeros(len(strings), np.uint32)
    zeros = _zeros_tables(lane)
    # Linear: the lanes so far with zeros after them, and the next lane by itself.
    for number in range(num_lanes):
        joined = _append_zeros(joined, zeros) ^ crc[:, number]
    return ~joined


_ALL_ONES = np.frombuffer(bytes.fromhex("54641f64"), np.uint8)


def _raw_crc(lanes: np.ndarray) -> np.ndarray:
    """What each lane, uint16 `[lane, word]`, makes of an empty register: uint32 `[lane]`."""
    table = _table()
    crc = np.zeros(len(lanes), np.uint32)
    for words in np.ascontiguousarray(lanes.T):
        index = crc.astype(np.uint16) ^ words
        crc >>= np.uint32(16)
        crc ^= table.take(index)
    return crc


@functools.cache
def _table() -> np.ndarray:
    """What each two bytes make of an empty register, uint32 `[65536]`."""
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


@functools.cache
def _zeros_tables(num_zeros: int) -> np.ndarray:
    """What so many zeros make of each byte of a register, uint32 `[4, 256]`."""
    table = _table()
    values = np.arange(256, dtype=np.uint32)
    tables = np.stack([values << np.uint32(8 * i) for i in range(4)])
    for _ in range(num_zeros // 2):
        tables = table[tables & 0xFFFF] ^ (tables >> 16)
    return tables


def _append_zeros(crc: np.ndarray, tables: np.ndarray) -> np.ndarray:
    return (
        tables[0][crc & 0xFF]
        ^ tables[1][(crc >> 8) & 0xFF]
        ^ tables[2][(crc >> 16) & 0xFF]
        ^ tables[3][crc >> 24]
    )
