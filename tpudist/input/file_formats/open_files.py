"""The files of a dataset: their numbers of records, and a bounded number of open readers."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tpudist.input import iterator_state
from tpudist.input.daemon_threads import DaemonThreads
from tpudist.input.file_formats.file import RecordFile
from tpudist.input.storage.data_file import CannotRead, DataFile

_T = TypeVar("_T")
# Systems often allow a process 1,024 open files, and the program needs some itself.
_MAX_OPEN = 128
# Indexing waits for the disk or the network, so more threads than processors help.
_INDEXING_THREADS = 16


class OpenFiles:
    """Files that are opened when they are first read; the least recently used ones are closed.

    Args:
        files: The files.
        open_file: Returns the reader of a file.
        num_records: Number of records of each file, so that no file is opened now. None: all files
            are opened, and their records are counted.

    Raises:
        CannotRead: If a file is not readable or incomplete.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        open_file: Callable[[DataFile], RecordFile],
        num_records: Sequence[int] | None,
    ):
        self.files = list(files)
        self._open = open_file
        # `_lock` guards the counts and sets below, and is held only for moments. A file is opened
        # under its own lock, so other threads wait only if they need the same file. No thread
        # holds two of these locks at a time.
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in files]
        self._readers: dict[int, RecordFile] = {}
        self._num_users: collections.Counter[int] = collections.Counter()
        self._by_last_use: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._files_read: set[int] = set()
        self._versions: dict[str, dict[str, Any]] | None = None
        if num_records is not None:
            self.num_records = [int(x) for x in num_records]
            return
        # Not bounded by `_MAX_OPEN`: no reader keeps its file open before its first `read`.
        readers = _map(open_file, self.files)
        self._readers = dict(enumerate(readers))
        self.num_records = [reader.num_records for reader in readers]

    @property
    def read_until_now(self) -> tuple[str, ...]:
        """Paths of the files from which records have been read."""
        with self._lock:
            return tuple(str(self.files[i]) for i in sorted(self._files_read))

    def versions(self) -> dict[str, dict[str, Any]]:
        """Returns the versions of objects: folder -> its host, and name -> version.

        Requests the versions that no listing and no earlier read had. All reads of this process
        see these versions.
        """
        if self._versions is None:
            versions: dict[str, dict[str, Any]] = {}
            counts: collections.Counter[tuple[str, str]] = collections.Counter()
            remote = [file for file in self.files if file.is_remote]
            for file, version in zip(remote, _map(lambda x: x.version(), remote), strict=True):
                if version is None:
                    continue
                folder = versions.setdefault(
                    version.folder, {iterator_state.HOST: version.host, "versions": {}}
                )
                # URLs with other queries may have the same name.
                number = counts[version.folder, file.name]
                counts[version.folder, file.name] += 1
                name = f"{file.name} ({number + 1})" if number else file.name
                folder["versions"][name] = version.text
            self._versions = versions
        return self._versions

    def block_ends(self, file: int) -> np.ndarray | None:
        """Returns the ends of a file's blocks; see `RecordFile`."""
        return self.get(file).block_ends

    @contextlib.contextmanager
    def use(self, file: int) -> Iterator[RecordFile]:
        """Yields the reader of a file, which stays open in the `with` block."""
        # If it is closed before it counts as used, its `read` opens the file again.
        reader = self.get(file)
        with self._lock:
            self._num_users[file] += 1
            self._files_read.add(file)
            self._by_last_use[file] = None
            self._by_last_use.move_to_end(file)
        try:
            yield reader
        finally:
            with self._lock:
                self._num_users[file] -= 1
                if len(self._by_last_use) > _MAX_OPEN:
                    idle = next((i for i in self._by_last_use if not self._num_users[i]), None)
                    # A closed reader stays in `_readers`: it keeps its index, and opens the file
                    # again at the next read.
                    if idle is not None:
                        del self._by_last_use[idle]
                        self._readers[idle].close()

    def get(self, file: int) -> RecordFile:
        """Returns the reader of a file, which may be closed while it is used; see `use`."""
        with self._locks[file]:
            if file not in self._readers:
                reader = self._open(self.files[file])
                if reader.num_records != self.num_records[file]:
                    raise CannotRead(
                        f"The file {self.files[file]} has {reader.num_records} records, but "
                        f"num_records says {self.num_records[file]}. Pass the correct number, or "
                        "omit num_records."
                    )
                self._readers[file] = reader
            return self._readers[file]


def _map(function: Callable[[DataFile], _T], files: Sequence[DataFile]) -> list[_T]:
    """Returns the result for each file; uses several files at a time."""
    threads = DaemonThreads(_INDEXING_THREADS, "tpudist-index")
    futures = [threads.submit(function, file) for file in files]
    return [future.result() for future in futures]
