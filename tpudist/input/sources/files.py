"""Examples in files: their records are counted first, and then read by number."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.file_formats import file_names, file_order
from tpudist.input.file_formats.file import RecordFile
from tpudist.input.file_formats.open_files import OpenFiles
from tpudist.input.sources.records import RandomTransform, RecordDataset


class FileDataset(RecordDataset):
    """The records of some files, in the sequence of the files; see `from_files`."""

    def __init__(
        self,
        paths: Sequence[Path],
        open_file: Callable[[Path], RecordFile],
        parse: Callable[[Any], PyTree] | None,
        *,
        random_transform: RandomTransform | None,
        num_records: Sequence[int] | None,
        num_threads: int | None,
        format: str,
    ):
        """Counts the records of all files, and reads the first example."""
        self._files = OpenFiles(paths, open_file, num_records)
        self._format = format
        self._ends = np.cumsum(self._files.num_records, dtype=np.int64)
        self._num_rows = int(self._ends[-1])
        self.num_files = len(paths)
        self._by_files = False
        self._begin(parse, random_transform, num_threads)

    @property
    def files_read(self) -> tuple[str, ...]:
        """The files of which this process has read records until now."""
        return self._files.read_until_now

    def _place(self, number: int) -> tuple[int, int]:
        """Which file an example is in, and which of its records it is."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - int(self._ends[file] - self._files.num_records[file])

    def _name(self, number: int) -> str:
        file, record = self._place(number)
        return f"Record {record} of {self._files.paths[file]}"

    def _text(self, kind: str) -> tuple[str, str]:
        remedy = f"Convert it to numbers: from_files(..., parse=function of {kind})."
        if self._format == "tfrecord" and self._transform is None:
            remedy += " For tf.train.Examples, begin the function with tpudist.input.parse_example."
        return f"holds {kind}", remedy

    def _fetch(self, numbers: list[int]) -> Sequence[Any]:
        records: list[Any] = [None] * len(numbers)
        for file, where, within in self._group_by_file(np.array(numbers, np.int64)):
            with self._files.use(file) as opened:
                for i, record in zip(where.tolist(), opened.read(within), strict=True):
                    records[i] = record
        return records

    def _group_by_file(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each file of them, where in `numbers` its records stand, and which they are."""
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(files).tolist():
            where = np.flatnonzero(files == file)
            first = int(self._ends[file] - self._files.num_records[file])
            yield file, where, numbers[where] - first

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        if self._format != "parquet" or self._is_transformed:
            return super()._read(rows, epoch)
        numbers = np.asarray(rows).reshape(-1)
        found = [np.empty((len(numbers), *x.shape), x.dtype) for x in self._leaf_specs]
        for file, where, within in self._group_by_file(numbers):
            with self._files.use(file) as opened:
                columns = opened.read_columns(within)  # type: ignore[attr-defined]
            leaves, treedef = jax.tree_util.tree_flatten(columns)
            self._check(int(numbers[where[0]]), [x[0] for x in leaves], treedef)
            for into, leaf in zip(found, leaves, strict=True):
                into[where] = leaf
        return [leaf.reshape(np.shape(rows) + leaf.shape[1:]) for leaf in found]

    @property
    def plan(self) -> dict[str, Any]:
        """What decides which examples are read when: the files by their names and lengths too."""
        listed = zip(self._files.paths, self._files.num_records, strict=True)
        text = "\n".join(f"{path.name} {count}" for path, count in listed)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        order = "by files" if self._by_files else "as they are"
        return super().plan | {"files": f"{self.num_files}, sha256 {digest}", "order": order}

    def with_order_by_files(self) -> Self:
        """The same examples, where a batch takes as many from each of some rows of files.

        With `shuffle`, files are shuffled, and the records in each file.
        """
        dataset = self._replace()
        dataset._by_files = True
        return dataset

    def num_files_of(self, numbers: np.ndarray) -> int:
        """In how many files the examples of these numbers are."""
        return len(np.unique(np.searchsorted(self._ends, numbers, side="right")))

    def _order(self, epoch: int) -> np.ndarray | None:
        if not self._by_files:
            return super()._order(epoch)
        seed = self._plan.seed
        rng = None if seed is None else np.random.default_rng([seed, epoch])
        # Rows are counted among those of this shard, numbers among all.
        num_shards, index = self._plan.examples
        numbers = index + num_shards * np.arange(self.num_examples)
        ends = np.searchsorted(numbers, self._ends)
        files = np.split(np.arange(self.num_examples), ends[:-1])
        if rng is not None:
            files = [
                self._shuffle_rows(file, rows, numbers, rng) for file, rows in enumerate(files)
            ]
        return file_order.order_in_lanes(files, self.global_batch_size or 1, rng)

    def _shuffle_rows(
        self, file: int, rows: np.ndarray, numbers: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        if self._format != "parquet" or not len(rows):
            return rng.permutation(rows)
        blocks = self._files.block_ends(file)
        first = int(self._ends[file] - self._files.num_records[file])
        return file_order.shuffle_in_blocks(
            rows, np.searchsorted(numbers[rows], first + blocks), rng
        )


def from_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    parse: Callable[[Any], PyTree] | None = None,
    random_transform: RandomTransform | None = None,
    columns: Sequence[str] | None = None,
    num_records: Sequence[int] | None = None,
    num_threads: int | None = None,
) -> FileDataset:
    """A dataset of all records of some files: ArrayRecord, TFRecord, Parquet, or lines of text.

    The records are counted when it is made: ArrayRecord and Parquet files say at their end how many
    they have; of TFRecord files every header is read, and text files are read once. After that, a
    process reads the records of its own replicas only: `from_files("train-*.array_record",
    parse=decode).shuffle(seed=0).batch(256)`. With `InputOptions(auto_shard_policy=
    AutoShardPolicy.FILE)` these come from few files. A position in the data is a few integers.

    Args:
        files: A path or pattern (`*`, `?`, `[..]`, `**`), or several; those of a pattern are
            sorted.
        format: "array_record", "tfrecord", "parquet" or "text"; None to go by the names of the
            files.
        parse: Makes a pytree of arrays of a record: bytes, a line of text as a string, or the dict
            of a row. Needed but for Parquet. The same each time, or runs cannot be resumed exactly.
        random_transform: Makes another example of what `parse` has made, with random numbers that
            are the same after resuming; see `from_records`.
        columns: Which columns of Parquet files are read; None for all.
        num_records: How many records each file has, if that is known: files are opened only when
            they are read then.
        num_threads: How many threads read the examples of a batch; see `from_records`.

    Raises:
        ValueError: There are no such files, a file is not readable or damaged, they have no
            records, or are of several formats.
        TypeError: The first example holds no numbers.
    """
    paths = file_names.find_files(files)
    format = file_names.format_of(paths, format)
    if columns is not None and format != "parquet":
        raise ValueError(
            f"columns={list(columns)!r}: {format} files have no columns. Omit it, or pass Parquet "
            "files."
        )
    if parse is not None and not callable(parse):
        raise TypeError(
            f"parse={parse!r}: it must be a function of one record that returns a pytree of arrays."
        )
    if num_records is not None and len(num_records) != len(paths):
        raise ValueError(
            f"num_records has {len(num_records)} numbers for {len(paths)} files. Pass one for each "
            "file, in the order of the files."
        )
    make = file_names.reader(format)
    return FileDataset(
        paths,
        make if columns is None else lambda path: make(path, columns),
        parse,
        random_transform=random_transform,
        num_records=num_records,
        num_threads=num_threads,
        format=format,
    )
