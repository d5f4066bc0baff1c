"""Reading objects of S3: bytes per second and CPU, with `from_files` and with s3fs alone.

The server is moto's, in another process on this machine, so the rates compare two clients of one
server. They are not the rates of a real store.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import numpy as np

import tpudist
from benchmarks.figures import Figure, at_least_times
from tpudist.input import RemoteOptions, from_files

SUITE = "objects of S3"
NUM_FILES, NUM_RECORDS, RECORD_BYTES = 16, 128, 1 << 16
BATCH = 64
_REQUEST_BYTES = 1 << 22  # of s3fs alone: the largest request of `from_files`
_NUM_ROUNDS = 5
_LEAST = 0.9


def figures() -> Iterator[Figure]:
    """The rates of a pass in sequence and of a shuffled one, each relative to s3fs alone."""
    try:
        import moto  # noqa: F401
        import s3fs
    except ImportError:  # the extras `remote` and `test`
        return
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "shared"))
    from object_servers import start_moto

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "test")
    with start_moto() as url, tempfile.TemporaryDirectory() as folder:
        files = s3fs.S3FileSystem(endpoint_url=url, config_kwargs={"max_pool_connections": 64})
        files.mkdir("bucket")
        for i in range(NUM_FILES):
            files.pipe(f"bucket/{i}.tfrecord", _file(i))
        remote = RemoteOptions(storage_options={"endpoint_url": url}, index_folder=folder)
        dataset = from_files("s3://bucket/*.tfrecord", parse=_parse, remote=remote)
        yield from _compare("in sequence", dataset, lambda: _read_files(files))
        yield from _compare("shuffled", dataset.shuffle(0), lambda: _read_records(files))


def _compare(
    order: str, dataset: tpudist.input.FileDataset, read_alone: Callable[[], None]
) -> Iterator[Figure]:
    strategy = tpudist.MirroredStrategy()
    distributed = strategy.experimental_distribute_dataset(dataset.batch(BATCH))

    def read_all() -> None:
        for batch in distributed:
            del batch

    times: dict[str, list[tuple[float, float]]] = {"ours": [], "alone": []}
    for _ in range(_NUM_ROUNDS):  # in turn, since other programs use this machine
        for name, read in (("ours", read_all), ("alone", read_alone)):
            start = time.perf_counter(), time.process_time()
            read()
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    (ours_s, ours_cpu), (alone_s, alone_cpu) = (
        map(min, zip(*times[x], strict=True)) for x in ("ours", "alone")
    )
    num_bytes = NUM_FILES * NUM_RECORDS * RECORD_BYTES
    subject = f"{num_bytes >> 20} MiB in records of 64 KiB, {order}"
    rates = num_bytes / ours_s / 1e6, num_bytes / alone_s / 1e6
    yield at_least_times(Figure(SUITE, subject, "MB/s (s3fs alone)", *rates), _LEAST)
    cpu = ours_cpu / num_bytes * 1e9, alone_cpu / num_bytes * 1e9
    yield Figure(SUITE, subject, "client, s of CPU per GB (s3fs alone)", *cpu)


def _record_starts() -> np.ndarray:
    return np.arange(NUM_RECORDS) * (RECORD_BYTES + 16) + 12


def _read_files(files) -> None:
    """Reads all bytes in large ranges."""
    size = NUM_RECORDS * (RECORD_BYTES + 16)
    starts = np.arange(0, size, _REQUEST_BYTES).tolist()
    names = [f"bucket/{i}.tfrecord" for i in range(NUM_FILES) for _ in starts]
    ends = [min(start + _REQUEST_BYTES, size) for start in starts]
    files.cat_ranges(names, starts * NUM_FILES, ends * NUM_FILES, batch_size=64)


def _read_records(files) -> None:
    """Reads each record by a request, in a shuffled order."""
    order = np.random.default_rng(0).permutation(NUM_FILES * NUM_RECORDS)
    starts = _record_starts()[order % NUM_RECORDS]
    names = [f"bucket/{i}.tfrecord" for i in (order // NUM_RECORDS).tolist()]
    files.cat_ranges(names, starts.tolist(), (starts + RECORD_BYTES).tolist(), batch_size=64)


def _parse(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _file(number: int) -> bytes:
    rng = np.random.default_rng(number)
    parts = []
    for _ in range(NUM_RECORDS):
        for part in (struct.pack("<Q", RECORD_BYTES), rng.bytes(RECORD_BYTES)):
            crc = google_crc32c.value(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            parts += [part, struct.pack("<I", masked)]
    return b"".join(parts)
