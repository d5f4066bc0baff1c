"""Interface of a reader of one record file, and its error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class RecordFile(Protocol):
    """One file whose records can be read by number, by several threads at once.

    Attributes:
        num_records: Number of records.
        block_ends: For a format that reads blocks of records together (Parquet), the number of
            records up to the end of each block; else None.
    """

    @property
    def num_records(self) -> int:
        """See the class."""
        ...

    @property
    def block_ends(self) -> np.ndarray | None:
        """See the class."""
        ...

    def read(self, numbers: np.ndarray) -> Sequence[Any]:
        """Returns the records with these numbers, which count from 0 in this file."""
        ...

    def close(self) -> None:
        """Closes the file; a later `read` opens it again."""
        ...


class CannotRead(ValueError):
    """A file is missing, not readable or incomplete; the message names it and the remedy.

    Remedy: restore the file, allow it to be read, or leave it out of the list of files.
    """


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
