"""Interface of a file of bytes, on a disk or in an object store, and the error of all of them."""

from collections.abc import Callable, Hashable, Iterator
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np


class CannotRead(ValueError):
    """A file is missing, not readable or incomplete; the message names it and the remedy.

    Remedy: restore the file, allow it to be read, or leave it out of the list of files.
    """


class Version(NamedTuple):
    """The version of a file.

    Attributes:
        folder: URL of the folder, without secrets.
        host: Host that was asked.
        text: Text that changes with the bytes of the file.
    """

    folder: str
    host: str
    text: str


class DataFile(Protocol):
    """One file, which several threads may read at once. `str` returns its path or URL.

    All methods raise `CannotRead` if the file is missing or not readable, or if it has changed
    since it was first read.
    """

    @property
    def name(self) -> str:
        """Name without folders."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to a server."""
        ...

    def read(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """Returns the bytes of each range from `starts[i]` to `ends[i]`, in this order."""
        ...

    def prefetch(self, starts: np.ndarray, ends: np.ndarray) -> list[object]:
        """Starts to read ranges; `read` uses the bytes as long as the result is referenced."""
        ...

    def costs(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the bytes that `prefetch` reads for each of these ranges, by ascending starts.

        They include the bytes between ranges. Those of several ranges count once.
        """
        ...

    def chunks(
        self, first_needed: Callable[[], int] = lambda: 0
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields parts of the file, from its start to its end, each with its position.

        Args:
            first_needed: Called before a part; returns the first position that is needed. Parts
                before it may be left out.
        """
        ...

    def size(self) -> int:
        """Returns the number of bytes."""
        ...

    def open(self, starts: np.ndarray | None = None, ends: np.ndarray | None = None) -> BinaryIO:
        """Opens the file for reading at any position; the ranges say what will be read."""
        ...

    def identity(self, opened: BinaryIO) -> Hashable:
        """Returns a value that differs from that of an earlier file with the same path."""
        ...

    def version(self) -> Version | None:
        """Returns the version that all reads of this file see.

        None for a file on a disk: copies of it on several hosts are equal, but have other times.
        """
        ...

    def index(self, reader: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the ascending positions of the records, stored by an earlier run or built now.

        Args:
            reader: Name of the format and the version of its index.
            build: Reads the file and returns the positions.
        """
        ...


def costs_of_ranges(starts: np.ndarray, ends: np.ndarray, *, max_gap: int) -> np.ndarray:
    """Returns the bytes that each range adds to those before it, by ascending starts.

    Gaps of at most `max_gap` bytes before a range are read too.
    """
    by_position = np.argsort(starts, kind="stable")
    starts, ends = starts[by_position], ends[by_position]
    before = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
    is_near = starts - before <= max_gap
    return np.maximum(ends - np.where(is_near, before, starts), 0)


def find_groups(
    starts: np.ndarray, ends: np.ndarray, *, max_gap: int, max_bytes: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (start, end, indices of the ranges in it) of parts of a file that are read at once.

    Ranges with at most `max_gap` bytes between them are read together, up to `max_bytes`. One range
    is never split.
    """
    by_position = np.argsort(starts, kind="stable")
    first = 0
    while first < len(by_position):
        left, right = starts[by_position[first:]], ends[by_position[first:]]
        is_far = left[1:] - right[:-1] > max_gap
        is_far |= right[1:] - left[0] > max_bytes
        num_ranges = int(np.argmax(is_far)) + 1 if is_far.any() else len(left)
        group = by_position[first : first + num_ranges]
        yield int(starts[group[0]]), int(ends[group].max()), group
        first += num_ranges
