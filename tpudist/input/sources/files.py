"""Datasets of the records in files, which are counted first and then read by number."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import permutation
from tpudist.input.file_formats import file_names, file_order
from tpudist.input.file_formats.file import RecordFile
from tpudist.input.file_formats.file_order import FileOrder, SegmentOrder
from tpudist.input.file_formats.open_files import OpenFiles
from tpudist.input.file_formats.parquet import ParquetFile
from tpudist.input.file_formats.recent import Recent
from tpudist.input.iterator_state import State
from tpudist.input.permutation import Order
from tpudist.input.sources.dataset_settings import BatchPlace
from tpudist.input.sources.file_requests import FileRequests
from tpudist.input.sources.indexed_dataset import IndexedPass
from tpudist.input.sources.read_ahead import AheadPass
from tpudist.input.sources.records import RandomTransform, RecordDataset
from tpudist.input.storage.data_file import DataFile
from tpudist.input.storage.find_files import PathLike, find_files
from tpudist.input.storage.remote_options import RemoteOptions

# First words of the seeds of the shuffles of one epoch.
_OF_FILES, _IN_FILE, _OF_BLOCKS, _IN_BLOCK = range(4)
_DIGEST_LENGTH = 16  # 64 bits in hexadecimal: enough to find different files by mistake


class FileDataset(RecordDataset):
    """The records of several files, in the sequence of the files; see `from_files`."""

    def __init__(
        self,
        files: Sequence[DataFile],
        open_file: Callable[[DataFile], RecordFile],
        parse: Callable[[Any], PyTree] | None,
        *,
        random_transform: RandomTransform | None,
        num_records: Sequence[int] | None,
        num_threads: int | None,
        format: str,
        read_ahead_bytes: int,
    ):
        is_remote = any(file.is_remote for file in files)
        self._read_ahead_bytes = read_ahead_bytes if is_remote else 0
        self._files = OpenFiles(files, open_file, num_records)
        self._reads_columns = format == "parquet"  # which stores columns
        self._is_tfrecord = format == "tfrecord"
        self._ends = np.cumsum(self._files.num_records, dtype=np.int64)
        self._num_rows = int(self._ends[-1])
        self.num_files = len(files)
        self._is_ordered_by_files = False
        self._set_up(parse, random_transform, num_threads)

    @property
    def files_read(self) -> tuple[str, ...]:
        """Paths of the files from which this process has read records until now."""
        return self._files.read_until_now

    def _name(self, number: int) -> str:
        file = int(np.searchsorted(self._ends, number, side="right"))
        return f"Record {number - self._first_number(file)} of {self._files.files[file]}"

    def _first_number(self, file: int) -> int:
        """Returns the number of the first example of a file."""
        return int(self._ends[file] - self._files.num_records[file])

    def _text_remedy(self, text_type: str) -> str:
        remedy = f"Convert it to numbers: from_files(..., parse=function of {text_type})."
        if self._is_tfrecord and self._transform is None:
            remedy += " For tf.train.Examples, begin the function with tpudist.input.parse_example."
        return remedy

    def _fetch(self, numbers: list[int]) -> Sequence[Any]:
        records: list[Any] = [None] * len(numbers)
        for file, where, file_numbers in self._group_by_file(np.array(numbers, np.int64)):
            with self._files.use(file) as reader:
                for i, record in zip(where.tolist(), reader.read(file_numbers), strict=True):
                    records[i] = record
        return records

    def _group_by_file(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (file, positions in `numbers` of its records, their numbers within the file)."""
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(files).tolist():
            where = np.flatnonzero(files == file)
            yield file, where, numbers[where] - self._first_number(file)

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        if not self._reads_columns or self._is_transformed:
            return super()._read(rows, epoch)
        # Parquet stores columns, so without a function of a row no rows need to be made.
        numbers = np.asarray(rows).reshape(-1)
        stacked = [np.empty((len(numbers), *x.shape), x.dtype) for x in self._leaf_specs]
        for file, where, file_numbers in self._group_by_file(numbers):
            with self._files.use(file) as reader:
                assert isinstance(reader, ParquetFile), reader
                columns = reader.read_columns(file_numbers)
            leaves, treedef = jax.tree_util.tree_flatten(columns)
            self._check_like_first(int(numbers[where[0]]), [x[0] for x in leaves], treedef)
            for target, leaf in zip(stacked, leaves, strict=True):
                target[where] = leaf
        return [leaf.reshape(np.shape(rows) + leaf.shape[1:]) for leaf in stacked]

    # Hooks of `read_ahead`.

    def begin(self, pass_number: int, state: State | None = None) -> IndexedPass:
        """See `IndexedDataset.begin`; the bytes of later batches are requested ahead."""
        if not self._read_ahead_bytes:
            return super().begin(pass_number, state)
        return AheadPass(self, self, pass_number, state, self._read_ahead_bytes)

    def numbers_of(self, place: BatchPlace, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the examples of some rows of a batch."""
        return self._numbers(place, rows)

    def requests(self) -> FileRequests:
        """Returns an object for requests of the bytes of examples."""
        return FileRequests(self._files, self._group_by_file)

    @property
    def plan(self) -> dict[str, Any]:
        """See `IndexedDataset.plan`; includes the names, numbers of records and versions."""
        # Names without folders, so that a run resumes after the folder was moved.
        listed = zip(self._files.files, self._files.num_records, strict=True)
        text = "\n".join(f"{file.name} {count}" for file, count in listed)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
        order = "by files" if self._is_ordered_by_files else "as they are"
        plan = super().plan | {"files": f"{self.num_files}, sha256 {digest}", "order": order}
        versions = self._files.versions()
        return plan | {"objects": versions} if versions else plan

    def with_order_by_files(self) -> Self:
        """Returns the dataset in the order of `file_order.FileOrder`.

        With `shuffle`, both the files and the records in each file are shuffled.
        """
        dataset = self._replace()
        dataset._is_ordered_by_files = True
        return dataset

    def num_files_of(self, numbers: np.ndarray) -> int:
        """Returns the number of files that contain the examples with these numbers."""
        return len(np.unique(np.searchsorted(self._ends, numbers, side="right")))

    def _order(self, epoch: int) -> Order | None:
        if not self._is_ordered_by_files:
            return super()._order(epoch)
        seed, size = self._settings.seed, self.global_batch_size or 1
        num_rows = np.diff(self._count_in_shard(self._ends), prepend=0)
        if seed is None:
            return FileOrder(num_rows, size, None, None)
        num_files = int(np.count_nonzero(num_rows))
        if self._settings.has_order_in_memory(self.num_examples):
            make = permutation.old_generator if self._settings.is_old else permutation.generator
            rng = make(seed, epoch)
            arrays = [self._shuffle_in_memory(i, n, rng) for i, n in enumerate(num_rows.tolist())]
            return FileOrder(num_rows, size, rng.permutation(num_files), arrays.__getitem__)
        order_of_files = permutation.shuffle_part(num_files, seed, epoch, (_OF_FILES,))
        orders: Recent[Order] = Recent(file_order.MAX_ORDER_BYTES)
        order_of_rows = functools.partial(self._order_of_file, num_rows, seed, epoch, orders)
        return FileOrder(num_rows, size, order_of_files, order_of_rows, orders)

    def _count_in_shard(self, ends: np.ndarray) -> np.ndarray:
        """Returns how many examples of this shard have numbers below each of `ends`."""
        num_shards, index = self._settings.shard_of_examples
        return np.maximum(-((index - ends) // num_shards), 0)

    def _block_sizes(self, file: int) -> np.ndarray | None:
        """Returns the number of examples of this shard in each block; None if one block is all."""
        if not self._reads_columns or (ends := self._files.block_ends(file)) is None:
            return None
        first = self._first_number(file)
        ends = self._count_in_shard(np.concatenate([[first], first + ends]))
        return np.diff(ends) if len(ends) > 2 else None

    def _order_of_file(
        self, num_rows: np.ndarray, seed: int, epoch: int, orders: Recent[Order], file: int
    ) -> Order:
        """Returns the order of the rows of a file, in which the rows of a block stay together."""
        if (sizes := self._block_sizes(file)) is None:
            return permutation.shuffle_part(int(num_rows[file]), seed, epoch, (_IN_FILE, file))
        blocks = permutation.shuffle_part(len(sizes), seed, epoch, (_OF_BLOCKS, file))
        return SegmentOrder(
            sizes,
            blocks[np.arange(len(sizes))],
            lambda block: permutation.shuffle_part(
                int(sizes[block]), seed, epoch, (_IN_BLOCK, file, block)
            ),
            orders,
            (file,),
        )

    def _shuffle_in_memory(self, file: int, num_rows: int, rng: np.random.Generator) -> np.ndarray:
        """Returns the order of the rows of a file, drawn from the generator of the epoch."""
        rows = np.arange(num_rows)
        if not num_rows or (sizes := self._block_sizes(file)) is None:
            return rng.permutation(rows)
        return file_order.shuffle_in_blocks(rows, np.cumsum(sizes), rng)


def from_files(
    files: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    parse: Callable[[Any], PyTree] | None = None,
    random_transform: RandomTransform | None = None,
    columns: Sequence[str] | None = None,
    num_records: Sequence[int] | None = None,
    num_threads: int | None = None,
    remote: RemoteOptions | None = None,
) -> FileDataset:
    """Returns a dataset of all records of ArrayRecord, TFRecord, Parquet or text files.

    Shuffle and batch it, then distribute it: `from_files("train-*.array_record",
    parse=decode).shuffle(seed=0).batch(256)`. Each process reads only the records of its own
    replicas. With `InputOptions(auto_shard_policy=AutoShardPolicy.FILE)` these come from few files.
    A position in the data is a few integers.

    The call counts the records: ArrayRecord and Parquet files have the number at their end. For
    TFRecord files it reads every header, and text files are read once. For URLs of both, the
    positions of the records are stored in `RemoteOptions.index_folder`, and read from there as long
    as the object does not change.

    Args:
        files: A path, a URL (`gs://`, `s3://`, `https://`, `http://`) or a pattern (`*`, `?`,
            `[..]`, `**`), or several. The files of a pattern are sorted. URLs need the extra
            `remote`.
        format: "array_record", "tfrecord", "parquet" or "text". Default: determined from the names
            of the files.
        parse: Called with a record (bytes, a line of text as a string, or a row as a dict); returns
            a pytree of arrays. Optional only for Parquet. It must be deterministic, or runs cannot
            resume exactly.
        random_transform: Called with the result of `parse` and a random generator; returns an
            example. Its random numbers are the same after resuming; see `from_records`.
        columns: Names of the columns to read from Parquet files; None for all.
        num_records: Number of records of each file, if known. Then a file is only opened when it is
            read.
        num_threads: Number of threads that read the examples of a batch; see `from_records`.
        remote: Options for URLs, such as credentials and the folder for stored indexes.

    Raises:
        ImportError: If a package that reads these files is not installed.
        ValueError: If a file does not exist, is damaged or not readable, if the files have no
            records, or if they have several formats.
        TypeError: If the first example does not consist of numbers.
    """
    remote = remote or RemoteOptions()
    found = find_files(files, remote)
    format = file_names.format_of(found, format)
    if columns is not None and format != "parquet":
        raise ValueError(
            f"columns={list(columns)!r}: {format} files have no columns. Omit it, or pass Parquet "
            "files."
        )
    if parse is not None and not callable(parse):
        raise TypeError(
            f"parse={parse!r}: it must be a function of one record that returns a pytree of arrays."
        )
    if num_records is not None and len(num_records) != len(found):
        raise ValueError(
            f"num_records has {len(num_records)} numbers for {len(found)} files. Pass one for each "
            "file, in the order of the files."
        )
    reader_class = file_names.reader_class(format)
    return FileDataset(
        found,
        reader_class if columns is None else lambda file: reader_class(file, columns),
        parse,
        random_transform=random_transform,
        num_records=num_records,
        num_threads=num_threads,
        format=format,
        read_ahead_bytes=remote.read_ahead_bytes,
    )
