"""Objects of S3, served by moto on loopback: contents, faults and errors."""

import os

import jax
import numpy as np
import pytest

import tpudist
from object_servers import CUT, STALL, WebServer
from remote_files import (
    HALF,
    LINES,
    RECORDS,
    distributed,
    distributed_ids,
    ids,
    options,
    parse_line,
    parse_record,
    tfrecords,
)
from tpudist.input import AutoShardPolicy, from_files

pytest.importorskip("aiohttp", reason="needs the extra `remote`")
pytest.importorskip("s3fs", reason="needs the extra `remote`")

# S3.


def test_text_and_tfrecord_objects_of_s3_are_read_in_the_sequence_of_their_names(
    tmp_path, moto, bucket
):
    name, files = bucket
    files.pipe(f"{name}/in/b.txt", LINES[HALF:])
    files.pipe(f"{name}/in/a.txt", LINES[:HALF])
    files.pipe(f"{name}/in/empty.txt", b"")
    files.pipe(f"{name}/in/c.tfrecord", tfrecords(RECORDS))
    dataset = from_files(f"s3://{name}/in/*.txt", parse=parse_line, remote=options(tmp_path, moto))
    assert [str(x) for x in dataset._files.files] == [
        f"s3://{name}/in/{x}.txt" for x in ("a", "b", "empty")
    ]
    assert ids(dataset.batch(64)) == list(range(500))
    assert sorted(ids(dataset.shuffle(0).batch(64))) == list(range(500))
    dataset = from_files(
        f"s3://{name}/in/c.tfrecord", parse=parse_record, remote=options(tmp_path, moto)
    )
    assert ids(dataset.batch(7)) == list(range(300))


@pytest.mark.parametrize(
    ("status", "num_failures", "message"),
    [
        (503, 1, None),
        (503, 99, r"\*\.txt cannot be listed from .* in 3 attempts: HTTP 503"),
        (403, 99, r"\*\.txt cannot be listed.*HTTP 403.*need s3:ListBucket"),
    ],
)
def test_a_folder_that_cannot_be_listed_is_not_omitted(
    tmp_path, moto, bucket, quick, status, num_failures, message
):
    name, files = bucket
    for folder in ("a", "b"):
        files.pipe(f"{name}/{folder}/0.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.listing_faults.extend([None, *[status] * num_failures])
        remote = options(tmp_path, server.url, max_attempts=3)

        def find():
            return from_files(f"s3://{name}/*/*.txt", parse=parse_line, remote=remote)

        if message is None:
            assert find().num_files == 2
            return
        with pytest.raises(ValueError, match=message):
            find()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", "0.txt"),
        ("a/*", "a/0.txt a/1.tsv"),
        ("a/*.t?[tv]", "a/0.txt a/1.tsv"),
        ("*/0.txt", "a/0.txt b/0.txt"),
        ("**/0.txt", "0.txt a/0.txt b/0.txt b/c/0.txt"),
        ("b/**", "b/0.txt b/c/0.txt"),
        ("b/**/c/*.txt", "b/c/0.txt"),
    ],
)
def test_a_pattern_finds_the_objects_of_all_pages(tmp_path, moto, bucket, quick, pattern, found):
    name, files = bucket
    for x in ("0.txt", "a/", "a/0.txt", "a/1.tsv", "b/0.txt", "b/c/0.txt", "d.text"):
        files.pipe(f"{name}/{x}", b"1\n")
    with WebServer(upstream=moto) as server:
        server.num_per_page = 2
        server.listing_faults.extend([None, 503, 503])
        remote = options(tmp_path, server.url)
        dataset = from_files(
            f"s3://{name}/{pattern}", parse=parse_line, format="text", remote=remote
        )
    names = [str(x).removeprefix(f"s3://{name}/") for x in dataset._files.files]
    assert names == found.split()


