"""Requests to one kind of object store: retries with a limit, and errors with a remedy.

All requests run in the event loop of fsspec, which is one thread of the process. Other threads
submit requests, and wait for the results. At the end of the program the requests end, too: no
thread waits for a server then.
"""

import abc
import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import random
import re
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tpudist.input.storage import filesystems, object_pages
from tpudist.input.storage.data_file import CannotRead
from tpudist.input.storage.object_pages import Page
from tpudist.input.storage.remote_options import RemoteOptions
from tpudist.input.storage.store_errors import (
    Access,
    Action,
    Cause,
    StoreError,
    describe_connection,
    make_error,
)

_T = TypeVar("_T")
_FIRST_DELAY_S, _MAX_DELAY_S = 0.2, 10.0  # before the second attempt, and at most
_BYTES_PER_S = 1 << 20  # a slower answer counts as none


@dataclasses.dataclass(frozen=True)
class ObjectFacts:
    """Size of an object, and texts that change with its bytes.

    Attributes:
        size: Number of bytes.
        version: ETag, generation or time of the last change; None if the server sends none.
        checksum: Checksum of the bytes, which is the same in a copy; None if `version` is that.
    """

    size: int
    version: str | None
    checksum: str | None = None

    def __str__(self) -> str:
        return f"{self.size} bytes, {_name_version(self.version)}"

    @property
    def contents(self) -> str:
        """A text that is the same in a copy, if the store has checksums."""
        return f"{self.size} bytes, {self.checksum or _name_version(self.version)}"

    def may_be(self, found: "ObjectFacts") -> bool:
        """Whether an answer of the store is about this version."""
        return self.size == found.size and self.version in (None, found.version)


