"""Stored indexes: the positions of the records of an object, so that it is read whole only once.

An index is one file in a folder, or one object: a line of JSON that says which version of which
object it belongs to, and the distances of the positions, compressed.

    {"format": 1, "reader": "text 1", "url": "s3://b/a.txt", "size": 900, "version": "\\"5d41\\"",
     "crc32": 1234567890}
    ...

Its name depends on the URL and the reader. So the index of an object that has changed is replaced,
and many versions leave one index.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from tpudist.input.storage.data_file import CannotRead
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore

_FORMAT = 1
_DIGEST_LENGTH = 16  # 64 bits in hexadecimal: enough to tell URLs apart


class IndexFolder(Protocol):
    """Folder of stored indexes; `str` returns its path or URL."""

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of an index; None if there is none, or it cannot be read."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Writes an index, which replaces an older one at once."""
        ...


class LocalIndexes:
    """Indexes in a folder of this machine; None for the cache of the user."""

    def __init__(self, folder: Path | None):
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._folder = Path(base, "tpudist", "indexes") if folder is None else folder

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str) -> bytes | None:
        """See `IndexFolder`."""
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """See `IndexFolder`."""
        # Other programs may read or write the same index: a rename shows them a whole file.
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=name, delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, self._folder / name)
            except BaseException:
                os.unlink(file.name)
                raise


class StoredIndexes:
    """Indexes in a folder of an object store, such as one beside the data."""

    def __init__(self, store: ObjectStore, url: str):
        self._store, self._url = store, url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def read(self, name: str) -> bytes | None:
        """See `IndexFolder`."""
        # Whatever the reason, the index can be built; `write` reports a folder that is wrong.
        with contextlib.suppress(CannotRead):
            return self._store.read_whole(f"{self._url}/{name}")
        return None

    def write(self, name: str, data: bytes) -> None:
        """See `IndexFolder`."""
        self._store.write_whole(f"{self._url}/{name}", data)


def load_or_build(
    folder: IndexFolder,
    url: str,
    shown_url: str,
    facts: ObjectFacts,
    reader: str,
    build: Callable[[], np.ndarray],
) -> np.ndarray:
    """Returns the positions of the records of an object, from its stored index if there is one.

    Args:
        folder: Folder of the indexes.
        url: URL of the object.
        shown_url: The URL without secrets.
        facts: Version of the object. Without a version, nothing is stored.
        reader: Name of the format and the version of its index.
        build: Reads the object and returns the positions.
    """
    if facts.version is None:  # the object might change unnoticed
        return build()
    about = {"format": _FORMAT, "reader": reader, "url": shown_url, **dataclasses.asdict(facts)}
    # The whole URL, also a query: it may choose one of several files.
    digest = hashlib.sha256(f"{reader}\n{url}".encode()).hexdigest()[:_DIGEST_LENGTH]
    name = f"{digest}.index"
    data = folder.read(name)
    positions = None if data is None else _unpack(data, about)
    if positions is None:
        positions = build()
        try:
            folder.write(name, _pack(positions, about))
        except (CannotRead, OSError) as error:
            warnings.warn(
                f"The positions of records could not be stored in {folder}: {error} So the next "
                "run reads these files whole again. Pass RemoteOptions(index_folder=...), a folder "
                "that this program may write to.",
                stacklevel=2,
            )
    return positions


def _pack(positions: np.ndarray, about: dict[str, object]) -> bytes:
    distances = np.diff(positions, prepend=0).astype("<i8")
    body = zlib.compress(distances.tobytes(), level=1)
    return json.dumps({**about, "crc32": zlib.crc32(body)}).encode() + b"\n" + body


def _unpack(data: bytes, about: dict[str, object]) -> np.ndarray | None:
    """Returns the positions; None if the index is damaged, or belongs to another version."""
    line, _, body = data.partition(b"\n")
    try:
        if json.loads(line) != {**about, "crc32": zlib.crc32(body)}:
            return None
        return np.cumsum(np.frombuffer(zlib.decompress(body), "<i8"), dtype=np.int64)
    except (ValueError, zlib.error):
        return None
