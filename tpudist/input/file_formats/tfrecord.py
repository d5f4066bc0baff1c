"""TFRecord files, whose records are found by their headers. No TensorFlow.

A record is its length (uint64), the masked CRC of that (uint32), its bytes, and their masked CRC.
"""

import mmap
import struct
from pathlib import Path

import numpy as np

from tpudist.input.file_formats import byte_ranges, crc32c
from tpudist.input.file_formats.file import CannotRead, explain_errors

_HEADER, _FOOTER = 12, 4
_MAX_CHECKED_BYTES = 1 << 22  # of records whose checksums are computed side by side


class TFRecordFile:
    """Records of bytes."""

    def __init__(self, path: Path):
        """Finds the records of a file; of each, its header is read.

        Raises:
            CannotRead: It is not there, cut off, or damaged; names the record.
        """
        self._path = path
        with explain_errors(path), path.open("rb") as file:
            size = file.seek(0, 2)
            if size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._starts, self._ends = self._index(data, size)
            else:
                self._starts = self._ends = np.zeros(0, np.int64)
        self.num_records = len(self._starts)

    def _index(self, data: mmap.mmap, size: int) -> tuple[np.ndarray, np.ndarray]:
        starts, at = [], 0
        read_length = struct.Struct("<Q").unpack_from
        while at + _HEADER + _FOOTER <= size:
            starts.append(at)
            at += _HEADER + read_length(data, at)[0] + _FOOTER
        whole = at == size
        if not starts:
            raise self._truncation_error(0)
        # A length beyond the file may come of damage as well as of a file that is cut off.
        self._check_headers(data, starts)
        if not whole:
            # Either the last record leads beyond the file, or what is left after it is too little
            # for another, and that is the one that was cut off.
            raise self._truncation_error(len(starts) - (at > size))
        begins = np.array(starts, np.int64)
        ends = np.append(begins[1:], size) - _FOOTER
        return begins + _HEADER, ends

    def _check_headers(self, data: mmap.mmap, starts: list[int]) -> None:
        for first in range(0, len(starts), 1 << 16):
            headers = [data[at : at + _HEADER] for at in starts[first : first + (1 << 16)]]
            stored = np.frombuffer(b"".join(x[8:] for x in headers), "<u4")
            wrong = np.flatnonzero(crc32c.compute_masked([x[:8] for x in headers]) != stored)
            if len(wrong):
                raise self._damage_error(first + int(wrong[0]), "its length", data[:2])

    def _truncation_error(self, number: int) -> CannotRead:
        return CannotRead(
            f"The file {self._path} ends within record {number}: it was truncated, or is still "
            "being written. Write it again, or omit it."
        )

    def _damage_error(self, number: int, what: str, begin: bytes = b"") -> CannotRead:
        remedy = "Write it again, or omit it."
        if number == 0 and begin == b"\x1f\x8b":
            remedy = "It is compressed with gzip: uncompress it, so that records can be found."
        elif number == 0 and begin:
            remedy = "Is it a TFRecord file? Pass format=, or write it again."
        return CannotRead(
            f"Record {number} of the TFRecord file {self._path} is damaged: the checksum of {what} "
            f"does not match. {remedy}"
        )

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The bytes of these records.

        Raises:
            CannotRead: A checksum does not fit; names the record.
        """
        ends = self._ends[numbers] + _FOOTER
        parts = byte_ranges.read(self._path, self._starts[numbers], ends)
        first = longest = 0
        for last, part in enumerate(parts, start=1):
            # Side by side, each takes the room of the longest.
            longest = max(longest, len(part))
            if longest * (last - first + 1) > _MAX_CHECKED_BYTES or last == len(parts):
                self._check(numbers[first:last], parts[first:last])
                first, longest = last, 0
        return [bytes(part[:-_FOOTER]) for part in parts]

    def _check(self, numbers: np.ndarray, parts: list[memoryview]) -> None:
        stored = np.frombuffer(b"".join(x[-_FOOTER:] for x in parts), "<u4")
        wrong = np.flatnonzero(crc32c.compute_masked([x[:-_FOOTER] for x in parts]) != stored)
        if len(wrong):
            raise self._damage_error(int(numbers[wrong[0]]), "its bytes")

    def close(self) -> None:
        """Nothing is held open."""
