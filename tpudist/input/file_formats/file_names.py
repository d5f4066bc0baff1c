"""Finds files by paths and patterns, and their format by their names."""

import collections
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tpudist.input.file_formats.file import RecordFile

PathLike: TypeAlias = str | os.PathLike[str]

_MAX_NAMES = 3  # in an error
# Suffixes of file names. A number of shards may follow a suffix.
_SUFFIXES = {
    "array_record": (".array_record", ".arrayrecord"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "parquet": (".parquet", ".pq"),
    "text": (".txt", ".jsonl", ".csv", ".tsv", ".text"),
}


def find_files(files: PathLike | Sequence[PathLike]) -> list[Path]:
    """Returns the files of paths and patterns; the files of a pattern are sorted.

    Raises:
        ValueError: If there are none, a path is not in the file system, or a file appears twice.
    """
    items = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not items:
        raise ValueError("No files were given. Pass a path, a pattern, or several of them.")
    paths: list[Path] = []
    for item in items:
        text = os.fspath(item)
        if "://" in text:
            raise ValueError(
                f"{text} is not in the file system of this machine. Mount the bucket, or read it "
                "with tf.data or a Grain data source: from_records(source)."
            )
        if glob.has_magic(text) and not os.path.exists(text):
            matches = sorted(glob.glob(text, recursive=True))
            if not matches:
                raise ValueError(f"No file matches {text!r} (from {os.getcwd()}). Check the path.")
            paths += map(Path, matches)
        else:
            paths.append(Path(text))
    # Compares paths as they are written: a file and a link to it count as two.
    repeated = [str(path) for path, count in collections.Counter(paths).items() if count > 1]
    if repeated:
        raise ValueError(
            f"The files contain {', '.join(repeated[:_MAX_NAMES])} twice, so its examples would be "
            "read twice in an epoch. Pass each file once."
        )
    return paths


def format_of(paths: list[Path], format: str | None) -> str:
    """Returns the format of files, from their names if `format` is None.

    Raises:
        ValueError: If the format is unknown, or the names have no known suffix or several formats.
    """
    known = ", ".join(map(repr, _SUFFIXES))
    if format is not None:
        if format not in _SUFFIXES:
            raise ValueError(f"format={format!r}: it must be one of {known}.")
        return format
    examples: dict[str, Path] = {}  # the first file of each format
    for path in paths:
        # TensorFlow Datasets names shards such as data.tfrecord-00000-of-00010.
        suffixes = {path.suffix, path.suffix.partition("-")[0]}
        found = next((x for x, ends in _SUFFIXES.items() if suffixes.intersection(ends)), None)
        if found is None:
            raise ValueError(
                f"The name of {path} does not show its format. Pass format=: one of {known}."
            )
        examples.setdefault(found, path)
    if len(examples) > 1:
        listed = ", ".join(f"{path} is {found}" for found, path in examples.items())
        raise ValueError(
            f"The files have several formats: {listed}. Make a dataset of the files of one format, "
            "or pass format= if their names are wrong."
        )
    return next(iter(examples))


def reader_class(format: str) -> Callable[..., RecordFile]:
    """Returns the reader of a format. Its module, and a library that it needs, load only then."""
    match format:
        case "array_record":
            from tpudist.input.file_formats.array_record import ArrayRecordFile

            return ArrayRecordFile
        case "tfrecord":
            from tpudist.input.file_formats.tfrecord import TFRecordFile

            return TFRecordFile
        case "parquet":
            from tpudist.input.file_formats.parquet import ParquetFile

            return ParquetFile
        case _:
            assert format == "text", format
            from tpudist.input.file_formats.text import TextFile

            return TextFile
