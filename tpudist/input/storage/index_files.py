"""Stored indexes: the positions of the records of an object, so that it is read whole only once.

An index is one file in a folder, or one object: a line of JSON that says which version of which
object it belongs to, and the distances of the positions, compressed.

    {"format": 1, "reader": "text 1", "url": "s3://b/a.txt", "size": 900, "version": "\\"5d41\\"",
     "crc32": 1234567890}
    ...

Its name depends on the URL, without a signature, and on the reader. So the index of an object that
has changed is replaced, and many versions and signatures leave one index. Indexes in the cache of a
machine that nobody has used for a long time are removed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import numpy as np

from tpudist.input.storage.data_file import CannotRead
from tpudist.input.storage.object_store import ObjectFacts, ObjectStore

_FORMAT = 1
_DIGEST_LENGTH = 16  # 64 bits in hexadecimal: enough to tell URLs apart
_SUFFIX = ".index"
_MAX_AGE_S = 90 * 24 * 3600.0  # of an index that is not used
_OWN_NAME = re.compile(r"[0-9a-f]{16}\.index(\.\d+-\d+)?")
# Names in the queries of signed URLs, in lower case: of Amazon, Google, CloudFront and Azure. They
# permit a request. Without a signature, the same names may choose the file.
_SIGNATURES = {"x-amz-signature", "x-goog-signature", "signature", "sig"}
_SIGNED = _SIGNATURES | set(
    "awsaccesskeyid googleaccessid expires policy key-pair-id "
    "se si sip sp spr sr st sv sdd skoid sktid skt ske sks skv".split()
)
_SIGNED_PREFIXES = ("x-amz-", "x-goog-")


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
        self._has_cleaned = False

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str) -> bytes | None:
        """See `IndexFolder`."""
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only, or of another user
            os.utime(self._folder / name)
        return data

    def write(self, name: str, data: bytes) -> None:
        """See `IndexFolder`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._has_cleaned:
            self._has_cleaned = True
            self._remove_unused()
        # Other programs may read or write the same index: a rename shows them a whole file. It has
        # the permissions of a new file, since other users may share the folder.
        temporary = self._folder / f"{name}.{os.getpid()}-{threading.get_ident()}"
        try:
            temporary.write_bytes(data)
            temporary.replace(self._folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _remove_unused(self) -> None:
        oldest = time.time() - _MAX_AGE_S
        for path in self._folder.iterdir():
            # Also a file of a program that was killed while it wrote.
            if _OWN_NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another program may have removed it
                    if path.stat().st_mtime < oldest:
                        path.unlink()


class StoredIndexes:
    """Indexes in a folder of an object store, such as one next to the data."""

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
    text = f"{reader}\n{without_signature(url)}"
    name = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH] + _SUFFIX
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


def without_signature(url: str) -> str:
    """Returns a URL without the parts of its query that permit the request."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    if not any(name.lower() in _SIGNATURES for name, _ in query):
        return url
    kept = [
        f"{name}={value}"
        for name, value in query
        if name.lower() not in _SIGNED and not name.lower().startswith(_SIGNED_PREFIXES)
    ]
    return urlunsplit(parts._replace(query="&".join(kept)))


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
