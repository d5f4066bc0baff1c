"""Stored indexes of objects: when they are used, replaced and built again."""

import os
import stat

import pytest

from object_servers import WebServer
from remote_files import LINES, ids, options, parse_line
from tpudist.input import from_files
from tpudist.input.storage.index_files import LocalIndexes, without_signature

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
    with pytest.warns(
        UserWarning, match=r"stored in s3://bucket-none/x: s3.*index cannot be written from .*404"
    ):
        from_files(
            f"s3://{name}/a.txt", parse=parse_line, remote=options("s3://bucket-none/x", moto)
        )
    with WebServer(upstream=moto) as server:
        server.put_status = 403
        remote = options(f"s3://{name}/x", server.url)
        with pytest.warns(UserWarning, match=r"cannot be written .*403.*need s3:PutObject"):
            from_files(f"s3://{name}/a.txt", parse=parse_line, remote=remote)


def test_an_index_has_the_permissions_of_a_new_file(tmp_path):
    """Other users of a shared folder must be able to read it."""
    old = os.umask(0o022)
    try:
        LocalIndexes(tmp_path).write("x", b"1")
    finally:
        os.umask(old)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_an_index_that_is_not_used_for_long_is_removed(tmp_path):
    names = ["0" * 16 + ".index", "1" * 16 + ".index", "2" * 16 + ".index.7-8", "mine.index"]
    indexes = LocalIndexes(tmp_path)
    for name in names:
        indexes.write(name, b"1")
        os.utime(tmp_path / name, (0, 0))
    assert LocalIndexes(tmp_path).read(names[1]) == b"1"
    LocalIndexes(tmp_path).write("3" * 16 + ".index", b"1")
    assert {x.name for x in tmp_path.iterdir()} == {names[1], "mine.index", "3" * 16 + ".index"}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a?X-Amz-Expires=9&X-Amz-Signature=ab&versionId=3", "https://h/a?versionId=3"),
        ("https://h/a?X-Goog-Date=9&x-goog-signature=ab", "https://h/a"),
        ("https://h/a?Expires=9&Signature=a%2Fb&Key-Pair-Id=K", "https://h/a"),
        ("https://h/a?sv=2024&se=x&sp=r&sig=abc&part=1", "https://h/a?part=1"),
        ("https://h/a?se=x&sp=r&expires=3", "https://h/a?se=x&sp=r&expires=3"),
        ("s3://b/a.txt", "s3://b/a.txt"),
    ],
)
def test_signatures_do_not_name_an_index(url, expected):
    assert without_signature(url) == expected


def test_a_file_that_is_signed_again_leaves_one_index(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        for i in range(3):
            url = f"{server.url}/a.txt?X-Amz-Signature={i}"
            from_files(url, parse=parse_line, remote=options(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    assert sum(x == f"bytes=0-{len(LINES) - 1}" for _, x in server.ranges) == 1
