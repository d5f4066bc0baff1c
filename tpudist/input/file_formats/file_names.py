"""Which files are meant by paths and patterns, and which format their names tell of."""

import collections
import glob
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpudist.input.file_formats.file import RecordFile

# Module, class, and what stands at the end of names, or before a number of shards.
_FORMATS = {
    "array_record": ("array_record", "ArrayRecordFile", (".array_record", ".arrayrecord")),
    "tfrecord": ("tfrecord", "TFRecordFile", (".tfrecord", ".tfrecords")),
    "parquet": ("parquet", "ParquetFile", (".parquet", ".pq")),
    "text": ("text", "TextFile", (".txt", ".jsonl", ".csv", ".tsv", ".text")),
}


def find_files(files: Any) -> list[Path]:
    """The files that paths and patterns name, those of a pattern sorted.

    Raises:
        ValueError: There are none, one is not in the file system, or one is named twice.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not given:
        raise ValueError("No files were given. Pass a path, a pattern, or several of them.")
    paths: list[Path] = []
    for item in given:
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
    twice = [str(path) for path, count in collections.Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(
            f"The files contain {', '.join(twice[:3])} twice, so its examples would be read twice "
            "in an epoch. Pass each file once."
        )
    return paths


def format_of(paths: list[Path], format: str | None) -> str:
    """The format of files, by their names if `format` is None.

    Raises:
        ValueError: There is no such format, or the names do not say it, or say several.
    """
    if format is not None:
        if format not in _FORMATS:
            known = ", ".join(map(repr, _FORMATS))
            raise ValueError(f"format={format!r}: it must be one of {known}.")
        return format
    said: dict[str, Path] = {}
    for path in paths:
        kinds = [
            kind
            for kind, (_, _, ends) in _FORMATS.items()
            # TensorFlow Datasets name shards such as data.tfrecord-00000-of-00010.
            if any(end in (path.suffix, path.suffix.partition("-")[0]) for end in ends)
        ]
        if not kinds:
            known = ", ".join(map(repr, _FORMATS))
            raise ValueError(
                f"The name of {path} does not show its format. Pass format=: one of {known}."
            )
        said.setdefault(kinds[0], path)
    if len(said) > 1:
        listed = ", ".join(f"{path} is {kind}" for kind, path in said.items())
        raise ValueError(
            f"The files have several formats: {listed}. Make a dataset of the files of one format, "
            "or pass format= if their names are wrong."
        )
    return next(iter(said))


def reader(format: str) -> Callable[..., RecordFile]:
    """What opens a file of a format; its module is imported when it is needed."""
    module, kind, _ = _FORMATS[format]
    return getattr(importlib.import_module(f"tpudist.input.file_formats.{module}"), kind)
