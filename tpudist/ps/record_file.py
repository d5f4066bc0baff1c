"""RecordFile: numbers, names and arrays appended to a file, of which a half-written end is found.

A record is a line of JSON and the bytes of its arrays, after a header with their lengths and a
checksum of all. Nothing in it is code. What a process has appended outlives the process, and what
was synced outlives the host.
"""

import io
import json
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # so that NumPy knows bfloat16 by its name
import numpy as np

_MAGIC = b"tpd1"
_HEADER = struct.Struct("<4sIQI")  # magic, bytes of JSON, bytes of arrays, CRC-32 of both
_MAX_TEXT = 1 << 28


class RecordError(OSError):
    """A file of records is damaged before its end, so later records would be lost.

    Remedy: Restore the file, or an older snapshot of the folder. If you have neither, start with an
    empty folder and a checkpoint.
    """


class RecordFile:
    """A file that is appended to."""

    def __init__(self, path: Path):
        """Opens or makes it; what was not written to its end is taken away.

        Raises:
            RecordError: It is damaged before its end.
            OSError: It cannot be written.
        """
        if path.exists():
            os.truncate(path, max((end for end, _, _ in _read(path)), default=0))
        self._file = path.open("ab", buffering=0)
        self._is_synced = True
        weakref.finalize(self, self._file.close)

    def append(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
        """Adds a record; how many bytes it has.

        Raises:
            OSError: There is no room; what was written of it is taken away.
        """
        record = encode(facts, arrays)
        start = self._file.tell()
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise
        self._is_synced = False
        return len(record)

    def sync(self) -> None:
        """Returns when all of it would outlive the host."""
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._is_synced = True

    def close(self) -> None:
        """Syncs and closes it."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def encode(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A record."""
    parts = {name: np.asarray(x) for name, x in arrays.items()}
    described = [[name, x.dtype.name, list(x.shape)] for name, x in parts.items()]
    text = json.dumps({"facts": facts, "arrays": described}).encode()
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in parts.values())
    crc = zlib.crc32(data, zlib.crc32(text))
    return _HEADER.pack(_MAGIC, len(text), len(data), crc) + text + data


def decode(record: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of a record, which cannot be written to.

    Raises:
        ValueError: It is damaged, or none.
    """
    found = _read_record(io.BytesIO(record), len(record))
    if found is None:
        raise ValueError("no complete record")
    return found


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """The records of a file, in order, up to one that was not written to its end.

    Raises:
        RecordError: One of them is damaged, and others come after it.
        OSError: The file cannot be read.
    """
    return ((facts, arrays) for _, facts, arrays in _read(path))


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any], dict[str, np.ndarray]]]:
    """Where each record ends, and what is in it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while (start := file.tell()) < size:
            record = _read_record(file, size)
            if record is None:
                if _has_record_after(path, start + 1):
                    raise RecordError(
                        f"{path} is damaged at byte {start} of {size}, and later records depend "
                        f"on the lost ones. Restore the file, or an older snapshot."
                    )
                return
            yield file.tell(), *record


def _read_record(file: Any, size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, num_text, num_data, crc = _HEADER.unpack(header)
    left = size - file.tell()
    if magic != _MAGIC or num_text > _MAX_TEXT or num_text + num_data > left:
        return None
    text, data = file.read(num_text), file.read(num_data)
    if zlib.crc32(data, zlib.crc32(text)) != crc:
        return None
    found = json.loads(text)
    arrays, offset = {}, 0
    for name, dtype, shape in found["arrays"]:
        kind, count = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, kind, count, offset).reshape(shape)
        offset += count * kind.itemsize
    return found["facts"], arrays


def _has_record_after(path: Path, start: int) -> bool:
    """Whether a whole record begins at some byte from `start` on."""
    data = path.read_bytes()
    position = data.find(_MAGIC, start)
    while position >= 0:
        with path.open("rb") as file:
            file.seek(position)
            if _read_record(file, len(data)) is not None:
                return True
        position = data.find(_MAGIC, position + 1)
    return False
