"""Keeps what the compiler said of a program, to say it again at once.

What is kept is the compiled program's text and its memory figures, not what was made of them: a
better pricing reads them anew. An entry is found by a hash of the program and of all that it was
compiled for and with. JAX's own cache does not hit for programs of absent slices.
"""

import dataclasses
import gzip
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from tpudist.planner import as_json
from tpudist.xla.compiler import private_files
from tpudist.xla.compiler.compiler_process import CompiledProgram

_log = logging.getLogger("tpudist")
# Of the format of entries, and of what is asked of the compiler.
_VERSION = 2
_MOST_ENTRIES = 500
_ENDING = ".json.gz"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the compiler said: a program, or why there is none.

    Attributes:
        program: What it made.
        refusal: Its refusal of a program that does not fit, whole.
        seconds: How long it took.
        lines: A hash of the source lines that the program came from, which are in its text.
    """

    program: CompiledProgram | None
    refusal: str | None
    seconds: float
    lines: str = ""


def key_of(facts: dict[str, Any]) -> str:
    """A hash of what decides what the compiler says."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def default_folder() -> Path:
    """Where plans are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tpudist" / "plans"


class Cache:
    """A folder of entries, private to its owner. What is wrong with it is a warning in the log."""

    def __init__(self, folder: Path | None):
        """In `folder`; None for a cache that keeps nothing."""
        self._folder: Path | None = None
        if folder is not None:
            try:
                self._folder = private_files.folder(folder, ours=(f"*{_ENDING}",))
            except OSError as error:
                _log.warning("Plans are not kept: %s", error)

    @classmethod
    def of(cls, asked: "bool | str | Path") -> "Cache":
        """The cache that a caller asked for: the usual one, none, or one in a folder."""
        if asked is True:
            return cls(default_folder())
        return cls(Path(asked)) if asked else cls(None)

    def get(self, key: str) -> Entry | None:
        """The entry of a key; None if there is none, or one that cannot be believed."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}{_ENDING}"
        try:
            data = private_files.read(path)
            os.utime(path)  # used now: those not used for longest go first
            return _decode(data, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            _log.warning("A kept plan is ignored and made again: %s", error)
            return None

    def put(self, key: str, entry: Entry) -> None:
        """Keeps an entry."""
        if self._folder is None:
            return
        try:
            private_files.write(self._folder / f"{key}{_ENDING}", _encode(entry, key))
            self._remove_oldest()
        except OSError as error:
            _log.warning("A plan is not kept: %s", error)

    def _remove_oldest(self) -> None:
        assert self._folder is not None
        entries = sorted(self._folder.glob(f"*{_ENDING}"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_MOST_ENTRIES]:
            path.unlink(missing_ok=True)


def _encode(entry: Entry, key: str) -> bytes:
    text = as_json.dumps(entry, _VERSION)
    whole = {"key": key, "checksum": hashlib.sha256(text.encode()).hexdigest(), "entry": text}
    return gzip.compress(json.dumps(whole).encode(), 6)


def _decode(data: bytes, key: str) -> Entry:
    try:
        whole = json.loads(gzip.decompress(data))
        text = whole["entry"]
        matches = whole["checksum"] == hashlib.sha256(text.encode()).hexdigest()
    except Exception as error:  # zlib, UTF-8, JSON, or another structure
        raise ValueError(f"{key} cannot be read ({type(error).__name__}: {error})") from error
    if not matches or whole["key"] != key:
        raise ValueError(f"{key} differs from the written content")
    return as_json.loads(Entry, text, _VERSION)
