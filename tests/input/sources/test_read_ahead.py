"""Bytes of later batches are requested while earlier ones are used, within a bound."""

import numpy as np
import pytest

from object_servers import WebServer
from remote_files import (
    LINES,
    distributed,
    distributed_ids,
    options,
    parse_line,
    parse_record,
    tfrecords,
)
from tpudist import NumpyDataset
from tpudist.input import from_files
from tpudist.input.sources.read_ahead import AheadPass
from tpudist.input.storage import remote_file
from tpudist.input.storage.data_file import CannotRead

pytest.importorskip("aiohttp", reason="needs the extra `remote`")
pytest.importorskip("s3fs", reason="needs the extra `remote`")


def test_later_batches_are_requested_while_the_first_is_used(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))
        server.ranges.clear()
        batches = distributed_ids(distributed(dataset.batch(10)))
        assert sum(batches, []) == list(range(500))
        # Windows of 1, 4, 16 and 29 of the 50 batches, and each is one range.
        assert len(server.ranges) == 4
        assert len(set(server.ranges)) == 4


def test_requests_run_in_parallel_up_to_the_limit(tmp_path):
    with WebServer() as server:
        # Records that are far apart need a request each.
        records = [bytes([i]) * 40_000 for i in range(64)]
        server.objects["/a.tfrecord"] = tfrecords(records)
        remote = options(tmp_path, max_requests=6)
        dataset = from_files(
            f"{server.url}/a.tfrecord", parse=lambda x: {"id": np.int64(x[0])}, remote=remote
        )
        server.ranges.clear()
        server.delay_s, server.most = 0.05, 0
        order = dataset.shuffle(0).batch(8)
        found = distributed_ids(distributed(order))
        assert sorted(sum(found, [])) == list(range(64))
        assert server.most == 6


def test_bytes_that_are_requested_ahead_are_bounded_and_freed(tmp_path):
    with WebServer() as server:
        records = [bytes([i]) * 40_000 for i in range(64)]
        server.objects["/a.tfrecord"] = tfrecords(records)
        remote = options(tmp_path, read_ahead_bytes=400_000)
        dataset = from_files(
            f"{server.url}/a.tfrecord", parse=lambda x: {"id": np.int64(x[0])}, remote=remote
        )
        (file,) = dataset._files.files
        batches = dataset.batch(2).begin(0)
        most = 0
        for batch in batches:
            batch.take(np.arange(2), copy=False)
            alive = sum(x[1] - x[0] for x in file._parts if x[2]() is not None)
            most = max(most, alive)
        # Two windows of half of the bytes, and the present batch.
        assert 0 < most <= 400_000 + 2 * 40_100
        # A pass ends after the last window, so no thread makes another one.
        del batches, batch
        assert all(x[2]() is None for x in file._parts)


def test_a_batch_that_needs_more_bytes_is_requested_ahead_in_part(tmp_path):
    """A shuffled batch of Parquet rows may need as many groups of rows as it has rows."""
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    table = arrow.table({"id": np.arange(640), "x": rng.random(640)})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, str(path), row_group_size=10, compression="NONE")
    with WebServer() as server:
        server.objects["/a.parquet"] = path.read_bytes()
        remote = options(tmp_path, read_ahead_bytes=6_000)
        dataset = from_files(f"{server.url}/a.parquet", remote=remote).shuffle(0).batch(32)
        (file,) = dataset._files.files
        found, prefetch = [], file.prefetch

        def count(starts, ends):
            found.append(int(file.costs(starts, ends).sum()))
            return prefetch(starts, ends)

        file.prefetch = count
        rows = sorted(sum(distributed_ids(distributed(dataset)), []))
    assert rows == list(range(640))
    assert 0 < max(found) <= 3_000


def test_a_batch_of_small_records_far_apart_is_read_in_turns(tmp_path, monkeypatch):
    """The bytes between them would need many times the memory of the batch."""
    monkeypatch.setattr(remote_file, "_MAX_TURN_BYTES", 50_000)
    records = [i.to_bytes(8, "little") + b"x" * (9_000 if i % 2 else 0) for i in range(100)]
    with WebServer() as server:
        server.objects["/a.tfrecord"] = tfrecords(records)
        remote = options(tmp_path, read_ahead_bytes=0)
        dataset = from_files(
            f"{server.url}/a.tfrecord", parse=parse_record, remote=remote, num_threads=1
        )
        (file,) = dataset._files.files
        found, request = [], file._request

        def count(starts, ends):
            parts = request(starts, ends)
            found.append(sum(x[1] - x[0] for x in file._parts if x[2]() is not None))
            return parts

        file._request = count
        with dataset._files.use(0) as reader:
            data = reader.read(np.arange(98, -1, -2))
        assert data == records[98::-2]
        assert len(found) > 5
        assert max(found) <= 2 * (50_000 + 9_100)


class Unreadable:
    """Bytes of batches of 2 rows. Rows from 20 on cannot be read."""

    def requests(self):
        return self

    def numbers_of(self, place, rows):
        if place.start >= 20:
            raise CannotRead("an order needs a file that has gone")
        return rows

    def add(self, numbers, max_bytes, *, in_part):
        return True

    def begin(self):
        return []


def test_a_batch_that_cannot_be_read_does_not_end_the_pass_before_it():
    dataset = NumpyDataset({"id": np.arange(40)}).batch(2)
    batches = AheadPass(dataset, Unreadable(), 0, None, 1000)
    found = [batch.take(np.arange(2), copy=False)[0].tolist() for batch in batches]
    assert found == np.arange(40).reshape(20, 2).tolist()


def test_without_read_ahead_each_batch_is_requested_by_itself(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        remote = options(tmp_path, read_ahead_bytes=0)
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, num_threads=1, remote=remote)
        server.ranges.clear()
        assert distributed_ids(distributed(dataset.batch(50)))[0] == list(range(50))
        assert len(server.ranges) == 10
