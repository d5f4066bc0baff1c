"""Stored indexes of objects: when they are used, replaced and built again."""

import os

import pytest

from object_servers import WebServer
from remote_files import LINES, ids, options, parse_line
from tpudist.input import from_files

pytest.importorskip("aiohttp", reason="needs the extra `remote`")
pytest.importorskip("s3fs", reason="needs the extra `remote`")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "beside"])
def test_a_stored_index_is_used_until_the_object_changes(tmp_path, moto, bucket, place):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    folder = tmp_path / "index" if place == "local" else f"s3://{name}/index"

    def read(server):
        remote = options(folder, server.url)
        dataset = from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
        return dataset.num_examples, sum(
            int(x.partition("-")[2]) for p, x in server.ranges if "a.txt" in p
        )

    with WebServer(upstream=moto) as server:
        # The last byte of each range: the first byte, the whole file, the first record.
        assert read(server) == (500, 0 + len(LINES) - 1 + 1)
        server.ranges.clear()
        assert read(server) == (500, 0 + 1)
        files.pipe(f"{name}/a.txt", LINES[:-4])
        server.ranges.clear()
        assert read(server) == (499, 0 + len(LINES) - 5 + 1)
        server.ranges.clear()
        assert read(server) == (499, 0 + 1)
    found = os.listdir(folder) if place == "local" else files.ls(folder)
    assert len(found) == 1


def test_a_damaged_index_is_built_again(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    for _ in range(3):
        remote = options(tmp_path, moto)
        dataset = from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)
        assert ids(dataset.batch(100)) == list(range(500))
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[-10] ^= 1
        path.write_bytes(data[: len(data) - 3] if data[-1] % 2 else data)


def test_an_index_that_cannot_be_stored_is_reported(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"could not be stored in .*/file/x.*index_folder"):
        from_files(
            f"s3://{name}/a.txt", parse=parse_line, remote=options(tmp_path / "file" / "x", moto)
        )
    with pytest.warns(UserWarning, match=r"could not be stored in s3://bucket-none/x.*404"):
        from_files(
            f"s3://{name}/a.txt", parse=parse_line, remote=options("s3://bucket-none/x", moto)
        )
