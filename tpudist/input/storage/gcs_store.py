"""Objects of Google Cloud Storage."""

from typing import Any
from urllib.parse import urlsplit

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

_PREFIX = "gs://"
_FIELDS = "name,size,generation,crc32c"


class GCSStore(ObjectStore):
    """See `ObjectStore`; requests go through gcsfs, which signs them."""

    def _connect(self) -> Any:
        return filesystems.make_filesystem("gs", self.options.storage_options)

    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        condition = {} if version is None else {"ifGenerationMatch": version}
        headers, data = await filesystems.get_from_gcs(
            self._filesystem, url, headers={"Range": f"bytes={start}-{end - 1}"}, **condition
        )
        size = size_in_range(headers.get("Content-Range", ""), start)
        # Emulators may omit the header, but they know the condition.
        return data, ObjectFacts(size, headers.get("X-Goog-Generation", version))

    async def _facts(self, url: str) -> ObjectFacts:
        bucket, _, name = url.removeprefix(_PREFIX).partition("/")
        found = await filesystems.get_json_from_gcs(
            self._filesystem, "b/{}/o/{}", bucket, name, fields=_FIELDS
        )
        return _facts_of(found)

    async def _list(self, start: str, is_deep: bool, token: str | None) -> Page[ObjectFacts | None]:
        bucket, _, prefix = start.removeprefix(_PREFIX).partition("/")
        # gcsfs omits arguments that are None.
        page = await filesystems.get_json_from_gcs(
            self._filesystem,
            "b/{}/o",
            bucket,
            prefix=prefix or None,
            delimiter=None if is_deep else "/",
            pageToken=token,
            fields=f"items({_FIELDS}),prefixes,nextPageToken",
        )
        root = f"{_PREFIX}{bucket}/"
        return Page(
            {root + x["name"]: _facts_of(x) for x in page.get("items", [])},
            [root + x for x in page.get("prefixes", [])],
            page.get("nextPageToken"),
        )

    def _classify(self, error: Exception) -> StoreError | None:
        import aiohttp
        from gcsfs.retry import HttpError  # type: ignore[import-not-found]
        from google.auth.exceptions import GoogleAuthError  # type: ignore[import-not-found]
        from requests.exceptions import ProxyError  # type: ignore[import-untyped]

        if isinstance(error, GoogleAuthError):
            # Such as a server of credentials that cannot be reached.
            cause = Cause.UNREACHABLE if error.retryable else Cause.NO_CREDENTIALS
            return StoreError(cause, describe_connection(error))
        if isinstance(error, HttpError):
            cause = cause_of_status(int(error.code or 0))
            return StoreError(cause, f"HTTP {error.code}: {error.message}")
        # What gcsfs makes of the status 412, 403 and 502.
        if isinstance(error, FileExistsError):
            return StoreError(Cause.CHANGED, "HTTP 412: it has another generation")
        if isinstance(error, OSError) and str(error).startswith("Forbidden"):
            return StoreError(Cause.FORBIDDEN, f"HTTP 403: {' '.join(str(error).split())}")
        if isinstance(error, ProxyError):
            return StoreError(Cause.BUSY, "HTTP 502")
        if isinstance(error, aiohttp.ClientError):
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return None

    def host(self, url: str) -> str:
        """See `ObjectStore`."""
        return urlsplit(self._filesystem.base).netloc

    def access(self, action: Action) -> Access:
        """See `ObjectStore`."""
        permission = {
            Action.READ: "storage.objects.get",
            Action.LIST: "storage.objects.list",
            Action.WRITE: "storage.objects.create and storage.objects.delete (to replace one)",
        }[action]
        return Access(
            f"{permission} in the bucket",
            "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or "
            "pass RemoteOptions(storage_options={'token': ...}), 'anon' for a public bucket",
        )


def _facts_of(about: dict[str, Any]) -> ObjectFacts:
    checksum = about.get("crc32c")
    return ObjectFacts(
        int(about["size"]),
        str(about["generation"]),
        None if checksum is None else f"crc32c {checksum}",
    )
