"""Files on web servers: `https://` and `http://`."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tpudist.input.storage import filesystems
from tpudist.input.storage.object_pages import Page
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore, size_in_range
from tpudist.input.storage.store_errors import (
    Access,
    Action,
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
        headers = {"Range": f"bytes={start}-{end - 1}"}
        # A range if the file has this version, else the whole file, which is not read. Servers that
        # ignore the condition, as some do, send their version, which `ObjectStore` compares.
        if version is not None and not version.startswith("W/"):  # not a weak ETag
            headers["If-Range"] = version
        arguments = dict(self._filesystem.kwargs)
        headers = {
            **arguments.pop("headers", {}),
            **headers,
            "Accept-Encoding": "identity",  # a range of the file, not of its compressed form
        }
        session = await self._filesystem.set_session()
        target = self._filesystem.encode_url(url)
        async with session.get(target, headers=headers, **arguments) as response:
            found = response.headers.get("ETag") or response.headers.get("Last-Modified")
            content_range = response.headers.get("Content-Range", "")
            if response.status == 416 and content_range.endswith("/0"):
                return b"", ObjectFacts(0, found)
            if response.status == 200 and response.content_length == 0:
                return b"", ObjectFacts(0, found)
            response.raise_for_status()
            if response.status == 200 and version is not None and found != version:
                raise StoreError(Cause.CHANGED, f"its version is {found}, not {version}")
            size = size_in_range(content_range, start)
            return await response.read(), ObjectFacts(size, found)

    async def _facts(self, url: str) -> ObjectFacts:
        # Not HEAD: a signed URL permits GET only.
        return (await self._get(url, 0, 1, None))[1]

    async def _list(self, start: str, is_deep: bool, token: str | None) -> Page[ObjectFacts | None]:
        # The links on the page of a folder. A page has no sizes, and is not divided.
        del is_deep, token
        links = await filesystems.read_links(self._filesystem, start[: start.rindex("/") + 1])
        # Links with a query sort the page, or lead elsewhere.
        links = [x for x in links if x.startswith(start) and "?" not in x]
        folders = [x for x in links if x.endswith("/")]
        return Page(dict.fromkeys(x for x in links if not x.endswith("/")), folders, None)

    def _classify(self, error: Exception) -> StoreError | None:
        import aiohttp

        if isinstance(error, aiohttp.ClientResponseError) and error.status:
            cause = cause_of_status(error.status)
            return StoreError(cause, f"HTTP {error.status}: {error.message}")
        if isinstance(error, aiohttp.InvalidURL):  # its text has the URL, with the query
            return StoreError(Cause.OTHER, "the URL is not valid")
        if isinstance(error, aiohttp.ClientSSLError):
            return StoreError(Cause.NOT_TRUSTED, describe_connection(error))
        if isinstance(error, aiohttp.ClientError):
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return None

    def host(self, url: str) -> str:
        """See `ObjectStore`."""
        return urlsplit(self.public_url(url)).netloc

    def access(self, action: Action) -> Access:
        """See `ObjectStore`."""
        name = "the page that lists the folder" if action is Action.LIST else "the file"
        return Access(
            f"permission of the server for {name}",
            "pass RemoteOptions(storage_options={'headers': {'Authorization': ...}})",
        )

    def has_pattern(self, url: str) -> bool:
        """Whether a URL has `*` in its path. `?` begins a query, and `[` an IPv6 address."""
        return "*" in urlsplit(url).path

    def public_url(self, url: str) -> str:
        """Returns a URL without a query and a password, which may be secrets."""
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
