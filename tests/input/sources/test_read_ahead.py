"""Bytes of later batches are requested while earlier ones are used, within a bound."""

import numpy as np
import pytest

from object_servers import WebServer
from remote_files import LINES, distributed, distributed_ids, options, parse_line, tfrecords
from tpudist.input import from_files

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
        # Two windows of half of the bytes, each with up to one batch more, and the present batch.
        assert 0 < most <= 400_000 + 3 * 2 * 40_100
        batches._windows._thread.shutdown()
        del batches, batch
        assert all(x[2]() is None for x in file._parts)


def test_without_read_ahead_each_batch_is_requested_by_itself(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        remote = options(tmp_path, read_ahead_bytes=0)
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, num_threads=1, remote=remote)
        server.ranges.clear()
        assert distributed_ids(distributed(dataset.batch(50)))[0] == list(range(50))
        assert len(server.ranges) == 10