def test_each_page_of_a_listing_has_its_own_attempts(tmp_path, moto, bucket, quick):
    """A folder of many pages takes long, and some of its requests fail."""
    name, files = bucket
    for i in range(5):
        files.pipe(f"{name}/{i}.txt", b"1\n")
    with WebServer(upstream=moto) as server:
        server.num_per_page = 1
        server.listing_faults.extend([None, 503, CUT] * 5)
        remote = options(tmp_path, server.url, max_attempts=3)
        dataset = from_files(f"s3://{name}/*.txt", parse=parse_line, remote=remote)
        assert len(server.listings) == 5 + 2 * 4
    assert dataset.num_files == 5


def test_folders_and_wrong_patterns_are_reported(tmp_path, moto, bucket):
    remote = options(tmp_path, moto)
    for url, complaint in (
        (f"s3://{bucket[0]}/a**/*.txt", r"`\*\*` stands for whole folders"),
        ("s3://bucket*/", r"s3://bucket\*/? is a folder"),
        ("s3://bucket", r"s3://bucket is a folder. Pass the files in it, such as s3://bucket/\*"),
    ):
        with pytest.raises(ValueError, match=complaint):
            from_files(url, parse=parse_line, remote=remote)


@pytest.mark.slow
def test_a_pass_through_s3_resumes_and_reads_what_local_files_give(tmp_path, moto, bucket):
    name, files = bucket
    for i in range(3):
        data = b"".join(b"%d\n" % j for j in range(100 * i, 100 * i + 100 - i))
        files.pipe(f"{name}/{i}.txt", data)
        (tmp_path / f"{i}.txt").write_bytes(data)

    def begin(pattern):
        dataset = from_files(pattern, parse=parse_line, remote=options(tmp_path / "index", moto))
        return iter(distributed(dataset.shuffle(1).batch(16).repeat(2)))

    expected = distributed_ids(begin(f"{tmp_path}/*.txt"))
    assert distributed_ids(begin(f"s3://{name}/*.txt")) == expected
    iterator = begin(f"s3://{name}/*.txt")
    for _ in range(5):
        next(iterator)
    resumed = begin(f"s3://{name}/*.txt")
    resumed.set_state(iterator.get_state())
    assert distributed_ids(resumed) == expected[5:]


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.FILE])
def test_the_order_by_files_is_that_of_local_files(tmp_path, moto, bucket, policy):
    name, files = bucket
    for i in range(4):
        data = tfrecords(RECORDS[60 * i : 60 * i + 60])
        files.pipe(f"{name}/{i}.tfrecord", data)
        (tmp_path / f"{i}.tfrecord").write_bytes(data)
    found = []
    for pattern in (f"{tmp_path}/*.tfrecord", f"s3://{name}/*.tfrecord"):
        dataset = from_files(pattern, parse=parse_record, remote=options(tmp_path / "i", moto))
        strategy = tpudist.MirroredStrategy(jax.devices()[:2])
        given = tpudist.InputOptions(auto_shard_policy=policy)
        batches = strategy.experimental_distribute_dataset(dataset.shuffle(0).batch(16), given)
        found.append(distributed_ids(batches))
    assert found[0] == found[1]


def test_parquet_objects_are_read_by_groups_of_rows(tmp_path, moto, bucket):
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are written by pyarrow")
    from pyarrow import parquet

    name, files = bucket
    path = tmp_path / "a.parquet"
    columns = {
        "id": np.arange(900),
        "x": [[float(i), 0.5] for i in range(900)],
        "unused": ["a"] * 900,
    }
    parquet.write_table(arrow.table(columns), str(path), row_group_size=100)
    files.put(str(path), f"{name}/a.parquet")
    with WebServer(upstream=moto) as server:
        remote = options(tmp_path, server.url)
        dataset = from_files(f"s3://{name}/a.parquet", columns=["id", "x"], remote=remote)
        server.ranges.clear()
        assert distributed_ids(distributed(dataset.batch(100))) == [
            list(range(i, i + 100)) for i in range(0, 900, 100)
        ]
        # Both columns of a group are neighbors: one request, none of them twice.
        assert len(server.ranges) == len(set(server.ranges)) <= 9
    with pytest.raises(ValueError, match=r"none.parquet cannot be read .*HTTP 404"):
        from_files(f"s3://{name}/none.parquet", remote=options(tmp_path, moto))


