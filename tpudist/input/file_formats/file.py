"""What a reader of one file of records gives, whatever the format."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class RecordFile(Protocol):
    """One file whose records can be read by number, by several threads at once."""

    num_records: int

    def read(self, numbers: np.ndarray) -> list[Any]:
        """The records of these numbers, counted from 0 in this file."""
        ...

    def close(self) -> None:
        """Lets go of the file; nothing is read afterwards."""
        ...


class CannotRead(ValueError):
    """A file is not there, not readable, or not whole; names it, and what to do.

    Remedy: restore the file, allow it to be read, or leave it out of the list of files.
    """


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Names the file in what the system says of it."""
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
