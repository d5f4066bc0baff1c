"""A cache on disk of the compiler's answers, so that the same program is compiled only once.

An entry has the compiled program's text and its memory figures, not the plan that was made of them:
a later version of the planner reads them again. JAX's own cache has no entries for slices that are
not present.
"""

import dataclasses
import gzip
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from tpudist.planner import json_records
from tpudist.xla.compiler import private_files
from tpudist.xla.hlo.compiled_program import CompiledProgram

_log = logging.getLogger("tpudist")
# Raise it if entries have other fields, or if the compiler is called in another way.
_VERSION = 4
# Compressed entries of large models have a few MB, so this bounds the folder to a few GB.
_MAX_ENTRIES = 500
_ENDING = ".json.gz"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Answer of the compiler: a program or a refusal.

    Attributes:
        program: Compiled program; None if it does not fit.
        refusal: Complete message for a program that does not fit; None if it fits.
        seconds: Seconds that the compiler took.
        lines: Hash of the lowered program with its source lines, which the key excludes.
    """

    program: CompiledProgram | None
    refusal: str | None
    seconds: float
    lines: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the program has machine code, or was refused."""
        return self.program is None or self.program.memory.generated_code_bytes is not None


def key_of(facts: Mapping[str, object]) -> str:
    """Returns a hash of the facts that decide an answer."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def default_folder() -> Path:
    """Returns the directory of the cache of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tpudist" / "plans"


class Cache:
    """A folder of entries, private to its owner. Its failures are only warnings in the log.

    Args:
        folder: Directory; None for a cache without entries.
    """

    def __init__(self, folder: Path | None):
        self._folder: Path | None = None
        if folder is not None:
            try:
                self._folder = private_files.folder(folder, ours=(f"*{_ENDING}",))
            except OSError as error:
                _log.warning("Plans are not kept: %s", error)

    @classmethod
    def of(cls, cache: "bool | str | Path") -> "Cache":
        """Returns the default cache for True, none for False, or the cache in a folder."""
        # `is True`, because a folder may have any name, and a non-empty text is true as well.
        if cache is True:
            return cls(default_folder())
        return cls(Path(cache)) if cache else cls(None)

    def get(self, key: str) -> Entry | None:
        """Returns the entry of a key; None if it does not exist or is damaged."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}{_ENDING}"
        try:
            data = private_files.read(path)
            os.utime(path)  # `_remove_least_recent` goes by the time of the last use
            return _decode(data, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            _log.warning("A kept plan is ignored and made again: %s", error)
            return None

    def put(self, key: str, entry: Entry) -> None:
        """Stores an entry."""
        if self._folder is None:
            return
        try:
            private_files.write(self._folder / f"{key}{_ENDING}", _encode(entry, key))
            self._remove_least_recent()
        except OSError as error:
            _log.warning("A plan is not kept: %s", error)

    def _remove_least_recent(self) -> None:
        assert self._folder is not None
        # Another process may delete a file between `glob` and `stat`: that is an OSError, which
        # `put` reports as a warning. The entry itself is already written.
        entries = sorted(self._folder.glob(f"*{_ENDING}"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_MAX_ENTRIES]:
            path.unlink(missing_ok=True)


def _encode(entry: Entry, key: str) -> bytes:
    text = json_records.dumps(entry, _VERSION)
    # The key is inside, too: a renamed or copied file would answer for another program.
    content = {"key": key, "checksum": hashlib.sha256(text.encode()).hexdigest(), "entry": text}
    return gzip.compress(json.dumps(content).encode(), 6)


def _decode(data: bytes, key: str) -> Entry:
    try:
        content = json.loads(gzip.decompress(data))
        text = content["entry"]
        matches = content["checksum"] == hashlib.sha256(text.encode()).hexdigest()
    except Exception as error:  # from zlib, UTF-8, JSON, or a missing key
        raise ValueError(f"{key} cannot be read ({type(error).__name__}: {error})") from error
    if not matches or content["key"] != key:
        raise ValueError(f"{key} differs from the written content")
    return json_records.loads(Entry, text, _VERSION)
