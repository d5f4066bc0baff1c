"""Objects of Google Cloud Storage."""

from typing import Any
from urllib.parse import urlsplit

from tpudist.input.storage import filesystems
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore
from tpudist.input.storage.store_errors import (
    Access,
    Cause,
    StoreError,
    cause_of_status,
    describe_connection,
)

_PREFIX = "gs://"


class GCSStore(ObjectStore):
    """See `ObjectStore`; requests go through gcsfs.

    gcsfs itself repeats a request that fails, up to 6 times, so such errors are final here. Only
    timeouts are left to `ObjectStore`.
    """

    def _connect(self) -> Any:
        return filesystems.make_filesystem("gs", self.options.storage_options)

    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        condition = {} if version is None else {"ifGenerationMatch": version}
        headers, data = await filesystems.get_from_gcs(
            self._filesystem,
            url,
            headers={"Range": f"bytes={start}-{end - 1}"},
            **condition,
        )
        if "Content-Range" not in headers:
            raise StoreError(Cause.NO_RANGES, "the server sent the whole object")
        return data, ObjectFacts(int(headers["Content-Range"].rpartition("/")[2]), version)

    async def _facts(self, url: str) -> ObjectFacts:
        info = await filesystems.read_facts(self._filesystem, url)
        if info["type"] != "file":
            raise StoreError(Cause.MISSING, "it is a folder, not an object")
        return ObjectFacts(int(info["size"]), str(info["generation"]))

    async def _match(self, pattern: str) -> dict[str, ObjectFacts | None]:
        found = await filesystems.find_matches(self._filesystem, pattern)
        return {
            _PREFIX + name: ObjectFacts(int(x["size"]), str(x["generation"]))
            for name, x in found.items()
            if x["type"] == "file"
        }

    def _classify(self, error: Exception) -> StoreError | None:
        import aiohttp
        from gcsfs.retry import HttpError  # type: ignore[import-not-found]
        from google.auth.exceptions import GoogleAuthError  # type: ignore[import-not-found]

        if isinstance(error, GoogleAuthError):
            return StoreError(Cause.NO_CREDENTIALS, describe_connection(error))
        if isinstance(error, HttpError):
            cause = cause_of_status(int(error.code or 0))
            return StoreError(cause, f"HTTP {error.code}: {error.message}")
        # What gcsfs makes of the status 412 and 403.
        if isinstance(error, FileExistsError):
            return StoreError(Cause.CHANGED, "HTTP 412: it has another generation")
        if isinstance(error, OSError) and str(error).startswith("Forbidden"):
            return StoreError(Cause.FORBIDDEN, f"HTTP 403: {error}")
        if isinstance(error, aiohttp.ClientError):
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return None

    def host(self, url: str) -> str:
        """See `ObjectStore`."""
        return urlsplit(self._filesystem.base).netloc

    def access(self, *, to_list: bool) -> Access:
        """See `ObjectStore`."""
        permission = "storage.objects.list" if to_list else "storage.objects.get"
        return Access(
            f"{permission} in the bucket",
            "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or "
            "pass RemoteOptions(storage_options={'token': ...}), 'anon' for a public bucket",
        )
