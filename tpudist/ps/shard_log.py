"""ShardLog: the log of one server: a description of its contents, and all updates since then.

A server that starts applies the logged updates again. If the log has grown much longer than the
description, `compact` writes a new one.
"""

# Kinds of records, by the key of their facts. `Shard` writes and reads the contents:
#
#     define         a new variable, with its initial value
#     closure        the updates of a closure (`changes`), its number, and `low`
#     direct         updates from outside of closures, and their number
#     revoke         place of a record that does not count; only logs of earlier versions have it
#
# A description has `define`, and:
#
#     state_of       the state of an optimizer for some variables
#     table          rows of a table
#     low_of_base    the ledger, and the counts of the server

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpudist.array_types import Shape
from tpudist.ps.changes import Change, pack, unpack
from tpudist.ps.record_file import RecordError, RecordFile, read_records

MIN_COMPACTED_BYTES = 64 << 20
"""Number of bytes below which a log is not compacted."""
GROWTH = 3
"""A log that is this many times as long as its description is compacted. So compaction writes at
most half as many bytes as the updates do."""
SYNC_S = 0.05
"""Maximum seconds until a logged update would survive a crash of the host. An `fsync` for each
update would take longer than the update."""

# A killed server that is a thread may still run. Opening a log therefore closes an earlier object
# for the same folder. `_opening` makes closing and opening one step, so two servers never write one
# file. Lock order: `_opening`, then a log's `_lock`.
_opening = threading.Lock()
_open_logs: weakref.WeakValueDictionary[Path, ShardLog] = weakref.WeakValueDictionary()

Record = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


class LoggedVariable(NamedTuple):
    """A variable that the log defines."""

    name: str
    shape: Shape
    dtype: str


