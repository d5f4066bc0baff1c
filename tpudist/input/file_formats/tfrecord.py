"""Reads TFRecord files without TensorFlow.

A record is its length (uint64), the masked CRC-32C of the length (uint32), its bytes, and their
masked CRC-32C. A file has no index, so opening it reads the header of each record.
"""

import mmap
import struct
from pathlib import Path

import google_crc32c
import numpy as np

from tpudist.input.file_formats import byte_ranges
from tpudist.input.file_formats.file import CannotRead, explain_errors

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER, _FOOTER = _LENGTH.size + _CRC.size, _CRC.size
_MASK_DELTA = 0xA282EAD8  # TensorFlow, core/lib/hash/crc32c.h


def checksum(data: bytes) -> int:
    """Returns the checksum of `data` that TFRecord files store."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


class TFRecordFile:
    """Records of bytes. Opening the file finds the records by their headers.

    Raises:
        CannotRead: If the file is missing, truncated or damaged; the message names the record.
    """

    block_ends = None

    def __init__(self, path: Path):
        self._path = path
        with explain_errors(path), path.open("rb") as file:
            size = file.seek(0, 2)
            if size:  # an empty file cannot be mapped
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._starts, self._ends = self._index(data, size)
            else:
                self._starts = self._ends = np.zeros(0, np.int64)
        self.num_records = len(self._starts)

    def _index(self, data: mmap.mmap, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions at which the bytes of each record start and end."""
        headers, position = [], 0
        while position + _HEADER + _FOOTER <= size:
            headers.append(position)
            position += _HEADER + _LENGTH.unpack_from(data, position)[0] + _FOOTER
        if not headers:
            raise self._truncation_error(0)
        # Headers are checked before the size: a record that ends beyond the file may have a
        # damaged length, or the file may be truncated.
        for number, start in enumerate(headers):
            length, stored = data[start : start + _LENGTH.size], start + _LENGTH.size
            if checksum(length) != _CRC.unpack_from(data, stored)[0]:
                raise self._damage_error(number, "its length", data[:2])
        if position != size:
            # Either the last record ends beyond the file, or the bytes after it are too few for
            # another record. That next record is then the truncated one.
            raise self._truncation_error(len(headers) - (position > size))
        starts = np.array(headers, np.int64)
        ends = np.append(starts[1:], size) - _FOOTER
        return starts + _HEADER, ends

    def _truncation_error(self, number: int) -> CannotRead:
        return CannotRead(
            f"The file {self._path} ends within record {number}: it was truncated, or is still "
            "being written. Write it again, or omit it."
        )

    def _damage_error(self, number: int, part: str, first_bytes: bytes = b"") -> CannotRead:
        remedy = "Write it again, or omit it."
        if number == 0 and first_bytes == b"\x1f\x8b":
            remedy = "It is compressed with gzip: uncompress it, so that records can be found."
        elif number == 0 and first_bytes:
            remedy = "Is it a TFRecord file? Pass format=, or write it again."
        return CannotRead(
            f"Record {number} of the TFRecord file {self._path} is damaged: the checksum of {part} "
            f"does not match. {remedy}"
        )

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the bytes of the records with these numbers.

        Raises:
            CannotRead: If a checksum does not match; the message names the record.
        """
        ends = self._ends[numbers] + _FOOTER
        records = []
        parts = byte_ranges.read(self._path, self._starts[numbers], ends)
        for number, part in zip(numbers.tolist(), parts, strict=True):
            record = bytes(part[:-_FOOTER])
            if checksum(record) != _CRC.unpack(part[-_FOOTER:])[0]:
                raise self._damage_error(number, "its bytes")
            records.append(record)
        return records

    def close(self) -> None:
        """Does nothing: each `read` opens the file."""
