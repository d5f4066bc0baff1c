"""Files on web servers: `https://` and `http://`."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tpudist.input.storage import filesystems
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore
from tpudist.input.storage.store_errors import (
    Access,
    Cause,
    StoreError,
    cause_of_status,
    describe_connection,
)


class WebStore(ObjectStore):
    """See `ObjectStore`. The server must support range requests."""

    def _connect(self) -> Any:
        return filesystems.make_filesystem("https", self.options.storage_options)

    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        del version  # `ObjectStore` compares it: many servers ignore conditions
        return await self._request(url, start, end)

    async def _facts(self, url: str) -> ObjectFacts:
        # Not HEAD: a signed URL permits GET only.
        return (await self._request(url, 0, 1))[1]

    async def _request(self, url: str, start: int, end: int) -> tuple[bytes, ObjectFacts]:
        arguments = dict(self._filesystem.kwargs)
        headers = {
            **arguments.pop("headers", {}),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",  # a range of the file, not of its compressed form
        }
        session = await self._filesystem.set_session()
        target = self._filesystem.encode_url(url)
        async with session.get(target, headers=headers, **arguments) as response:
            version = response.headers.get("ETag") or response.headers.get("Last-Modified")
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status == 416 and size == "0":
                return b"", ObjectFacts(0, version)
            if response.status == 200 and response.content_length == 0:
                return b"", ObjectFacts(0, version)
            response.raise_for_status()
            if response.status != 206 or not size.isdecimal():
                raise StoreError(
                    Cause.NO_RANGES,
                    f"the server answers a range request with HTTP {response.status}, without the "
                    "size of the file",
                )
            return await response.read(), ObjectFacts(int(size), version)

    async def _match(self, pattern: str) -> dict[str, ObjectFacts | None]:
        # The links on the page of a folder. A page has no sizes.
        found = await filesystems.find_matches(self._filesystem, pattern)
        return {url: None for url, x in found.items() if x["type"] == "file"}

    def _classify(self, error: Exception) -> StoreError | None:
        import aiohttp

        if isinstance(error, aiohttp.ClientResponseError) and error.status:
            cause = cause_of_status(error.status)
            return StoreError(cause, f"HTTP {error.status}: {error.message}")
        if isinstance(error, aiohttp.InvalidURL):  # its text has the URL, with the query
            return StoreError(Cause.OTHER, "the URL is not valid")
        if isinstance(error, aiohttp.ClientSSLError):
            return StoreError(Cause.OTHER, describe_connection(error))
        if isinstance(error, aiohttp.ClientError):
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return None

    def host(self, url: str) -> str:
        """See `ObjectStore`."""
        return urlsplit(self.public_url(url)).netloc

    def access(self, *, to_list: bool) -> Access:
        """See `ObjectStore`."""
        what = "the page that lists the folder" if to_list else "the file"
        return Access(
            f"permission of the server for {what}",
            "pass RemoteOptions(storage_options={'headers': {'Authorization': ...}})",
        )

    def has_pattern(self, url: str) -> bool:
        """Whether a URL has `*` in its path. `?` begins a query, and `[` an IPv6 address."""
        return "*" in urlsplit(url).path

    def public_url(self, url: str) -> str:
        """Returns a URL without a query and a password, which may be secrets."""
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
