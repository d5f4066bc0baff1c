"""Reads Parquet files with pyarrow, one row group at a time.

A row group is the unit of compression, so reading one row costs as much as reading its group. A
cache keeps recent groups, and `file_order` keeps the rows of a group together. Another cache keeps
the metadata of recent files: of many files with many groups and columns, they would need gigabytes.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tpudist.input.file_formats.recent import Recent
from tpudist.input.storage.data_file import CannotRead, DataFile

if TYPE_CHECKING:
    import pyarrow

# Bytes of cached row groups, and of metadata, over all files of the process.
_groups: Recent[dict[str, np.ndarray]] = Recent(1 << 29)
_metadata: Recent[Any] = Recent(1 << 28)
_METADATA_RATIO = 8  # bytes in memory for each byte in the file, measured with 5,000 columns


class ParquetFile:
    """Rows as dicts of column values. Opening the file reads its metadata, at its end.

    Args:
        file: The file.
        columns: Names of the columns to read; None for all.

    Raises:
        CannotRead: If the file is missing or incomplete, or a column does not exist.
        ImportError: If pyarrow is not installed.
    """

    def __init__(self, file: DataFile, columns: Sequence[str] | None = None):
        self._file = file
        self._columns = None if columns is None else list(columns)
        self._identity: Hashable = None  # of the file as it was first read
        metadata = self._read_metadata()
        names = metadata.schema.to_arrow_schema().names
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise CannotRead(
                f"The Parquet file {file} has no column {', '.join(map(repr, missing))}. It has "
                f"{', '.join(map(repr, names))}."
            )
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.block_ends = np.cumsum(rows, dtype=np.int64)
        self.num_records = metadata.num_rows

    def _read_metadata(self) -> Any:
        """Returns the metadata at the end of the file. pyarrow has no types."""
        parquet, arrow = _import_pyarrow()
        try:
            with self._file.open() as opened:
                metadata = parquet.ParquetFile(opened).metadata
                identity = self._file.identity(opened)
        except arrow.ArrowInvalid as error:
            raise CannotRead(
                f"{self._file} is not a complete Parquet file: {error}. Write it again."
            ) from error
        if self._identity not in (None, identity):
            raise CannotRead(
                f"The file {self._file} has changed since it was first read. Do not write to files "
                "that are being read; start again to read the new one."
            )
        # It tells the file from an earlier one with the same path, whose groups may still be in the
        # cache.
        self._identity = identity
        _metadata.put(identity, metadata, _METADATA_RATIO * metadata.serialized_size)
        return metadata

    @property
    def _key(self) -> tuple[Hashable, ...]:
        return (self._identity, tuple(self._columns or ()))

    def _get_metadata(self) -> Any:
        found = _metadata.get(self._identity)
        return self._read_metadata() if found is None else found

    def read(self, numbers: np.ndarray) -> list[dict[str, Any]]:
        """Returns the rows with these numbers."""
        columns = self.read_columns(numbers)
        return [{name: x[i] for name, x in columns.items()} for i in range(len(numbers))]

    def read_columns(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the values of these rows, `[rows, ...]` for each column.

        Raises:
            CannotRead: If a row group is damaged.
            TypeError: If a column does not contain numbers, or has missing values.
            ValueError: If the lists of a column have different lengths.
        """
        groups = np.searchsorted(self.block_ends, numbers, side="right")
        columns: dict[str, np.ndarray] = {}
        for group in np.unique(groups).tolist():
            where = np.flatnonzero(groups == group)
            start = int(self.block_ends[group - 1]) if group else 0
            for name, column in self._group(group).items():
                values = column[numbers[where] - start]
                if len(where) == len(numbers):  # all rows are in one group: no copy
                    columns[name] = values
                    continue
                if name not in columns:
                    columns[name] = np.empty((len(numbers), *values.shape[1:]), values.dtype)
                if values.shape[1:] != columns[name].shape[1:]:
                    raise ValueError(self._describe_ragged_column(name, group))
                columns[name][where] = values
        return columns

    def _group(self, group: int) -> dict[str, np.ndarray]:
        key = (*self._key, group)
        columns = _groups.get(key)
        if columns is None:
            parquet, arrow = _import_pyarrow()
            try:
                with self._file.open(*self._ranges_of_group(group)) as opened:
                    reader = parquet.ParquetFile(
                        opened, metadata=self._get_metadata(), page_checksum_verification=True
                    )
                    # The threads of the dataset read several groups at a time already.
                    table = reader.read_row_group(group, columns=self._columns, use_threads=False)
            except (arrow.ArrowException, OSError) as error:  # OSError for a wrong checksum
                raise CannotRead(
                    f"Group {group} of the rows of the Parquet file {self._file} is damaged: "
                    f"{error}. Write the file again, or omit it."
                ) from error
            columns = {
                name: self._column_to_numpy(name, column.combine_chunks(), group)
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
            _groups.put(key, columns, sum(x.nbytes for x in columns.values()))
        return columns

    def ranges(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranges of the columns of the groups that are not in the cache."""
        groups = np.unique(np.searchsorted(self.block_ends, numbers, side="right")).tolist()
        found = [self._ranges_of_group(x) for x in groups if _groups.get((*self._key, x)) is None]
        if not found:
            return numbers[:0], numbers[:0]
        starts, ends = zip(*found, strict=True)
        return np.concatenate(starts), np.concatenate(ends)

    def _ranges_of_group(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        about = self._get_metadata().row_group(group)
        columns = [about.column(i) for i in range(about.num_columns)]
        if self._columns is not None:  # a path is `name`, or `name.list.element` of a list
            names = set(self._columns)
            columns = [x for x in columns if x.path_in_schema.partition(".")[0] in names]
        starts = [
            x.dictionary_page_offset if x.has_dictionary_page else x.data_page_offset
            for x in columns
        ]
        sizes = [x.total_compressed_size for x in columns]
        return np.array(starts, np.int64), np.array(starts, np.int64) + np.array(sizes, np.int64)

    def _column_to_numpy(
        self, name: str, column: "pyarrow.Array | pyarrow.ChunkedArray", group: int
    ) -> np.ndarray:
        _, arrow = _import_pyarrow()
        types = arrow.types
        if isinstance(column, arrow.ChunkedArray):  # more than `combine_chunks` can combine
            column = arrow.concat_arrays(column.chunks)
        if column.null_count:
            raise TypeError(
                f"Column {name!r} of the Parquet file {self._file} has rows without a value. Fill "
                "them, or omit the column: columns=[...]."
            )
        arrow_type = column.type
        if (
            types.is_list(arrow_type)
            or types.is_large_list(arrow_type)
            or types.is_fixed_size_list(arrow_type)
        ):
            if not types.is_fixed_size_list(arrow_type):
                lengths = np.diff(column.offsets.to_numpy(zero_copy_only=False))
                if len(set(lengths.tolist())) > 1:
                    raise ValueError(self._describe_ragged_column(name, group))
            values = self._column_to_numpy(name, column.flatten(), group)
            return values.reshape(len(column), -1, *values.shape[1:])
        if (
            types.is_boolean(arrow_type)
            or types.is_floating(arrow_type)
            or types.is_integer(arrow_type)
        ):
            return column.to_numpy(zero_copy_only=False)
        raise TypeError(
            f"Column {name!r} of the Parquet file {self._file} holds {arrow_type}, but devices "
            "hold only numbers and booleans. Omit it, columns=[...], or convert it to numbers when "
            "you write the file."
        )

    def _describe_ragged_column(self, name: str, group: int) -> str:
        return (
            f"Column {name!r} of the Parquet file {self._file} holds lists of different lengths, "
            f"in group {group} of its rows. Pad or crop all lists to one length when you write the "
            "file."
        )

    def close(self) -> None:
        """Does nothing: each `read` opens the file."""


def _import_pyarrow() -> tuple[Any, Any]:
    """Returns the modules `pyarrow.parquet` and `pyarrow`, which are an extra of tpudist."""
    try:
        import pyarrow  # type: ignore[import-not-found]
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "Parquet files are read by pyarrow, which is not installed. Install tpudist[parquet]."
        ) from error
    return pyarrow.parquet, pyarrow
