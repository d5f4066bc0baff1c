"""Interface of a reader of one record file."""

from collections.abc import Sequence
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

    def ranges(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges of bytes, starts and ends, that `read` reads for these numbers."""
        ...

    def close(self) -> None:
        """Closes the file; a later `read` opens it again."""
        ...
