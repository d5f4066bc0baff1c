"""Finds files by paths, URLs and patterns."""

import collections
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tpudist.input.storage.data_file import DataFile
from tpudist.input.storage.index_files import IndexFolder, LocalIndexes, StoredIndexes
from tpudist.input.storage.local_file import LocalFile
from tpudist.input.storage.object_store import ObjectStore
from tpudist.input.storage.remote_file import RemoteFile
from tpudist.input.storage.remote_options import RemoteOptions

PathLike: TypeAlias = str | os.PathLike[str]

_MAX_NAMES = 3  # in an error


def find_files(
    files: PathLike | Sequence[PathLike], options: RemoteOptions | None = None
) -> list[DataFile]:
    """Returns the files of paths, URLs and patterns; the files of a pattern are sorted.

    Args:
        files: A path, a URL or a pattern, or several.
        options: Options for URLs; None for the defaults.

    Raises:
        CannotRead: If a store cannot be listed.
        ValueError: If there are none, a protocol is unknown, or a file appears twice.
    """
    items = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not items:
        raise ValueError("No files were given. Pass a path, a pattern, or several of them.")
    stores = _Stores(options or RemoteOptions())
    found: list[DataFile] = []
    for item in items:
        text = os.fspath(item)
        found += stores.find(text) if "://" in text else _local_files(text)
    # Compares paths and URLs as they are written: a file and a link to it count as two. URLs with
    # different queries count as two, because a query may choose the file.
    keys = [x.url if isinstance(x, RemoteFile) else str(x) for x in found]
    counts = collections.Counter(keys)
    repeated = {str(x): 0 for x, key in zip(found, keys, strict=True) if counts[key] > 1}
    if repeated:
        raise ValueError(
            f"The files contain {', '.join(list(repeated)[:_MAX_NAMES])} twice, so its examples "
            "would be read twice in an epoch. Pass each file once."
        )
    return found


class _Stores:
    """The stores of some files, one for each protocol, and the folder of their indexes."""

    def __init__(self, options: RemoteOptions):
        self._options = options
        self._by_protocol: dict[str, ObjectStore] = {}
        folder = None if options.index_folder is None else os.fspath(options.index_folder)
        if folder is not None and "://" in folder:
            if folder.startswith(("http://", "https://")):
                raise ValueError(
                    f"RemoteOptions(index_folder={folder!r}): indexes are written to local paths, "
                    "gs:// and s3:// only."
                )
            self._indexes: IndexFolder = StoredIndexes(self._store(folder), folder)
        else:
            self._indexes = LocalIndexes(None if folder is None else Path(folder))

    def _store(self, url: str) -> ObjectStore:
        protocol = url.partition("://")[0]
        if protocol not in self._by_protocol:
            self._by_protocol[protocol] = _store_class(url)(self._options)
        return self._by_protocol[protocol]

    def find(self, url: str) -> list[DataFile]:
        """Returns the objects of a URL or a pattern."""
        store = self._store(url)
        path = url.partition("://")[2]
        if "?" not in url and (path.endswith("/") or "/" not in path):
            folder = store.public_url(url).rstrip("/")
            raise ValueError(f"{folder} is a folder. Pass the files in it, such as {folder}/*.")
        if not store.has_pattern(url):
            return [RemoteFile(store, url, None, self._indexes)]
        matches = store.match(url)
        if not matches:
            raise ValueError(
                f"No object matches {store.public_url(url)!r} at {store.host(url)}. Check the "
                "bucket and the pattern."
            )
        return [RemoteFile(store, *match, self._indexes) for match in matches.items()]


def _store_class(url: str) -> Callable[[RemoteOptions], ObjectStore]:
    match url.partition("://")[0]:
        case "s3":
            from tpudist.input.storage.s3_store import S3Store

            return S3Store
        case "gs":
            from tpudist.input.storage.gcs_store import GCSStore

            return GCSStore
        case "http" | "https":
            from tpudist.input.storage.web_store import WebStore

            return WebStore
    raise ValueError(
        f"{url.partition('?')[0]}: from_files reads local paths, gs://, s3://, https:// and "
        "http://. Mount the store as a folder, or read it with tf.data or a Grain data source: "
        "from_records(source)."
    )


def _local_files(text: str) -> list[DataFile]:
    if not glob.has_magic(text) or os.path.exists(text):
        return [LocalFile(Path(text))]
    matches = sorted(glob.glob(text, recursive=True))
    if not matches:
        raise ValueError(f"No file matches {text!r} (from {os.getcwd()}). Check the path.")
    return [LocalFile(Path(match)) for match in matches]
