"""Files in object stores: ranges are requested in parallel, and may be requested ahead."""

import bisect
import concurrent.futures
import io
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import BinaryIO
from urllib.parse import urlsplit

import numpy as np

from tpudist.input.storage import index_files
from tpudist.input.storage.data_file import Version, costs_of_ranges, find_groups
from tpudist.input.storage.index_files import IndexFolder
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore

# A request takes as long as reading many times this gap; more would waste memory.
_MAX_GAP_BYTES = 1 << 15
# Larger reads are split, since one connection is slower than several.
_MAX_REQUEST_BYTES = 1 << 22
# Of one `read`, which requests a turn while it uses the one before: a batch of small records that
# are far apart would need many times its size.
_MAX_TURN_BYTES = 1 << 24
_NUM_CHUNKS_AHEAD = 4  # of one file; `OpenFiles` reads several files at a time
_MIN_PARTS = 64  # fewer parts are not searched for unreferenced ones


class Part:
    """Bytes that are being read, from `start` to `end`. A request ends with its last reference."""

    def __init__(self, start: int, end: int, data: "concurrent.futures.Future[bytes]"):
        self.start, self.end, self.data = start, end, data
        weakref.finalize(self, data.cancel).atexit = False

    def read(self) -> memoryview:
        """Waits for the bytes, and returns them."""
        return memoryview(self.data.result())  # `self` must live until then

    @property
    def has_failed(self) -> bool:
        """Whether the request has ended without bytes."""
        return self.data.done() and (self.data.cancelled() or self.data.exception() is not None)


