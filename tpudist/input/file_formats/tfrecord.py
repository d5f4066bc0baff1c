"""Reads TFRecord files without TensorFlow.

A record is its length (uint64), the masked CRC-32C of the length (uint32), its bytes, and their
masked CRC-32C. A file has no index, so opening it reads the header of each record.
"""

import struct

import google_crc32c
import numpy as np

from tpudist.input.storage.data_file import CannotRead, DataFile

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER, _FOOTER = _LENGTH.size + _CRC.size, _CRC.size
_INDEX = "tfrecord 1"  # a stored index with another name is not used
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

    def __init__(self, file: DataFile):
        self._file = file
        # The start of each record's header, and the end of the last record.
        self._bounds = file.index(_INDEX, self._find_records)
        self.num_records = len(self._bounds) - 1

    def _find_records(self) -> np.ndarray:
        """Returns the start of each header and the end of the file, after checking the headers."""
        bounds = [0]
        size, carried = self._file.size(), b""  # the bytes of a header that began earlier

        def first_needed() -> int:
            return bounds[-1] + len(carried)

        for start, chunk in self._file.chunks(first_needed):
            end = start + len(chunk)
            if bounds[-1] >= end:  # a record continues after this chunk, which has no header
                continue
            start -= len(carried)
            data = carried + bytes(chunk) if carried else chunk
            while bounds[-1] + _HEADER <= end:
                header = bytes(data[bounds[-1] - start : bounds[-1] - start + _HEADER])
                bounds.append(bounds[-1] + self._record_size(header, len(bounds) - 1))
            carried = bytes(data[max(bounds[-1] - start, 0) :])
        if bounds[-1] != size:
            # Either the last record ends beyond the file, or the bytes after it are too few for
            # another record. That next record is then the truncated one.
            raise self._truncation_error(len(bounds) - 1 - (bounds[-1] > size))
        return np.array(bounds, np.int64)

    def _record_size(self, header: bytes, number: int) -> int:
        """Returns the bytes of a record with its header and checksums."""
        # Headers are checked before the size: a record that ends beyond the file may have a
        # damaged length, or the file may be truncated.
        length = header[: _LENGTH.size]
        if checksum(length) != _CRC.unpack_from(header, _LENGTH.size)[0]:
            raise self._damage_error(number, "its length", header[:2])
        return _HEADER + _LENGTH.unpack(length)[0] + _FOOTER

    def _truncation_error(self, number: int) -> CannotRead:
        return CannotRead(
            f"The file {self._file} ends within record {number}: it was truncated, or is still "
            "being written. Write it again, or omit it."
        )

    def _damage_error(self, number: int, part: str, first_bytes: bytes = b"") -> CannotRead:
        remedy = "Write it again, or omit it."
        if number == 0 and first_bytes == b"\x1f\x8b":
            remedy = "It is compressed with gzip: uncompress it, so that records can be found."
        elif number == 0 and first_bytes:
            remedy = "Is it a TFRecord file? Pass format=, or write it again."
        return CannotRead(
            f"Record {number} of the TFRecord file {self._file} is damaged: the checksum of {part} "
            f"does not match. {remedy}"
        )

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the bytes of the records with these numbers.

        Raises:
            CannotRead: If a checksum does not match; the message names the record.
        """
        records = []
        parts = self._file.read(*self.ranges(numbers))
        for number, part in zip(numbers.tolist(), parts, strict=True):
            record = bytes(part[:-_FOOTER])
            if checksum(record) != _CRC.unpack(part[-_FOOTER:])[0]:
                raise self._damage_error(number, "its bytes")
            records.append(record)
        return records

    def ranges(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `RecordFile`."""
        return self._bounds[numbers] + _HEADER, self._bounds[numbers + 1]

    def close(self) -> None:
        """Does nothing: each `read` opens the file."""
