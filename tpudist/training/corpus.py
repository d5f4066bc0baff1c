"""Text to train on: files to bytes, split by file into what is trained on and what is held out.

By default the text is the Python source of the running interpreter's standard library, which every
machine has. Which side a file is on depends on its name alone, so that the same file is held out on
every machine and in every run.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_ONE_IN = 20
"""One file in so many is held out."""

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to judge by, from different files."""

    train: np.ndarray
    """`[bytes]` uint8: the files trained on, one after the other."""
    held_out: np.ndarray
    """`[bytes]` uint8: the files held out."""
    num_train_files: int
    """How many files `train` is made of."""
    num_held_out_files: int
    """How many files `held_out` is made of."""
    source: str
    """Where the text comes from, for people."""


def load_corpus(pattern: str | None = None) -> Corpus:
    """Reads the files that match the glob `pattern`, or else the standard library's sources.

    Of the standard library, what is installed beside it (`site-packages`) and its own tests, more
    than half of its bytes and largely tables, are left out.

    Raises:
        ValueError: No file matches, or too few to hold one out.
    """
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            path
            for path in root.rglob("*.py")
            if not _NOT_THE_LIBRARY.intersection(path.relative_to(root).parts)
        ]
        return read_corpus(
            files, root, f"the standard library of Python {sysconfig.get_python_version()}"
        )
    files = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
    if not files:
        raise ValueError(
            f"--data {pattern!r} matches no file in {Path.cwd()}. It is a glob, and ** matches "
            f"any number of folders. Quote it, as in --data 'books/**/*.txt'."
        )
    return read_corpus(files, Path.cwd(), f"files matching {pattern}")


def read_corpus(files: Sequence[Path], root: Path, source: str) -> Corpus:
    """Splits `files` by their paths relative to `root`, and reads them in the order of these."""
    train, held_out = split_files([_relative(path, root) for path in files])
    if not train or not held_out:
        raise ValueError(
            f"The text ({source}) has {len(files)} file(s), but at least 2 are needed, because "
            f"complete files are held out. Use more files, or split the file in two."
        )
    by_name = {_relative(path, root): path for path in files}

    def read(names: Sequence[str]) -> np.ndarray:
        # A newline between files: the first line of one is no continuation of the last line of
        # another.
        return np.frombuffer(b"\n".join(by_name[name].read_bytes() for name in names), np.uint8)

    return Corpus(read(train), read(held_out), len(train), len(held_out), source)


def split_files(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sorts `names` into (train, held out): one in 20 by its hash, but one at least of two."""
    names = sorted(set(names))

    def rank(name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    held_out = [name for name in names if rank(name) % HELD_OUT_ONE_IN == 0]
    if not held_out and len(names) > 1:
        held_out = [min(names, key=rank)]
    if len(held_out) == len(names):
        held_out = held_out[:-1]
    return [name for name in names if name not in set(held_out)], held_out


def spread_windows(text: np.ndarray, length: int, num_windows: int) -> np.ndarray:
    """At most `num_windows` windows `[windows, length + 1]`, spread evenly over `text`.

    Windows overlap by one byte (or token) at most, so that none is predicted twice: the first of a
    window is only read.

    Raises:
        ValueError: `text` is shorter than one window.
    """
    num_available = (len(text) - 1) // length
    if num_available < 1:
        raise ValueError(
            f"The held-out text has {len(text)} "
            f"{'bytes' if text.dtype == np.uint8 else 'tokens'}, fewer than one window of "
            f"{length} + 1. Use more text, or a smaller --sequence-length."
        )
    num_windows = min(num_windows, num_available)
    starts = np.arange(num_windows) * num_available // num_windows * length
    return text[starts[:, None] + np.arange(length + 1)]


def _relative(path: Path, root: Path) -> str:
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
