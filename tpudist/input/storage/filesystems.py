"""File systems of fsspec, which are an extra of tpudist. No other file imports fsspec.

fsspec calls its coroutines by private names: they are the interface for programs with a loop.
"""

from collections.abc import Mapping
from typing import Any

# Of the option `remote`: protocol -> the packages that its file system needs.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp"}


class FolderNotListed(Exception):
    """A folder cannot be listed, for the reason that is the cause.

    Not an OSError: fsspec leaves out a folder if its listing raises one.
    """


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
    list_folder = filesystem._ls

    async def list_folder_or_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return await list_folder(*args, **kwargs)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FolderNotListed from error

    filesystem._ls = list_folder_or_raise
    return filesystem


async def find_matches(filesystem: Any, pattern: str) -> dict[str, dict[str, Any]]:
    """Returns the objects that match a pattern: name -> facts."""
    return await filesystem._glob(pattern, detail=True)


async def read_facts(filesystem: Any, url: str) -> dict[str, Any]:
    """Returns the facts about an object."""
    return await filesystem._info(url)


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
