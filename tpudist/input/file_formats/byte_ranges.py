"""Reads many ranges of one file, with one system call for ranges that are close together."""

import os
from pathlib import Path

import numpy as np

from tpudist.input.file_formats.file import CannotRead, explain_errors

# A gap of up to 4 KiB between two ranges is read too: that costs less than another system call.
_MAX_GAP_BYTES = 4096
# Bounds the memory for one read: the parts of a batch may be all over a large file.
_MAX_READ_BYTES = 1 << 24


def read(path: Path, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
    """Returns the bytes of each range from `starts[i]` to `ends[i]`, in this order.

    Raises:
        CannotRead: If the file is missing, or shorter than when it was opened.
    """
    parts: list[memoryview] = [memoryview(b"")] * len(starts)
    by_position = np.argsort(starts, kind="stable")
    with explain_errors(path), path.open("rb", buffering=0) as file:
        first = 0
        while first < len(by_position):
            num_ranges = _num_in_one_read(starts[by_position[first:]], ends[by_position[first:]])
            group = by_position[first : first + num_ranges]
            start, end = int(starts[group[0]]), int(ends[group].max())
            data = memoryview(_pread(file.fileno(), start, end - start))
            if len(data) < end - start:
                raise CannotRead(
                    f"The file {path} is shorter than when it was opened: it ends before byte "
                    f"{end}. Do not write to files that are being read."
                )
            for i in group.tolist():
                parts[i] = data[int(starts[i]) - start : int(ends[i]) - start]
            first += num_ranges
    return parts


def _num_in_one_read(starts: np.ndarray, ends: np.ndarray) -> int:
    """Returns how many of the sorted ranges, from the first one, share a system call."""
    is_far = starts[1:] - ends[:-1] > _MAX_GAP_BYTES
    is_far |= ends[1:] - starts[0] > _MAX_READ_BYTES
    return int(np.argmax(is_far)) + 1 if is_far.any() else len(starts)


def _pread(file: int, start: int, size: int) -> bytes:
    # The system may return fewer bytes than requested, and returns none at the end of the file.
    parts, num_missing = [], size
    while num_missing:
        part = os.pread(file, num_missing, start + size - num_missing)
        if not part:
            break
        parts.append(part)
        num_missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
