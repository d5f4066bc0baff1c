"""ArrayRecord files, read by Grain's data source."""

from pathlib import Path
from typing import Any

import numpy as np

from tpudist.input.file_formats.file import CannotRead, explain_errors


class ArrayRecordFile:
    """Records of bytes; written with `group_size:1`, they are read one by one."""

    def __init__(self, path: Path):
        """Opens a file, of which the index at its end is read.

        Raises:
            CannotRead: It is not there, or not whole.
        """
        import grain

        self._path = path
        with explain_errors(path), path.open("rb") as file:
            file.read(1)  # what the system says is clearer than what ArrayRecord makes of it
        try:
            self._source: Any = grain.sources.ArrayRecordDataSource(str(path))
        except RuntimeError as error:
            raise CannotRead(
                f"{path} is not a complete ArrayRecord file: {error or 'no index at its end'}. "
                "Write it again, and close the writer."
            ) from error
        self.num_records = len(self._source)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The bytes of these records.

        Raises:
            CannotRead: A checksum does not fit; names the records.
        """
        keys = numbers.tolist()
        try:
            return list(self._source.__getitems__(keys)) if len(keys) > 1 else self._one(keys)
        except RuntimeError as error:
            if len(keys) > 1:  # which of them it is
                for number in numbers:
                    self.read(np.array([number]))
            raise CannotRead(
                f"Record {', '.join(map(str, keys))} of {self._path} is damaged: {error}. Write "
                f"the file again."
            ) from error

    def _one(self, keys: list[int]) -> list[bytes]:
        return [self._source[key] for key in keys]

    def close(self) -> None:
        """Closes the file."""
        self._source.__exit__(None, None, None)
