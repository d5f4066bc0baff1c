"""Reads ArrayRecord files, with Grain's data source."""

from typing import Any

import numpy as np

from tpudist.input.storage.data_file import CannotRead, DataFile
from tpudist.input.storage.local_file import LocalFile, explain_errors


class ArrayRecordFile:
    """Records of bytes. In files written with `group_size:1` they are read one by one.

    Opening the file reads the index at its end.

    Raises:
        CannotRead: If the file is missing or incomplete.
    """

    block_ends = None

    def __init__(self, file: DataFile):
        import grain

        if not isinstance(file, LocalFile):
            remedy = (
                "Copy the file to a local disk, mount the bucket (such as with Cloud Storage "
                "FUSE), or use TFRecord or Parquet files."
            )
            if str(file).startswith("gs://"):
                remedy += (
                    " Grain reads gs:// itself, with the credentials of the environment, and does "
                    "not notice objects that are replaced: "
                    "from_records(grain.sources.ArrayRecordDataSource(urls), parse)."
                )
            raise CannotRead(
                f"{file} cannot be read in place: the reader of ArrayRecord files cannot read from "
                f"Python. {remedy}"
            )
        path = self._path = file.path
        # The operating system has clearer errors than ArrayRecord, so read a byte.
        with explain_errors(path), path.open("rb") as opened:
            opened.read(1)
        try:
            # Grain declares no methods of this class for type checkers.
            self._source: Any = grain.sources.ArrayRecordDataSource(str(path))
        except RuntimeError as error:
            raise CannotRead(
                f"{path} is not a complete ArrayRecord file: {error or 'no index at its end'}. "
                "Write it again, and close the writer."
            ) from error
        self.num_records = len(self._source)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the records with these numbers.

        Raises:
            CannotRead: If a checksum does not match; the message names the record.
        """
        keys = numbers.tolist()
        try:
            if len(keys) == 1:
                return [self._source[keys[0]]]
            return list(self._source.__getitems__(keys))
        except RuntimeError as error:
            if len(keys) > 1:
                # The error of several records does not say which is damaged: read each of them.
                for number in numbers:
                    self.read(np.array([number]))
            raise CannotRead(
                f"Record {', '.join(map(str, keys))} of {self._path} is damaged: {error}. Write "
                f"the file again."
            ) from error

    def ranges(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns no ranges: Grain finds the records and reads the file."""
        return numbers[:0], numbers[:0]

    def close(self) -> None:
        """Closes the file."""
        self._source.__exit__(None, None, None)
