"""ShardLog: the log of one server: a description of its contents, and all updates since then.

A server that starts applies the logged updates again. If the log has grown much longer than the
description, `compact` writes a new one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpudist.ps import changes as changes_of_closures
from tpudist.ps.changes import Change
from tpudist.ps.record_file import RecordError, RecordFile, read_records

MIN_BYTES = 64 << 20
"""Number of bytes below which a log is not compacted."""

# In one process, a killed server's thread may still run. Opening closes its log (`_opening` makes
# that one step), so that two servers never write one file. Lock order: `_opening`, then a log's
# `_lock`.
_opening = threading.Lock()
_open_logs: weakref.WeakValueDictionary[Path, ShardLog] = weakref.WeakValueDictionary()

Record = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


class ShardLog:
    """The log of one server.

    Opens the latest log in the folder, or creates one.

    Args:
        folder: Folder of the log; one server has it.
        sync_s: Maximum seconds until a logged update would survive a crash of the host.
        incarnation: Number of the server's predecessors.

    Raises:
        RecordError: If the log is damaged before its end, or a later server has opened it.

    Attributes:
        has_records: Whether the log had records when it was opened.
        definitions: Variables in those records: number -> name, shape, dtype.
        last_direct: Number of the last direct change in those records; -1 if there was none.
    """

    def __init__(self, folder: Path, sync_s: float, incarnation: int = 0):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._incarnation = folder, incarnation
        self._lock = threading.Lock()
        self._ended = threading.Event()
        with _opening:
            self._close_predecessor(folder.resolve())
            self._open(sync_s)
            _open_logs[folder.resolve()] = self

    def _close_predecessor(self, folder: Path) -> None:
        """Closes the log of the predecessor, which may be a thread: threads cannot be killed."""
        earlier = _open_logs.get(folder)
        if earlier is None or earlier._ended.is_set():
            return
        if earlier._incarnation > self._incarnation:
            raise RecordError(
                f"Incarnation {self._incarnation} of a server cannot open the log in {folder}, "
                f"because incarnation {earlier._incarnation} has opened it. This server was "
                f"replaced, so you need not do anything."
            )
        earlier.close()

    def _open(self, sync_s: float) -> None:
        numbers = sorted(int(x.stem.split("-")[1]) for x in self._folder.glob("log-*.records"))
        self._number = numbers[-1] if numbers else 0
        for number in numbers[:-1]:  # `compact` crashed between renaming and deleting
            self._path(number).unlink()
        for unfinished in self._folder.glob("*.unfinished"):
            unfinished.unlink()
        self._file = RecordFile(self._path(self._number))
        self._num_bytes = self._path(self._number).stat().st_size
        self.has_records = self._num_bytes > 0
        self.definitions: dict[int, tuple[str, tuple[int, ...], str]] = {}
        self.last_direct, self._num_records = -1, 0
        for facts, arrays in read_records(self._path(self._number)):
            self._num_records += 1
            self.last_direct = max(self.last_direct, facts.get("direct", -1))
            if "define" in facts:
                value = arrays["value"]
                self.definitions[facts["define"]] = facts["name"], value.shape, value.dtype.name
        self._base_bytes = 0
        # Records survive the process without `fsync`, because the kernel has them. The thread syncs
        # them every `sync_s`, so that only a crash of the host can lose the last ones.
        # The thread has only a weak reference, so that it ends when the log is garbage.
        target = weakref.WeakMethod(self._sync), self._ended, sync_s
        self._thread = threading.Thread(
            target=_sync_often, args=target, name="tpudist log", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end_thread, self._ended, self._thread).atexit = False

    def read(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], list[Change]]]:
        """Yields the facts, arrays and updates of each record that was not revoked."""
        # Two passes, because a record is revoked by a later one. `place` counts records.
        path = self._path(self._number)
        revoked = {facts.get("revoke") for facts, _ in read_records(path)}
        for place, (facts, arrays) in enumerate(read_records(path)):
            if place in revoked or "revoke" in facts:
                continue
            packed = facts.get("changes")
            unpacked = [] if packed is None else changes_of_closures.unpack(packed, arrays)
            yield facts, arrays, unpacked

    def define(self, number: int, name: str, value: np.ndarray) -> None:
        """Logs a new variable."""
        self._append({"define": number, "name": name}, {"value": value})

    def append(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> int:
        """Logs updates, which then survive a crash of the process; returns the record's place."""
        packed, arrays = changes_of_closures.pack(changes)
        return self._append({**facts, "changes": packed}, arrays)

    def revoke(self, place: int) -> None:
        """Cancels a record, because its updates could not be applied."""
        self._append({"revoke": place}, {})

    def is_long(self) -> bool:
        """Returns whether the log should be compacted."""
        # With a factor of 3, compaction writes at most half as many bytes as the updates.
        return self._num_bytes > max(MIN_BYTES, 3 * self._base_bytes)

    def compact(self, records: Sequence[Record]) -> None:
        """Continues in a new file, which begins with `records`."""
        with self._lock:
            if self._ended.is_set():
                raise ValueError(
                    f"The log in {self._folder} is closed: another server writes it now."
                )
            # A crash leaves the old file, both files, or the new file. `_open` takes the highest
            # number, and a file gets its number only when it is complete and synced.
            path = self._path(self._number + 1)
            unfinished = path.with_suffix(".unfinished")
            file = RecordFile(unfinished)
            size = sum(file.append(facts, arrays) for facts, arrays in records)
            file.close()
            os.rename(unfinished, path)
            self._sync_folder()
            self._file.close()
            self._path(self._number).unlink()
            self._number += 1
            self._file = RecordFile(path)
        self._num_bytes = self._base_bytes = size
        self._num_records = len(records)

    def close(self) -> None:
        """Syncs and closes the log."""
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._file.close()

    def _append(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
        with self._lock:
            self._num_bytes += self._file.append(facts, arrays)
            self._num_records += 1
            return self._num_records - 1

    def _sync(self) -> None:
        with self._lock:
            self._file.sync()

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _path(self, number: int) -> Path:
        return self._folder / f"log-{number:06d}.records"


def _end_thread(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join()


def close_logs(folder: Path) -> None:
    """Closes the logs in `folder` that killed servers of this process have left open.

    Killed processes have closed theirs.
    """
    for place, log in list(_open_logs.items()):
        if place.parent == folder.resolve():
            log.close()


def _sync_often(sync: weakref.WeakMethod, ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        method = sync()
        if method is None:
            return
        try:
            method()
        except ValueError:  # the file was closed
            return
        del method
