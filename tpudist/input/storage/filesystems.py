"""File systems of fsspec, which are an extra of tpudist. No other file imports fsspec.

fsspec calls its coroutines by private names: they are the interface for programs with a loop.
"""

import inspect
import types
from collections.abc import Mapping
from typing import Any

# Of the option `remote`: protocol -> the packages that its file system needs.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp"}


def make_filesystem(protocol: str, options: Mapping[str, Any]) -> Any:
    """Returns a file system of its own, which does not share its settings or its listings.

    Raises:
        ImportError: If fsspec, or the package for this protocol, is not installed.
    """
    try:
        if protocol == "gs":
            # Not the class that fsspec finds: that one asks another service for the kind of each
            # bucket, by gRPC, which emulators and proxies do not have.
            from gcsfs.core import GCSFileSystem as cls  # type: ignore[import-not-found]
        else:
            import fsspec  # type: ignore[import-untyped]

            cls = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ImportError(
            f"Files of {protocol}:// are read by fsspec with {_PACKAGES[protocol]}, which is not "
            "installed. Install tpudist[remote]."
        ) from error
    # Listings are read once, and must not be those of an earlier dataset.
    defaults = {"use_listings_cache": False, "skip_instance_cache": True}
    filesystem = cls(**{**defaults, **options})
    if protocol == "gs":
        # Without the retries of gcsfs: `ObjectStore` retries, and has the limits of the user.
        filesystem._request = types.MethodType(inspect.unwrap(cls._request), filesystem)
    return filesystem


async def write_object(filesystem: Any, url: str, data: bytes) -> None:
    """Writes an object."""
    await filesystem._pipe_file(url, data)


async def call_s3(filesystem: Any, method: str, **arguments: str) -> dict[str, Any]:
    """Calls a method of the client of S3."""
    return await filesystem._call_s3(method, **arguments)


def endpoint_of_s3(filesystem: Any) -> str | None:
    """Returns the URL of the server of S3; None before the first request."""
    client = filesystem._s3
    return None if client is None else client.meta.endpoint_url


async def get_from_gcs(filesystem: Any, url: str, **arguments: Any) -> tuple[Any, bytes]:
    """Returns the headers and the bytes of an answer of Google Cloud Storage.

    Arguments that gcsfs does not know go into the query.
    """
    return await filesystem._call("GET", filesystem.url(url), **arguments)


async def get_json_from_gcs(filesystem: Any, path: str, *names: str, **query: Any) -> Any:
    """Returns a JSON answer of Google Cloud Storage. `names` replace `{}` in the path."""
    return await filesystem._call("GET", path, *names, json_out=True, **query)


async def read_links(filesystem: Any, url: str) -> list[str]:
    """Returns the links on a web page that lead to files and folders below it."""
    return await filesystem._ls_real(url, detail=False)
