"""Objects of S3, and of servers with its interface such as MinIO."""

from typing import Any

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

_PREFIX = "s3://"
# Codes of S3 that say more than their HTTP status.
_CODES = {
    "InvalidAccessKeyId": Cause.NO_CREDENTIALS,
    "SignatureDoesNotMatch": Cause.NO_CREDENTIALS,
    "ExpiredToken": Cause.NO_CREDENTIALS,
    "InvalidToken": Cause.NO_CREDENTIALS,
    "RequestTimeout": Cause.BUSY,
    "SlowDown": Cause.BUSY,
}


class S3Store(ObjectStore):
    """See `ObjectStore`; requests go through s3fs, which signs them."""

    def _connect(self) -> Any:
        options = dict(self.options.storage_options)
        # `ObjectStore` retries; three layers of retries would make minutes of an error.
        config = {"max_pool_connections": self.options.max_requests, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
        filesystem = filesystems.make_filesystem("s3", options)
        filesystem.retries = 1
        return filesystem

    async def _get(
        self, url: str, start: int, end: int, version: str | None
    ) -> tuple[bytes, ObjectFacts]:
        bucket, _, key = url.removeprefix(_PREFIX).partition("/")
        arguments = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        if version is not None:
            arguments["IfMatch"] = version
        response = await filesystems.call_s3(self._filesystem, "get_object", **arguments)
        async with response["Body"] as body:
            size = size_in_range(response.get("ContentRange", ""), start)
            data = await body.read()
        return data, ObjectFacts(size, response.get("ETag"))

    async def _facts(self, url: str) -> ObjectFacts:
        bucket, _, key = url.removeprefix(_PREFIX).partition("/")
        try:
            # Unlike a HEAD request, this one returns the reason if it fails.
            return (await self._get(url, 0, 1, None))[1]
        except OSError as error:
            if self._cause(error).cause is not Cause.CHANGED:
                raise
        # An empty object has no first byte.
        response = await filesystems.call_s3(
            self._filesystem, "head_object", Bucket=bucket, Key=key
        )
        return ObjectFacts(response["ContentLength"], response.get("ETag"))

    async def _list(self, start: str, is_deep: bool, token: str | None) -> Page[ObjectFacts | None]:
        bucket, _, prefix = start.removeprefix(_PREFIX).partition("/")
        arguments = {"Bucket": bucket, "Prefix": prefix}
        if not is_deep:
            arguments["Delimiter"] = "/"
        if token is not None:
            arguments["ContinuationToken"] = token
        page = await filesystems.call_s3(self._filesystem, "list_objects_v2", **arguments)
        root = f"{_PREFIX}{bucket}/"
        return Page(
            {
                root + x["Key"]: ObjectFacts(x["Size"], x["ETag"]) if "ETag" in x else None
                for x in page.get("Contents", [])
            },
            [root + x["Prefix"] for x in page.get("CommonPrefixes", [])],
            page.get("NextContinuationToken") if page.get("IsTruncated") else None,
        )

    def _classify(self, error: Exception) -> StoreError | None:
        import aiohttp
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            about: Any = error.response
            code, message = about["Error"].get("Code", ""), about["Error"].get("Message", "")
            status = about.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            cause = _CODES.get(code) or cause_of_status(status)
            return StoreError(cause, f"HTTP {status}, {code}: {message}")
        if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            return StoreError(Cause.NO_CREDENTIALS, str(error))
        connection = (exceptions.HTTPClientError, exceptions.ConnectionError, aiohttp.ClientError)
        if isinstance(error, connection):
            return StoreError(Cause.UNREACHABLE, describe_connection(error))
        return None

    def host(self, url: str) -> str:
        """See `ObjectStore`."""
        return filesystems.endpoint_of_s3(self._filesystem) or "S3"

    def access(self, action: Action) -> Access:
        """See `ObjectStore`."""
        permission = {
            Action.READ: "s3:GetObject for the object",
            Action.LIST: "s3:ListBucket for the bucket",
            Action.WRITE: "s3:PutObject for the object",
        }[action]
        return Access(
            permission,
            "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, "
            "pass RemoteOptions(storage_options={'anon': True})",
        )