class ShardLog:
    """The log of one server.

    Opens the latest log in the folder, or creates one.

    Args:
        folder: Folder of the log; one server has it.
        incarnation: Number of the server's predecessors.

    Raises:
        RecordError: If the log is damaged before its end, or a later server has opened it.

    Attributes:
        has_records: Whether the log had records when it was opened.
        definitions: Variables in those records, by number.
        last_direct: Number of the last direct change in those records; -1 if there was none.
    """

    def __init__(self, folder: Path, incarnation: int = 0):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._incarnation = folder, incarnation
        # Guards `_file` against the thread that syncs. Only the server's thread uses the counts.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._sync_error: OSError | None = None
        with _opening:
            self._close_predecessor(folder.resolve())
            self._open()
            _open_logs[folder.resolve()] = self

    def _close_predecessor(self, folder: Path) -> None:
        """Closes the log of the predecessor, which may be a thread: threads cannot be killed."""
        earlier = _open_logs.get(folder)
        if earlier is None or earlier._is_closed.is_set():
            return
        if earlier._incarnation > self._incarnation:
            raise RecordError(
                f"Incarnation {self._incarnation} of a server cannot open the log in {folder}, "
                f"because incarnation {earlier._incarnation} has opened it. This server was "
                f"replaced, so you need not do anything."
            )
        earlier.close()

    def _open(self) -> None:
        numbers = sorted(int(x.stem.split("-")[1]) for x in self._folder.glob("log-*.records"))
        self._number = numbers[-1] if numbers else 0
        for number in numbers[:-1]:  # `compact` crashed between renaming and deleting
            self._path(number).unlink()
        for unfinished in self._folder.glob("*.unfinished"):
            unfinished.unlink()
        self._file = RecordFile(self._path(self._number))
        self._num_bytes = self._path(self._number).stat().st_size
        self._base_bytes = 0  # of the description; unknown until the next one
        self._scan()
        # Records survive the process without `fsync`, because the kernel has them. The thread syncs
        # them, so that only a crash of the host can lose the last ones. It has only a weak
        # reference, so that it ends when the log is garbage.
        target = weakref.WeakMethod(self._sync), self._is_closed
        self._thread = threading.Thread(
            target=_sync_often, args=target, name="tpudist log", daemon=True
        )
        self._thread.start()
        # Not at exit, when daemon threads no longer run and `join` would hang.
        weakref.finalize(self, _end_thread, self._is_closed, self._thread).atexit = False

    def _scan(self) -> None:
        """Reads the facts that are needed before the records are applied (`read`)."""
        self.has_records, self.last_direct = self._num_bytes > 0, -1
        self.definitions: dict[int, LoggedVariable] = {}
        self._revoked: set[int] = set()  # places: numbers of records in the file, from 0
        for facts, arrays in read_records(self._path(self._number)):
            self.last_direct = max(self.last_direct, facts.get("direct", -1))
            if "define" in facts:
                value = arrays["value"]
                self.definitions[facts["define"]] = LoggedVariable(
                    facts["name"], value.shape, value.dtype.name
                )
            if "revoke" in facts:
                self._revoked.add(facts["revoke"])

    def read(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], list[Change]]]:
        """Yields the facts, arrays and updates of each record that counts."""
        for place, (facts, arrays) in enumerate(read_records(self._path(self._number))):
            if place not in self._revoked and "revoke" not in facts:
                yield facts, arrays, unpack(facts.get("changes", ()), arrays)

    def define(self, number: int, name: str, value: np.ndarray) -> None:
        """Logs a new variable."""
        self._append({"define": number, "name": name}, {"value": value})

    def append(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> None:
        """Logs updates, which then survive a crash of the process."""
        packed, arrays = pack(changes)
        self._append({**facts, "changes": packed}, arrays)

    def remove_last(self) -> None:
        """Removes the record that was appended last, because its updates could not be applied."""
        with self._lock:
            self._num_bytes -= self._file.remove_last()

    def is_long(self) -> bool:
        """Returns whether the log should be compacted."""
        return self._num_bytes > max(MIN_COMPACTED_BYTES, GROWTH * self._base_bytes)

    def compact(self, records: Sequence[Record]) -> None:
        """Continues in a new file, which begins with a description.

        Raises:
            OSError: If it cannot be written. The log then continues in the old file, and `is_long`
                returns False until that has grown by a factor of `GROWTH`.
        """
        with self._lock:
            if self._is_closed.is_set():
                raise ValueError(
                    f"The log in {self._folder} is closed: another server writes it now."
                )
            # A crash leaves the old file, both files, or the new file. `_open` takes the highest
            # number, and a file gets its number only when it is complete and synced.
            path = self._path(self._number + 1)
            unfinished = path.with_suffix(".unfinished")
            try:
                file = RecordFile(unfinished)
                size = sum(file.append(facts, arrays) for facts, arrays in records)
                file.sync()
                os.rename(unfinished, path)
            except BaseException:
                # The next try must not append to it, and a full disk needs the space.
                unfinished.unlink(missing_ok=True)
                self._base_bytes = self._num_bytes
                raise
            # The new file counts from here on, also if an error follows.
            old, self._file = self._file, file
            self._number += 1
            self._num_bytes = self._base_bytes = size
            self._sync_folder()
            old.close()
            self._path(self._number - 1).unlink()

    def close(self) -> None:
        """Syncs and closes the log."""
        self._is_closed.set()
        self._thread.join()
        with self._lock:
            self._file.close()

    def _append(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            if self._sync_error is not None:
                # After a failed `fsync`, the kernel may have dropped records: a later success
                # would not show that all of them are on the disk.
                raise OSError(
                    f"The log in {self._folder} cannot be written: {self._sync_error}. Restart "
                    f"the program on a disk that works, or restore a checkpoint."
                ) from self._sync_error
            self._num_bytes += self._file.append(facts, arrays)

    def _sync(self) -> None:
        with self._lock:
            try:
                self._file.sync()
            except OSError as error:
                self._sync_error = error
                raise

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _path(self, number: int) -> Path:
        return self._folder / f"log-{number:06d}.records"


def close_logs(folder: Path) -> None:
    """Closes the logs in `folder` that killed servers of this process have left open.

    Killed processes have closed theirs.
    """
    for place, log in list(_open_logs.items()):
        if place.parent == folder.resolve():
            log.close()


def _sync_often(sync: weakref.WeakMethod, is_closed: threading.Event) -> None:
    while not is_closed.wait(SYNC_S):
        method = sync()
        if method is None:
            return
        try:
            method()
        except (OSError, ValueError):  # `append` raises the first; the other: the file was closed
            return
        del method  # it would keep the log alive until the next round


def _end_thread(is_closed: threading.Event, thread: threading.Thread) -> None:
    is_closed.set()
    # The last reference may have been `method` in `_sync_often`, in the thread itself.
    if thread is not threading.current_thread():
        thread.join()
