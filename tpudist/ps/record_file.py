"""RecordFile: appends records (JSON and named arrays) to a file, and removes an incomplete one.

A record is a header with lengths and a checksum, a line of JSON, and the bytes of its arrays. It
contains no code. Appended records survive the process; synced records survive the host.
`coordinator.rpc` sends records as messages (`encode`, `decode`).
"""

import collections
import io
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401  # registers names such as bfloat16 in NumPy
import numpy as np

_MAGIC = b"tpd1"
_HEADER = struct.Struct("<4sIQI")  # magic, bytes of JSON, bytes of arrays, CRC-32 of both
_MAX_TEXT = 1 << 28  # bytes; a longer text means that the header is damaged


class RecordError(OSError):
    """A file of records is damaged before its end, so later records would be lost.

    Remedy: Restore the file, or an older snapshot of the folder. If you have neither, start with an
    empty folder and a checkpoint.
    """


class RecordFile:
    """A file to which records are appended.

    Opens or creates the file, and removes an incomplete record at its end.

    Args:
        path: Path of the file.

    Raises:
        RecordError: If the file is damaged before its end.
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path):
        if path.exists():
            # Records have no index, so all are read to find the end of the last complete one.
            last = collections.deque((end for end, _, _ in _read(path)), maxlen=1)
            os.truncate(path, last[0] if last else 0)
        self._file = path.open("ab", buffering=0)
        self._last_bytes = 0  # of the record that was appended last
        self._is_synced = True
        weakref.finalize(self, self._file.close)

    def append(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
        """Appends a record; returns its number of bytes.

        Raises:
            OSError: If the disk is full. The incomplete record is removed.
            ValueError: If the facts are too long.
        """
        record = encode(facts, arrays)
        start = self._size()
        try:
            rest = memoryview(record)
            while rest:  # an unbuffered write may write only a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise
        self._is_synced = False
        self._last_bytes = len(record)
        return len(record)

    def remove_last(self) -> int:
        """Removes the record that was appended last; returns its number of bytes."""
        assert self._last_bytes, "no record was appended since the last one was removed"
        # Unlike a record that cancels another one, this needs no room on a full disk.
        num_bytes, self._last_bytes = self._last_bytes, 0
        os.ftruncate(self._file.fileno(), self._size() - num_bytes)
        self._is_synced = False
        return num_bytes

    def _size(self) -> int:
        # Not `tell`: after a failed write, the position is behind the end.
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Returns when all records would survive a crash of the host."""
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._is_synced = True

    def close(self) -> None:
        """Syncs and closes the file."""
        if not self._file.closed:
            with self._file:
                self.sync()


def encode(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes of a record.

    Raises:
        ValueError: If the facts are too long.
    """
    parts = {name: np.asarray(x) for name, x in arrays.items()}
    described = [[name, x.dtype.name, list(x.shape)] for name, x in parts.items()]
    text = json.dumps({"facts": facts, "arrays": described}).encode()
    if len(text) > _MAX_TEXT:  # a reader would take it for damage
        raise ValueError(
            f"A record has {len(text)} bytes of JSON; at most {_MAX_TEXT} are allowed."
        )
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in parts.values())
    crc = zlib.crc32(data, zlib.crc32(text))
    return _HEADER.pack(_MAGIC, len(text), len(data), crc) + text + data


def decode(record: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the facts and the read-only arrays of a record.

    Raises:
        ValueError: If the bytes are not a complete, undamaged record.
    """
    contents = _read_record(io.BytesIO(record), len(record))
    if contents is None:
        raise ValueError("no complete record")
    return contents


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yields the facts and arrays of the records of a file, without an incomplete one at its end.

    Raises:
        RecordError: If a record is damaged, and others follow it.
        OSError: If the file cannot be read.
    """
    return ((facts, arrays) for _, facts, arrays in _read(path))


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any], dict[str, np.ndarray]]]:
    """Yields the end of each record, its facts and its arrays."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while (start := file.tell()) < size:
            record = _read_record(file, size)
            if record is None:
                # A crash can only cut off the last record. If a complete one follows, the file was
                # damaged, and to truncate it here would lose updates without an error.
                if _has_record_after(path, start + 1):
                    raise RecordError(
                        f"{path} is damaged at byte {start} of {size}, and later records depend "
                        f"on the lost ones. Restore the file, or an older snapshot."
                    )
                return
            yield file.tell(), *record


def _read_record(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    # Lengths are checked before anything is read: a damaged header must not ask for 2^64 bytes.
    magic, num_text, num_data, crc = _HEADER.unpack(header)
    left = size - file.tell()
    if magic != _MAGIC or num_text > _MAX_TEXT or num_text + num_data > left:
        return None
    text, data = file.read(num_text), file.read(num_data)
    if zlib.crc32(data, zlib.crc32(text)) != crc:
        return None
    description = json.loads(text)
    arrays, offset = {}, 0
    for name, dtype_name, shape in description["arrays"]:
        dtype, count = np.dtype(dtype_name), int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return description["facts"], arrays


def _has_record_after(path: Path, start: int) -> bool:
    """Returns whether a complete record begins at some byte from `start`."""
    # A cut-off record is taken for damage only if its arrays contain the bytes of a record with a
    # valid checksum. Mapped, because the log may be larger than the free memory.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = data.find(_MAGIC, start)
        while position >= 0:
            file.seek(position)
            if _read_record(file, len(data)) is not None:
                return True
            position = data.find(_MAGIC, position + 1)
    return False
