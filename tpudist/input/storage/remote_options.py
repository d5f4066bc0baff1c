"""Options for files in object stores and on web servers."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """Options of `from_files` for `gs://`, `s3://`, `https://` and `http://`.

    Attributes:
        storage_options: Options of the file system of fsspec, such as `{"anon": True}` for a public
            bucket of S3, `{"token": "anon"}` for one of Google Cloud Storage, or `{"endpoint_url":
            "https://..."}` for another server with the interface of S3. Default: the credentials
            and endpoints of the environment.
        index_folder: Folder for the positions of records of TFRecord and text files: a local path,
            or the URL of a folder, such as one next to the data. Default: `tpudist/indexes` in
            `XDG_CACHE_HOME`, which is `~/.cache` if it is not set. In a local folder, positions
            that were not used for 90 days are removed.
        max_requests: Number of requests that run at a time.
        max_attempts: Number of attempts of a request that fails for a reason that may pass: a
            server that is busy, a connection that is cut, a timeout.
        timeout_s: Seconds for one attempt, in addition to one second for each MiB. Each page of a
            listing is a request of its own.
        read_ahead_bytes: Most bytes that each pass through the data requests before they are
            needed; 0 to request the examples of a batch only when it is made.
    """

    # May have keys and tokens, so it is not shown.
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    index_folder: str | os.PathLike[str] | None = None
    max_requests: int = 64
    max_attempts: int = 8
    timeout_s: float = 30.0
    read_ahead_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, least in (("max_requests", 1), ("max_attempts", 1), ("read_ahead_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"RemoteOptions({name}={value!r}): it must be an integer of at least {least}."
                )
        if not self.timeout_s > 0:
            raise ValueError(f"RemoteOptions(timeout_s={self.timeout_s!r}): it must be positive.")
