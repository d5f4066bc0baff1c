"""Reads text files, whose records are their lines."""

import numpy as np

from tpudist.input.storage.data_file import CannotRead, DataFile

_NEWLINE = ord("\n")
_INDEX = "text 1"  # a stored index with another name is not used


class TextFile:
    """Lines of text in UTF-8, without line ends. Opening the file reads it once, to find them.

    Raises:
        CannotRead: If the file is missing or not readable.
    """

    block_ends = None

    def __init__(self, file: DataFile):
        self._file = file
        # The start of each line, and the end of the last one.
        self._bounds = file.index(_INDEX, self._find_lines)
        self.num_records = len(self._bounds) - 1

    def _find_lines(self) -> np.ndarray:
        found, size = [np.zeros(1, np.int64)], 0
        for _, chunk in self._file.chunks():
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + size + 1)
            size += len(chunk)
        starts = np.concatenate(found)
        # A newline at the end of the file begins no further line. Without one, the last line ends
        # with the file.
        return np.append(starts[starts < size], size)

    def read(self, numbers: np.ndarray) -> list[str]:
        """Returns the lines with these numbers.

        Raises:
            CannotRead: If a line is not UTF-8; the message names it.
        """
        lines = self._file.read(*self.ranges(numbers))
        return [
            self._decode(number, bytes(line))
            for number, line in zip(numbers.tolist(), lines, strict=True)
        ]

    def ranges(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `RecordFile`."""
        return self._bounds[numbers], self._bounds[numbers + 1]

    def _decode(self, number: int, line: bytes) -> str:
        try:
            return line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise CannotRead(
                f"Line {number + 1} of {self._file} is not UTF-8 text: {error.reason} at byte "
                f"{error.start} of the line. Convert the file, or pass its format=."
            ) from error

    def close(self) -> None:
        """Does nothing: each `read` opens the file."""