def test_array_record_objects_raise_an_error_with_other_ways(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.array_record", b"x" * 100)
    with pytest.raises(ValueError, match=r"a.array_record cannot be read in place.*Copy the file"):
        from_files(f"s3://{name}/*.array_record", parse=len, remote=options(tmp_path, moto))


# Faults.


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, 500, 429, CUT])
def test_requests_that_fail_are_repeated(tmp_path, moto, bucket, quick, fault):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.faults.extend([fault, fault, None, fault])
        dataset = from_files(
            f"s3://{name}/a.txt", parse=parse_line, remote=options(tmp_path, server.url)
        )
        server.faults.extend([None, fault, fault, fault] * 3)
        assert ids(dataset.batch(50)) == list(range(500))
        assert not server.faults


@pytest.mark.slow
def test_an_answer_that_stalls_is_requested_again(tmp_path, moto, bucket, quick):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.faults.extend([None, STALL])
        remote = options(tmp_path, server.url, timeout_s=1.0)
        dataset = from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
        assert ids(dataset.batch(250)) == list(range(500))
        server.faults.extend([STALL] * 2)
        remote = options(tmp_path, server.url, timeout_s=0.3, max_attempts=2)
        with pytest.raises(ValueError, match=r"in 2 attempts: no complete answer in time. Check"):
            from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)


def test_a_store_that_stays_busy_is_named_after_the_last_attempt(tmp_path, moto, bucket, quick):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.faults.extend([503] * 100)
        remote = options(tmp_path, server.url, max_attempts=3)
        with pytest.raises(ValueError, match=r"Try again later, lower RemoteOptions") as caught:
            from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
        assert len(server.ranges) == 3
    assert f"s3://{name}/a.txt cannot be read from {server.url} in 3 attempts: HTTP 503" in str(
        caught.value
    )


def test_an_object_that_changes_while_it_is_read_is_named(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    remote = options(tmp_path, moto, read_ahead_bytes=0)
    dataset = from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
    files.pipe(f"{name}/a.txt", LINES[:-2] + b"0\n")  # of the same size
    with pytest.raises(ValueError, match=r"a.txt cannot be read from http.*now, but had.*It was"):
        ids(dataset.batch(50))


def test_objects_and_buckets_that_do_not_exist_are_named(tmp_path, moto, bucket):
    name, _ = bucket
    remote = options(tmp_path, moto)
    with pytest.raises(ValueError, match=rf"s3://{name}/a.txt cannot be read .*404, NoSuchKey"):
        from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
    with pytest.raises(ValueError, match=r"s3://bucket-none/a.txt cannot be read .*NoSuchBucket"):
        from_files("s3://bucket-none/a.txt", parse=parse_line, remote=remote)
    with pytest.raises(ValueError, match=rf"No object matches 's3://{name}/\*.txt' at http://127"):
        from_files(f"s3://{name}/*.txt", parse=parse_line, remote=remote)


def test_a_request_that_is_forbidden_names_the_permission(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.faults.append(403)
        with pytest.raises(ValueError, match=r"HTTP 403.*need s3:GetObject .* set AWS_PROFILE"):
            from_files(f"s3://{name}/a.txt", parse=parse_line, remote=options(tmp_path, server.url))
        assert len(server.ranges) == 1


def test_missing_credentials_are_reported(tmp_path, moto, monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("AWS_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"Unable to locate credentials.*set AWS_PROFILE"):
        from_files("s3://bucket-1/a.txt", parse=parse_line, remote=options(tmp_path, moto))


def test_a_host_that_does_not_answer_is_named(tmp_path, credentials, quick):
    with WebServer() as server:
        url = server.url
    for remote in (options(tmp_path, url, max_attempts=2), options(tmp_path, max_attempts=2)):
        target = "s3://bucket/a.txt" if remote.storage_options else f"{url}/a.txt"
        with pytest.raises(ValueError, match=r"cannot be read from .*127.0.0.1:\d+ in 2 attempts"):
            from_files(target, parse=parse_line, remote=remote)