class ObjectStore(abc.ABC):
    """A kind of store, with the options of one dataset. Threads may share it.

    Raises:
        ImportError: If a package of the extra `remote` is not installed.
    """

    def __init__(self, options: RemoteOptions):
        self.options = options
        self._filesystem = self._connect()
        self._slots = asyncio.Semaphore(options.max_requests)
        self._pending: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()
        self._is_closed = self._has_warned = False
        _live.add(self)
        # Functions at exit run in reverse order, so this one runs before functions that wait for
        # threads.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    # Hooks: one attempt each, in the event loop. They raise errors of their libraries.

    @abc.abstractmethod
    def _connect(self) -> Any:
        """Returns the file system of fsspec. fsspec has no types."""

    @abc.abstractmethod
    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        """Returns bytes of an object, and facts that belong to these bytes.

        The request has a condition if the store knows one: the object must have this version.
        """

    @abc.abstractmethod
    async def _facts(self, url: str) -> ObjectFacts:
        """Returns the facts about an object."""

    @abc.abstractmethod
    async def _list(self, start: str, is_deep: bool, token: str | None) -> Page[ObjectFacts | None]:
        """Returns a page of a listing; see `object_pages.find_matches`."""

    @abc.abstractmethod
    def _classify(self, error: Exception) -> StoreError | None:
        """Returns the cause of an error of the store's library; None for other errors."""

    @abc.abstractmethod
    def host(self, url: str) -> str:
        """Returns the host of a URL, for messages."""

    @abc.abstractmethod
    def access(self, action: Action) -> Access:
        """Returns what a request needs."""

    def has_pattern(self, url: str) -> bool:
        """Whether a URL is a pattern of several objects."""
        return any(x in url for x in "*?[")

    def public_url(self, url: str) -> str:
        """Returns a URL without secrets, for messages."""
        return url

    # Requests of other threads.

    def get(
        self, url: str, start: int, end: int, facts: ObjectFacts
    ) -> "concurrent.futures.Future[bytes]":
        """Begins to read bytes of a version of an object. The future raises `CannotRead`."""

        async def attempt() -> bytes:
            try:
                data, found = await self._get(url, start, end, facts.version)
            except Exception as error:
                if self._cause(error).cause is not Cause.CHANGED:
                    raise
                await self._raise_changed(url, facts, error)
                raise
            if not facts.may_be(found):
                raise _make_version_error(facts, found)
            if len(data) != end - start:
                raise StoreError(Cause.UNREACHABLE, f"{len(data)} of {end - start} bytes arrived")
            return data

        return self._submit(self._repeat(attempt, Action.READ, url, end - start))

    async def _raise_changed(self, url: str, facts: ObjectFacts, error: Exception) -> None:
        """Raises an error with both versions, if the store says which one it has now."""
        found = None
        with contextlib.suppress(Exception):
            found = await self._facts(url)
        if found is not None and not facts.may_be(found):
            raise _make_version_error(facts, found) from error

    def facts(self, url: str) -> ObjectFacts:
        """Returns the facts about an object."""
        return self._submit(self._repeat(lambda: self._facts(url), Action.READ, url)).result()

    def match(self, pattern: str) -> dict[str, ObjectFacts | None]:
        """Returns the URLs of the objects that match a pattern, sorted; and facts, if known."""

        async def list_page(
            start: str, is_deep: bool, token: str | None
        ) -> Page[ObjectFacts | None]:
            # Each page has its own attempts and its own time: a listing may have many.
            return await self._repeat(
                lambda: self._list(start, is_deep, token), Action.LIST, pattern
            )

        found = self._submit(object_pages.find_matches(list_page, pattern)).result()
        return dict(sorted(found.items()))

    def read_whole(self, url: str) -> bytes:
        """Returns the bytes of an object."""
        facts = self.facts(url)
        return self.get(url, 0, facts.size, facts).result() if facts.size else b""

    def write_whole(self, url: str, data: bytes) -> None:
        """Writes an object, which replaces an older one at once."""
        self._submit(
            self._repeat(
                lambda: filesystems.write_object(self._filesystem, url, data),
                Action.WRITE,
                url,
                len(data),
            )
        ).result()

    def warn_of_changes(self, url: str) -> None:
        """Warns that a change of an object would not be noticed, once for the files of a store."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.host(url)} sends neither an ETag nor the time of the last change of "
                f"{self.public_url(url)}. If such a file is replaced by another one of the same "
                "size while it is read, or before a run resumes, tpudist does not notice it.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends all requests: threads that wait for one raise `CancelledError`."""
        self._is_closed = True
        for request in list(self._pending):
            request.cancel()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        request = asyncio.run_coroutine_threadsafe(work, self._filesystem.loop)
        self._pending.add(request)
        if self._is_closed:
            request.cancel()
        return request

    async def _repeat(
        self,
        attempt: Callable[[], Coroutine[Any, Any, _T]],
        action: Action,
        url: str,
        num_bytes: int = 0,
    ) -> _T:
        limit_s = self.options.timeout_s + num_bytes / _BYTES_PER_S
        number = 1
        while True:
            try:
                # A request that waits before its next attempt leaves its place to another one.
                async with self._slots, asyncio.timeout(limit_s):
                    return await attempt()
            except (CannotRead, asyncio.CancelledError):
                raise
            except Exception as error:
                failure = self._cause(error)
                if not failure.cause.may_pass or number == self.options.max_attempts:
                    # Errors of libraries have the whole URL; a query may be a signature.
                    cause = None if "?" in url else error
                    raise make_error(
                        failure,
                        action.fails(self.public_url(url)),
                        self.host(url),
                        self.access(action),
                        number,
                    ) from cause
            # Random, so that the processes of a run do not come back at the same moment.
            delay_s = min(_FIRST_DELAY_S * 2 ** (number - 1), _MAX_DELAY_S)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            number += 1

    def _cause(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        # Libraries raise Python's errors instead, and keep the original error as the cause.
        chain: list[Exception] = []
        found: BaseException | None = error
        while isinstance(found, Exception) and found not in chain:
            chain.append(found)
            found = found.__cause__
        for link in reversed(chain):
            if (classified := self._classify(link)) is not None:
                return classified
        if isinstance(error, FileNotFoundError):
            return StoreError(Cause.MISSING, "it does not exist")
        if isinstance(error, OSError):  # which TimeoutError and errors of sockets are
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return StoreError(Cause.OTHER, describe_connection(error))


def _name_version(version: str | None) -> str:
    return "no version" if version is None else f"version {version}"


def size_in_range(content_range: str, start: int) -> int:
    """Returns the size of an object from the header of an answer with a range from `start`.

    Raises:
        StoreError: If the answer has no range, or another one than the request.
    """
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", content_range)
    if found is None or int(found[1]) != start:
        raise StoreError(
            Cause.NO_RANGES,
            f"the server answers a request for a range from byte {start} with "
            + (f"the range {content_range!r}" if content_range else "the whole file"),
        )
    return int(found[2])


def _make_version_error(facts: ObjectFacts, found: ObjectFacts) -> StoreError:
    return StoreError(Cause.CHANGED, f"it has {found} now, but had {facts}")


_live: "weakref.WeakSet[ObjectStore]" = weakref.WeakSet()


def _close_all() -> None:
    for store in list(_live):
        store.close()
