"""Parquet files, read by pyarrow, a group of rows at a time."""

import collections
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpudist.input.file_formats.file import CannotRead, explain_errors

_MAX_CACHED_BYTES = 1 << 29  # of groups of rows, over all files of the process


class ParquetFile:
    """Rows, as dicts of the values of their columns."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None):
        """Reads what a file says of its rows, at its end.

        Args:
            path: The file.
            columns: Which of its columns are read; None for all.

        Raises:
            CannotRead: It is not there, not whole, or has no such columns.
            ImportError: pyarrow is not installed.
        """
        parquet, arrow = _pyarrow()
        self._path = path
        self._columns = None if columns is None else list(columns)
        try:
            with explain_errors(path), path.open("rb") as file:
                self._metadata = parquet.ParquetFile(file).metadata
                stat = os.fstat(file.fileno())
        except arrow.ArrowInvalid as error:
            raise CannotRead(
                f"{path} is not a complete Parquet file: {error}. Write it again."
            ) from error
        names = self._metadata.schema.to_arrow_schema().names
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise CannotRead(
                f"The Parquet file {path} has no column {', '.join(map(repr, missing))}. It has "
                f"{', '.join(map(repr, names))}."
            )
        # Not what was read of a file that stood there before.
        self._key = (str(path), stat.st_size, stat.st_mtime_ns, tuple(columns or ()))
        rows = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self.block_ends = np.cumsum(rows, dtype=np.int64)
        self.num_records = self._metadata.num_rows

    def read(self, numbers: np.ndarray) -> list[dict[str, Any]]:
        """These rows."""
        columns = self.read_columns(numbers)
        return [{name: x[i] for name, x in columns.items()} for i in range(len(numbers))]

    def read_columns(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The values of these rows, `[rows, ...]` for each column.

        Raises:
            CannotRead: A group of rows is damaged.
            TypeError: A column holds no numbers, or has rows without a value.
            ValueError: A column holds lists of different lengths.
        """
        groups = np.searchsorted(self.block_ends, numbers, side="right")
        found: dict[str, np.ndarray] = {}
        for group in np.unique(groups).tolist():
            where = np.flatnonzero(groups == group)
            start = int(self.block_ends[group - 1]) if group else 0
            for name, column in self._group(group).items():
                values = column[numbers[where] - start]
                if len(where) == len(numbers):
                    found[name] = values
                    continue
                if name not in found:
                    found[name] = np.empty((len(numbers), *values.shape[1:]), values.dtype)
                if values.shape[1:] != found[name].shape[1:]:
                    raise ValueError(self._describe_ragged_column(name, group))
                found[name][where] = values
        return found

    def _group(self, group: int) -> dict[str, np.ndarray]:
        key = (*self._key, group)
        columns = _cache.get(key)
        if columns is None:
            parquet, arrow = _pyarrow()
            try:
                with explain_errors(self._path), self._path.open("rb") as file:
                    reader = parquet.ParquetFile(
                        file, metadata=self._metadata, page_checksum_verification=True
                    )
                    table = reader.read_row_group(group, columns=self._columns, use_threads=False)
            except (arrow.ArrowInvalid, arrow.ArrowException, CannotRead) as error:
                raise CannotRead(
                    f"Group {group} of the rows of the Parquet file {self._path} is damaged: "
                    f"{error}. Write the file again, or omit it."
                ) from error
            columns = {
                name: self._array(name, column.combine_chunks(), group)
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
            _cache.put(key, columns)
        return columns

    def _array(self, name: str, column: Any, group: int) -> np.ndarray:
        _, arrow = _pyarrow()
        types = arrow.types
        if isinstance(column, arrow.ChunkedArray):  # of what no single array can hold
            column = arrow.concat_arrays(column.chunks)
        if column.null_count:
            raise TypeError(
                f"Column {name!r} of the Parquet file {self._path} has rows without a value. Fill "
                "them, or omit the column: columns=[...]."
            )
        kind = column.type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            if not types.is_fixed_size_list(kind):
                lengths = np.diff(column.offsets.to_numpy(zero_copy_only=False))
                if len(set(lengths.tolist())) > 1:
                    raise ValueError(self._describe_ragged_column(name, group))
            values = self._array(name, column.flatten(), group)
            return values.reshape(len(column), -1, *values.shape[1:])
        if types.is_boolean(kind) or types.is_floating(kind) or types.is_integer(kind):
            return column.to_numpy(zero_copy_only=False)
        raise TypeError(
            f"Column {name!r} of the Parquet file {self._path} holds {kind}, but devices hold only "
            "numbers and booleans. Omit it, columns=[...], or convert it to numbers when you write "
            "the file."
        )

    def _describe_ragged_column(self, name: str, group: int) -> str:
        return (
            f"Column {name!r} of the Parquet file {self._path} holds lists of different lengths, "
            f"in group {group} of its rows. Pad or crop all lists to one length when you write the "
            "file."
        )

    def close(self) -> None:
        """Nothing is held open."""


class _Cache:
    """The groups of rows that were read last, within a bound."""

    def __init__(self):
        self._lock = threading.Lock()
        self._groups: collections.OrderedDict[Any, dict[str, np.ndarray]] = (
            collections.OrderedDict()
        )
        self._num_bytes = 0

    def get(self, key: Any) -> dict[str, np.ndarray] | None:
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
            return self._groups.get(key)

    def put(self, key: Any, columns: dict[str, np.ndarray]) -> None:
        with self._lock:
            if key not in self._groups:
                self._num_bytes += _size(columns)
            self._groups[key] = columns
            while self._num_bytes > _MAX_CACHED_BYTES and len(self._groups) > 1:
                _, old = self._groups.popitem(last=False)
                self._num_bytes -= _size(old)


_cache = _Cache()


def _size(columns: dict[str, np.ndarray]) -> int:
    return sum(x.nbytes for x in columns.values())


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-not-found]
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "Parquet files are read by pyarrow, which is not installed. Install tpudist[parquet]."
        ) from error
    return pyarrow.parquet, pyarrow
