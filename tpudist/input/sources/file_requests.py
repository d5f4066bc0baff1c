"""The bytes of some examples in files, which are requested together."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from tpudist.input.file_formats.open_files import OpenFiles


class _Ranges(NamedTuple):
    """Ranges of one file, and the bytes that reading them takes."""

    starts: np.ndarray
    ends: np.ndarray
    num_bytes: int


class FileRequests:
    """The ranges of bytes of some examples, by file; see `read_ahead.Requests`.

    Args:
        files: The files.
        group_by_file: Called with numbers of examples; returns the file, the positions and the
            numbers within the file of those in each file.
    """

    def __init__(
        self,
        files: OpenFiles,
        group_by_file: Callable[[np.ndarray], Iterable[tuple[int, np.ndarray, np.ndarray]]],
    ):
        self._files, self._group_by_file = files, group_by_file
        self._by_file: dict[int, _Ranges] = {}
        self._num_bytes = 0

    def add(self, numbers: np.ndarray, max_bytes: int, *, in_part: bool) -> bool:
        """Adds examples if the bytes of all fit; see `read_ahead.Requests`."""
        added: dict[int, _Ranges] = {}
        num_bytes = self._num_bytes
        for file, _, file_numbers in self._group_by_file(numbers):
            old = self._by_file.get(file)
            starts, ends = self._files.get(file).ranges(file_numbers)
            if old is not None:
                starts, ends = np.append(old.starts, starts), np.append(old.ends, ends)
                num_bytes -= old.num_bytes
            costs = self._files.files[file].costs(starts, ends)
            if num_bytes + int(costs.sum()) > max_bytes:
                if not in_part:
                    return False
                # The first ones: `read` requests the others when the batch needs them.
                num_fitting = int(np.searchsorted(np.cumsum(costs), max_bytes - num_bytes, "right"))
                first = np.argsort(starts, kind="stable")[:num_fitting]
                starts, ends, costs = starts[first], ends[first], costs[:num_fitting]
            added[file] = _Ranges(starts, ends, int(costs.sum()))
            num_bytes += added[file].num_bytes
        self._by_file |= added
        self._num_bytes = num_bytes
        return True

    def begin(self) -> list[object]:
        """Begins to read; the bytes are kept as long as the result is referenced."""
        parts: list[object] = []
        for file, (starts, ends, _) in self._by_file.items():
            parts += self._files.files[file].prefetch(starts, ends)
        return parts