class RemoteFile:
    """An object; all reads see one version of it; see `DataFile`.

    Args:
        store: The store.
        url: URL of the object.
        facts: Facts about the object, if a listing had them.
        indexes: Folder of the stored indexes.
    """

    is_remote = True

    def __init__(
        self, store: ObjectStore, url: str, facts: ObjectFacts | None, indexes: IndexFolder
    ):
        self._indexes = indexes
        self._store = store
        self._url = url
        self._facts = facts
        self._facts_lock = threading.Lock()
        # Parts that somebody refers to, in the order of their starts. The lock is reentrant, since
        # the garbage collector may end a part in a thread that has it.
        self._parts: list[tuple[int, int, weakref.ref[Part]]] = []
        self._num_alive = _MIN_PARTS
        self._parts_lock = threading.RLock()

    def __str__(self) -> str:
        return self._store.public_url(self._url)

    @property
    def url(self) -> str:
        """The whole URL, which may have secrets."""
        return self._url

    @property
    def name(self) -> str:
        """See `DataFile`."""
        return urlsplit(self._url).path.rpartition("/")[2]

    def facts(self) -> ObjectFacts:
        """Returns the size and the version that all reads of this file see."""
        with self._facts_lock:
            if self._facts is None:
                self._facts = self._store.facts(self._url)
            if self._facts.version is None:
                self._store.warn_of_changes(self._url)
            return self._facts

    def version(self) -> Version:
        """See `DataFile`."""
        text = self.facts().contents  # a request, after which the store knows its host
        return Version(str(self).rpartition("/")[0], self._store.host(self._url), text)

    def size(self) -> int:
        """See `DataFile`."""
        return self.facts().size

    def read(self, starts: np.ndarray, ends: np.ndarray) -> list[memoryview]:
        """See `DataFile`."""
        found: list[memoryview] = [memoryview(b"")] * len(starts)
        turns = self._turns(starts, ends)
        parts = [self._request(starts[x], ends[x]) for x in turns[:1]]
        for i, turn in enumerate(turns):
            parts += [self._request(starts[x], ends[x]) for x in turns[i + 1 : i + 2]]
            present, num_bytes = parts.pop(0), int((ends[turn] - starts[turn]).sum())
            # A view keeps its whole part, so one of a part that is mostly gaps is copied.
            is_wasteful = sum(x.end - x.start for x in present) > 2 * num_bytes
            for k in turn.tolist():
                view = self._slice(present, int(starts[k]), int(ends[k]))
                found[k] = memoryview(bytes(view)) if is_wasteful else view
            del present  # before the next request
        return found

    def _turns(self, starts: np.ndarray, ends: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the indices of the ranges of each turn, by their positions."""
        if not len(starts):
            return []
        turns = np.cumsum(self.costs(starts, ends)) // _MAX_TURN_BYTES
        by_position = np.argsort(starts, kind="stable")
        return np.split(by_position, np.flatnonzero(np.diff(turns)) + 1)

    def _slice(self, parts: list[Part], start: int, end: int) -> memoryview:
        if start == end:
            return memoryview(b"")
        i = bisect.bisect_right(parts, start, key=lambda part: part.start) - 1
        while parts[i].end < end:  # `prefetch` returned a part with this range
            i -= 1
        part = parts[i]
        return part.read()[start - part.start : end - part.start]

    def prefetch(self, starts: np.ndarray, ends: np.ndarray) -> list[object]:
        """See `DataFile`."""
        return list(self._request(starts, ends))

    def _request(self, starts: np.ndarray, ends: np.ndarray) -> list[Part]:
        """Returns parts that contain the ranges, by their starts; requests the new ones."""
        facts = self.facts()
        is_empty = starts == ends
        starts, ends = starts[~is_empty], ends[~is_empty]
        with self._parts_lock:
            parts, is_new = self._find_parts(starts, ends)
            limits = {"max_gap": _MAX_GAP_BYTES, "max_bytes": _MAX_REQUEST_BYTES}
            for start, end, _ in find_groups(starts[is_new], ends[is_new], **limits):
                part = Part(start, end, self._store.get(self._url, start, end, facts))
                bisect.insort(self._parts, (start, end, weakref.ref(part)), key=lambda x: x[:2])
                parts.append(part)
        return sorted(parts, key=lambda part: (part.start, part.end))

    def _find_parts(self, starts: np.ndarray, ends: np.ndarray) -> tuple[list[Part], np.ndarray]:
        """Returns the parts that contain some of the ranges, and which ranges are in none."""
        if len(self._parts) >= 2 * self._num_alive:  # so a part is looked at a few times in all
            self._parts = [x for x in self._parts if x[2]() is not None]
            self._num_alive = max(len(self._parts), _MIN_PARTS)
        is_new = np.ones(len(starts), bool)
        found: dict[int, Part] = {}
        for i, start in enumerate(starts.tolist()):
            part = self._find_part(start, int(ends[i]))
            if part is not None:
                found[id(part)] = part
                is_new[i] = False
        return list(found.values()), is_new

    def _find_part(self, start: int, end: int) -> Part | None:
        last = bisect.bisect_right(self._parts, start, key=lambda x: x[0])
        # Parts may overlap, so an earlier one may be longer. If it is missed, bytes are read twice.
        for part_start, part_end, reference in reversed(self._parts[max(last - 3, 0) : last]):
            if part_start <= start and end <= part_end:
                part = reference()
                if part is not None and not part.has_failed:
                    return part
        return None

    def costs(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """See `DataFile`."""
        return costs_of_ranges(starts, ends, max_gap=_MAX_GAP_BYTES)

    def chunks(
        self, first_needed: Callable[[], int] = lambda: 0
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields all parts, of a few MiB, which are requested ahead."""
        del first_needed
        size = self.size()
        waiting: list[tuple[int, list[Part]]] = []
        for start in range(0, size, _MAX_REQUEST_BYTES):
            end = min(start + _MAX_REQUEST_BYTES, size)
            waiting.append((start, self._request(np.array([start]), np.array([end]))))
            if len(waiting) == _NUM_CHUNKS_AHEAD:
                first, parts = waiting.pop(0)
                yield first, parts[0].read()
        for first, parts in waiting:
            yield first, parts[0].read()

    def open(self, starts: np.ndarray | None = None, ends: np.ndarray | None = None) -> BinaryIO:
        """See `DataFile`."""
        parts = [] if starts is None or ends is None else self._request(starts, ends)
        # Without a buffer: it would read behind the ranges.
        return _ByteReader(self, parts)  # type: ignore[return-value]

    def identity(self, opened: BinaryIO) -> Hashable:
        """Returns the URL, the size and the version."""
        del opened
        return (self._url, self.facts())

    def index(self, reader: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the stored index if it belongs to this version of the object; see `DataFile`."""
        return index_files.load_or_build(
            self._indexes, self._url, str(self), self.facts(), reader, build
        )


class _ByteReader(io.RawIOBase):
    """A position in a file. The parts stay until it is closed."""

    def __init__(self, file: RemoteFile, parts: list[Part]):
        self._file, self._parts, self._position = file, parts, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size()}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start = self._position
        end = max(start, min(start + len(buffer), self._file.size()))
        (data,) = self._file.read(np.array([start]), np.array([end]))
        buffer[: len(data)] = data
        self._position = end
        return len(data)

    def close(self) -> None:
        self._parts = []
        super().close()
