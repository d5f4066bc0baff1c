"""The files of a dataset: how many records each has, and readers of those that are in use."""

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tpudist.input.file_formats.file import CannotRead, RecordFile

_MAX_OPEN = 128  # files; systems often allow a process 1,024
_INDEXING_THREADS = 16


class OpenFiles:
    """Files that are opened when they are needed, and closed when too many are."""

    def __init__(
        self,
        paths: Sequence[Path],
        open_file: Callable[[Path], RecordFile],
        num_records: Sequence[int] | None,
    ):
        """Counts the records of each of `paths`, but if `num_records` says how many it has.

        Raises:
            CannotRead: A file is not readable, or not whole.
        """
        self.paths = list(paths)
        self._open = open_file
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in paths]
        self._opened: dict[int, RecordFile] = {}
        self._in_use: collections.Counter[int] = collections.Counter()
        self._latest: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._all_read: set[int] = set()
        if num_records is not None:
            self.num_records = [int(x) for x in num_records]
            return
        with concurrent.futures.ThreadPoolExecutor(_INDEXING_THREADS) as threads:
            files = list(threads.map(open_file, self.paths))
        self._opened = dict(enumerate(files))
        self.num_records = [file.num_records for file in files]

    @property
    def read_until_now(self) -> tuple[str, ...]:
        """The files of which records have been read."""
        with self._lock:
            return tuple(str(self.paths[i]) for i in sorted(self._all_read))

    def block_ends(self, file: int) -> np.ndarray:
        """Where the blocks of a Parquet file end, whose records are read together."""
        return self._get(file).block_ends  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def use(self, file: int) -> Iterator[RecordFile]:
        """The file, which stays open meanwhile."""
        opened = self._get(file)
        with self._lock:
            self._in_use[file] += 1
            self._all_read.add(file)
            self._latest[file] = None
            self._latest.move_to_end(file)
        try:
            yield opened
        finally:
            with self._lock:
                self._in_use[file] -= 1
                if len(self._latest) > _MAX_OPEN:
                    idle = next((i for i in self._latest if not self._in_use[i]), None)
                    if idle is not None:
                        del self._latest[idle]
                        self._opened[idle].close()

    def _get(self, file: int) -> RecordFile:
        with self._locks[file]:
            if file not in self._opened:
                opened = self._open(self.paths[file])
                if opened.num_records != self.num_records[file]:
                    raise CannotRead(
                        f"The file {self.paths[file]} has {opened.num_records} records, but "
                        f"num_records says {self.num_records[file]}. Pass the correct number, or "
                        "omit num_records."
                    )
                self._opened[file] = opened
            return self._opened[file]
