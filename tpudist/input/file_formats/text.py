"""Reads text files, whose records are their lines."""

from pathlib import Path

import numpy as np

from tpudist.input.file_formats import byte_ranges
from tpudist.input.file_formats.file import CannotRead, explain_errors

_CHUNK_BYTES = 1 << 22  # read at a time, to find the lines
_NEWLINE = ord("\n")


class TextFile:
    """Lines of text in UTF-8, without line ends. Opening the file reads it once, to find them.

    Raises:
        CannotRead: If the file is missing or not readable.
    """

    block_ends = None

    def __init__(self, path: Path):
        self._path = path
        found, size = [np.zeros(1, np.int64)], 0
        with explain_errors(path), path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + size + 1)
                size += len(chunk)
        starts = np.concatenate(found)
        # A newline at the end of the file begins no further line. Without one, the last line ends
        # with the file.
        self._starts = starts[starts < size]
        self._ends = np.append(self._starts[1:], size)
        self.num_records = len(self._starts)

    def read(self, numbers: np.ndarray) -> list[str]:
        """Returns the lines with these numbers.

        Raises:
            CannotRead: If a line is not UTF-8; the message names it.
        """
        lines = byte_ranges.read(self._path, self._starts[numbers], self._ends[numbers])
        return [
            self._decode(number, bytes(line))
            for number, line in zip(numbers.tolist(), lines, strict=True)
        ]

    def _decode(self, number: int, line: bytes) -> str:
        try:
            return line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise CannotRead(
                f"Line {number + 1} of {self._path} is not UTF-8 text: {error.reason} at byte "
                f"{error.start} of the line. Convert the file, or pass its format=."
            ) from error

    def close(self) -> None:
        """Does nothing: each `read` opens the file."""
