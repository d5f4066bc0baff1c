"""Files on the disks of this machine, with one system call for ranges that are close together."""

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tpudist.input.storage.data_file import CannotRead, find_groups

# A gap of up to 4 KiB between two ranges is read too: that costs less than another system call.
_MAX_GAP_BYTES = 4096
# Bounds the memory for one read: the parts of a batch may be all over a large file.
_MAX_READ_BYTES = 1 << 24
# Parts of the file between headers of records that are larger than this are not read.
_CHUNK_BYTES = 1 << 17


class LocalFile:
    """A file with a path; see `DataFile`."""

    is_remote = False

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """See `DataFile`."""
        return self.path.name

    def read(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """See `DataFile`."""
        parts: list[memoryview] = [memoryview(b"")] * len(starts)
        limits = {"max_gap": _MAX_GAP_BYTES, "max_bytes": _MAX_READ_BYTES}
        with explain_errors(self.path), self.path.open("rb", buffering=0) as file:
            for start, end, group in find_groups(starts, ends, **limits):
                data = memoryview(_pread(file.fileno(), start, end - start))
                if len(data) < end - start:
                    raise CannotRead(
                        f"The file {self.path} is shorter than when it was opened: it ends before "
                        f"byte {end}. Do not write to files that are being read."
                    )
                for i in group.tolist():
                    parts[i] = data[int(starts[i]) - start : int(ends[i]) - start]
        return parts

    def prefetch(self, starts: np.ndarray, ends: np.ndarray) -> list[object]:
        """Does nothing: the operating system reads ahead."""
        del starts, ends
        return []

    def costs(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns zeros; see `prefetch`."""
        del ends
        return np.zeros(len(starts), np.int64)

    def chunks(
        self, first_needed: Callable[[], int] = lambda: 0
    ) -> Iterator[tuple[int, memoryview]]:
        """See `DataFile`. The file is not mapped: a map of a file that shrinks ends the program."""
        start = 0
        with explain_errors(self.path), self.path.open("rb", buffering=0) as file:
            while data := _pread(file.fileno(), start, _CHUNK_BYTES):
                yield start, memoryview(data)
                start = max(start + len(data), first_needed())

    def size(self) -> int:
        """See `DataFile`."""
        with explain_errors(self.path):
            return self.path.stat().st_size

    def open(self, starts: np.ndarray | None = None, ends: np.ndarray | None = None) -> BinaryIO:
        """See `DataFile`."""
        del starts, ends
        with explain_errors(self.path):
            return self.path.open("rb")

    def identity(self, opened: BinaryIO) -> Hashable:
        """Returns the path, the size and the time of the last change."""
        stat = os.fstat(opened.fileno())
        return (str(self.path), stat.st_size, stat.st_mtime_ns)

    def version(self) -> None:
        """See `DataFile`."""
        return None

    def index(self, reader: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """Builds the index: reading a local file costs about as much as reading a stored index."""
        del reader
        return build()


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Raises `CannotRead`, which names the file, for errors of the operating system."""
    try:
        yield
    except FileNotFoundError as error:
        raise CannotRead(
            f"The file {path} does not exist. Check whether it was moved, and whether its disk is "
            "mounted."
        ) from error
    except IsADirectoryError as error:
        raise CannotRead(
            f"{path} is a directory. Pass the files in it, such as {path}/*."
        ) from error
    except OSError as error:
        raise CannotRead(
            f"The file {path} cannot be read: {error.strerror or error}. Check its permissions and "
            "its disk."
        ) from error


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
