"""Finds the format of files by their names, and its reader."""

from collections.abc import Callable, Sequence
from pathlib import PurePath

from tpudist.input.file_formats.file import RecordFile
from tpudist.input.storage.data_file import DataFile

# Suffixes of file names. A number of shards may follow a suffix.
_SUFFIXES = {
    "array_record": (".array_record", ".arrayrecord"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "parquet": (".parquet", ".pq"),
    "text": (".txt", ".jsonl", ".csv", ".tsv", ".text"),
}


def format_of(files: Sequence[DataFile], format: str | None) -> str:
    """Returns the format of files, from their names if `format` is None.

    Raises:
        ValueError: If the format is unknown, or the names have no known suffix or several formats.
    """
    known = ", ".join(map(repr, _SUFFIXES))
    if format is not None:
        if format not in _SUFFIXES:
            raise ValueError(f"format={format!r}: it must be one of {known}.")
        return format
    examples: dict[str, DataFile] = {}  # the first file of each format
    for file in files:
        # TensorFlow Datasets names shards such as data.tfrecord-00000-of-00010.
        suffix = PurePath(file.name).suffix
        suffixes = {suffix, suffix.partition("-")[0]}
        found = next((x for x, ends in _SUFFIXES.items() if suffixes.intersection(ends)), None)
        if found is None:
            raise ValueError(
                f"The name of {file} does not show its format. Pass format=: one of {known}."
            )
        examples.setdefault(found, file)
    if len(examples) > 1:
        listed = ", ".join(f"{file} is {found}" for found, file in examples.items())
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
