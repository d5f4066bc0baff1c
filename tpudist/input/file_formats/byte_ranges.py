"""Reads parts of a file, neighbours together."""

import os
from pathlib import Path

import numpy as np

from tpudist.input.file_formats.file import CannotRead, explain_errors

# What lies between two parts is read with them if it is no more than this: asking twice costs more.
_MAX_GAP_BYTES = 4096
_MAX_READ_BYTES = 1 << 24


def read(path: Path, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
    """The bytes from each of `starts` to the end that belongs to it, in their order.

    Raises:
        CannotRead: The file is not there any more, or shorter than it was.
    """
    found: list[memoryview] = [memoryview(b"")] * len(starts)
    by_place = np.argsort(starts, kind="stable")
    with explain_errors(path), path.open("rb", buffering=0) as file:
        at = 0
        while at < len(by_place):
            together = _num_in_one_read(starts[by_place[at:]], ends[by_place[at:]])
            group = by_place[at : at + together]
            start, end = int(starts[group[0]]), int(ends[group].max())
            data = memoryview(_pread(file.fileno(), start, end - start))
            if len(data) < end - start:
                raise CannotRead(
                    f"The file {path} is shorter than when it was opened: it ends before byte "
                    f"{end}. Do not write to files that are being read."
                )
            for i in group.tolist():
                found[i] = data[int(starts[i]) - start : int(ends[i]) - start]
            at += together
    return found


def _num_in_one_read(starts: np.ndarray, ends: np.ndarray) -> int:
    """How many of the first parts, which are sorted, are read at once."""
    far = starts[1:] - ends[:-1] > _MAX_GAP_BYTES
    far |= ends[1:] - starts[0] > _MAX_READ_BYTES
    return int(np.argmax(far)) + 1 if far.any() else len(starts)


def _pread(file: int, start: int, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = os.pread(file, left, start + size - left)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
