"""Requests to one kind of object store: retries with a limit, and errors with a remedy.

All requests run in the event loop of fsspec, which is one thread of the process. Other threads
submit requests, and wait for the results.
"""

import abc
import asyncio
import concurrent.futures
import dataclasses
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tpudist.input.storage import filesystems
from tpudist.input.storage.data_file import CannotRead
from tpudist.input.storage.remote_options import RemoteOptions
from tpudist.input.storage.store_errors import (
    Access,
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
    """Size of an object, and a text that changes with its bytes.

    Attributes:
        size: Number of bytes.
        version: ETag, generation or time of the last change; None if the server sends none.
    """

    size: int
    version: str | None


class ObjectStore(abc.ABC):
    """A kind of store, with the options of one dataset. Threads may share it.

    Raises:
        ImportError: If a package of the extra `remote` is not installed.
    """

    def __init__(self, options: RemoteOptions):
        self.options = options
        self._filesystem = self._connect()
        self._slots = asyncio.Semaphore(options.max_requests)

    # Hooks: one attempt each, in the event loop. They raise errors of their libraries.

    @abc.abstractmethod
    def _connect(self) -> Any:
        """Returns the file system of fsspec. fsspec has no types."""

    @abc.abstractmethod
    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        """Returns bytes of an object, which must have the version; and the facts about it."""

    @abc.abstractmethod
    async def _facts(self, url: str) -> ObjectFacts:
        """Returns the facts about an object."""

    @abc.abstractmethod
    async def _match(self, pattern: str) -> dict[str, ObjectFacts | None]:
        """Returns the URLs of the objects that match a pattern; facts if the listing has them."""

    @abc.abstractmethod
    def _classify(self, error: Exception) -> StoreError | None:
        """Returns the cause of an error of the store's library; None for other errors."""

    @abc.abstractmethod
    def host(self, url: str) -> str:
        """Returns the host of a URL, for messages."""

    @abc.abstractmethod
    def access(self, *, to_list: bool) -> Access:
        """Returns what reading an object or listing objects needs."""

    def has_pattern(self, url: str) -> bool:
        """Whether a URL is a pattern of several objects."""
        return any(x in url for x in "*?[")

    def public_url(self, url: str) -> str:
        """Returns a URL without secrets, for messages."""
        return url

    # Requests of other threads.

    def get(
        self, url: str, start: int, end: int, version: str | None
    ) -> "concurrent.futures.Future[bytes]":
        """Begins to read bytes of an object. The future raises `CannotRead`."""

        async def attempt() -> bytes:
            data, facts = await self._get(url, start, end, version)
            if version is not None and facts.version != version:
                raise StoreError(Cause.CHANGED, f"its version is {facts.version}, not {version}")
            if len(data) != end - start:
                if facts.size < end:
                    raise StoreError(Cause.CHANGED, f"it has {facts.size} bytes, fewer than {end}")
                raise StoreError(Cause.UNREACHABLE, f"{len(data)} of {end - start} bytes arrived")
            return data

        what = f"{self.public_url(url)} cannot be read"
        limit_s = self.options.timeout_s + (end - start) / _BYTES_PER_S
        return self._submit(attempt, what, url, to_list=False, limit_s=limit_s)

    def facts(self, url: str) -> ObjectFacts:
        """Returns the facts about an object."""
        what = f"{self.public_url(url)} cannot be read"
        return self._submit(lambda: self._facts(url), what, url, to_list=False).result()

    def match(self, pattern: str) -> dict[str, ObjectFacts | None]:
        """Returns the URLs of the objects that match a pattern, sorted; and facts, if known."""
        what = f"{self.public_url(pattern)} cannot be listed"
        found = self._submit(lambda: self._match(pattern), what, pattern, to_list=True).result()
        return dict(sorted(found.items()))

    def read_whole(self, url: str) -> bytes:
        """Returns the bytes of an object."""
        facts = self.facts(url)
        return self.get(url, 0, facts.size, facts.version).result() if facts.size else b""

    def write_whole(self, url: str, data: bytes) -> None:
        """Writes an object, which replaces an older one at once."""
        what = f"{self.public_url(url)} cannot be written"
        self._submit(
            lambda: filesystems.write_object(self._filesystem, url, data), what, url, to_list=False
        ).result()

    def _submit(
        self,
        attempt: Callable[[], Coroutine[Any, Any, _T]],
        what: str,
        url: str,
        *,
        to_list: bool,
        limit_s: float | None = None,
    ) -> "concurrent.futures.Future[_T]":
        work = self._repeat(attempt, what, url, to_list, limit_s or self.options.timeout_s)
        return asyncio.run_coroutine_threadsafe(work, self._filesystem.loop)

    async def _repeat(
        self,
        attempt: Callable[[], Coroutine[Any, Any, _T]],
        what: str,
        url: str,
        to_list: bool,
        limit_s: float,
    ) -> _T:
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
                    access = self.access(to_list=to_list)
                    # Errors of libraries have the whole URL; a query may be a signature.
                    cause = None if "?" in url else error
                    raise make_error(failure, what, self.host(url), access, number) from cause
            # Random, so that the processes of a run do not come back at the same moment.
            delay_s = min(_FIRST_DELAY_S * 2 ** (number - 1), _MAX_DELAY_S)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            number += 1

    def _cause(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, filesystems.FolderNotListed) and isinstance(error.__cause__, OSError):
            error = error.__cause__
        # Libraries translate errors to those of Python, and keep the original as the cause.
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
