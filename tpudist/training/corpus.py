"""Text to train on, from files: some files are for training, the others are held out.

By default the text is the Python source of the running interpreter's standard library, which every
machine has. The name of a file alone decides its side, so every machine and every run hold out the
same files.
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
"""One file in this many is held out."""

# Installed packages are not the library. Its tests are more than half of its bytes, and largely
# tables of numbers.
_OMITTED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on, from different files."""

    train: np.ndarray
    """`[bytes]` uint8: the training files, one after the other."""
    held_out: np.ndarray
    """`[bytes]` uint8: the held-out files."""
    num_train_files: int
    """Number of training files."""
    num_held_out_files: int
    """Number of held-out files."""
    source: str
    """Origin of the text, as a phrase for reports."""


def load_corpus(pattern: str | None = None) -> Corpus:
    """Reads the files that match the glob `pattern`, or else the standard library's sources.

    Installed packages (`site-packages`) and the tests of the standard library are omitted.

    Raises:
        ValueError: If no file matches, or only one does, so none can be held out.
    """
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            path
            for path in root.rglob("*.py")
            if not _OMITTED_FOLDERS.intersection(path.relative_to(root).parts)
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
    """Splits `files` by their paths relative to `root`, and reads them in that order."""
    train, held_out = split_files([_relative(path, root) for path in files])
    if not train or not held_out:
        raise ValueError(
            f"The text ({source}) has {len(files)} file(s), but at least 2 are needed, because "
            f"complete files are held out. Use more files, or split the file in two."
        )
    by_name = {_relative(path, root): path for path in files}

    def read(names: Sequence[str]) -> np.ndarray:
        # Without a newline, the first line of a file would continue the last line of another.
        return np.frombuffer(b"\n".join(by_name[name].read_bytes() for name in names), np.uint8)

    return Corpus(read(train), read(held_out), len(train), len(held_out), source)


def split_files(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns names (train, held out): a name is held out if its hash is divisible by 20.

    With two names or more, at least one is on each side.
    """
    names = sorted(set(names))

    def hash_of(name: str) -> int:
        # Not `hash`, which has another seed in each process.
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    held_out = [name for name in names if hash_of(name) % HELD_OUT_ONE_IN == 0]
    # With few files perhaps no hash, or every hash, is divisible: at least one file must be on each
    # side. The file with the least hash stays the same if others are added with larger ones.
    if not held_out and len(names) > 1:
        held_out = [min(names, key=hash_of)]
    if len(held_out) == len(names):
        held_out = held_out[:-1]
    return [name for name in names if name not in set(held_out)], held_out


def spread_windows(text: np.ndarray, length: int, num_windows: int) -> np.ndarray:
    """Returns at most `num_windows` windows `[windows, length + 1]`, spread evenly over `text`.

    Windows overlap by at most one byte (or token). The first byte of a window is only read, never
    predicted, so no byte is predicted twice.

    Raises:
        ValueError: If `text` is shorter than one window.
    """
    num_available = (len(text) - 1) // length
    if num_available < 1:
        raise ValueError(
            f"The held-out text has {len(text)} "
            f"{'bytes' if text.dtype == np.uint8 else 'tokens'}, fewer than one window of "
            f"{length} + 1. Use more text, or a smaller --sequence-length."
        )
    num_windows = min(num_windows, num_available)
    # Multiples of `length`, so that windows never overlap in a predicted byte; the integer division
    # spreads them evenly over the available ones, without a repetition.
    starts = np.arange(num_windows) * num_available // num_windows * length
    return text[starts[:, None] + np.arange(length + 1)]


def _relative(path: Path, root: Path) -> str:
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
