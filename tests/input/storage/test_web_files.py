"""Files on web servers and in GCS, and requests ahead of the loop."""

import os
import subprocess
import sys
import traceback

import grain
import pytest

from object_servers import CUT, STALL, WebServer
from places import PYTHONPATH
from remote_files import HALF, LINES, ids, options, parse_line, parse_record
from tpudist.input import RemoteOptions, from_files, from_records

pytest.importorskip("aiohttp", reason="needs the extra `remote`")
pytest.importorskip("s3fs", reason="needs the extra `remote`")

# Web servers.


@pytest.mark.slow
def test_files_of_a_web_server_with_tls_are_read(tmp_path):
    trustme = pytest.importorskip("trustme", reason="certificates are made by trustme")
    import ssl

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with WebServer(context=context) as server:
        for i in range(3):
            server.objects[f"/d/{i}.txt"] = b"%d\n" % i
        headers = {"Authorization": "Bearer secret"}
        remote = options(tmp_path, storage_options={"ssl": trusting, "headers": headers})
        dataset = from_files(f"{server.url}/d/*.txt", parse=parse_line, remote=remote)
        assert ids(dataset.batch(2)) == [0, 1, 2]
        assert all(x["Authorization"] == "Bearer secret" for x in server.headers)
        with pytest.raises(ValueError, match=r"/d/0.txt cannot be read .*certificate.*'ssl': ssl"):
            from_files(f"{server.url}/d/0.txt", parse=parse_line, remote=options(tmp_path))


def test_a_signed_url_is_read_and_its_secret_is_not_shown(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        url = f"{server.url}/a.txt?signature=h1dden"
        dataset = from_files(url, parse=parse_line, remote=options(tmp_path))
        assert ids(dataset.batch(500)) == list(range(500))
        assert dataset.num_files == 1
        server.objects.clear()
        with pytest.raises(ValueError, match=r"/a.txt cannot be read .*404") as caught:
            from_files(url, parse=parse_line, remote=options(tmp_path))
        assert "h1dden" not in "".join(traceback.format_exception(caught.value))
        assert "h1dden" not in repr(options(tmp_path, storage_options={"token": "h1dden"}))
        assert all(b"h1dden" not in x.read_bytes() for x in tmp_path.iterdir())


def test_a_web_server_without_ranges_is_named(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        server.has_ranges = False
        with pytest.raises(ValueError, match=r"from byte 0 with the whole file. Use a server"):
            from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))


def test_nothing_is_stored_for_files_whose_changes_would_not_be_noticed(tmp_path):
    with WebServer() as server:
        server.has_etags = False
        urls = []
        for name in ("a", "b"):
            server.objects[f"/{name}.txt"] = LINES
            urls.append(f"{server.url}/{name}.txt")
        with pytest.warns(UserWarning, match=r"127.*neither an ETag nor .*/.\.txt") as found:
            dataset = from_files(urls, parse=parse_line, remote=options(tmp_path))
        assert len(ids(dataset.batch(500))) == 1000  # without another warning
        assert len(found) == 1
        assert list(tmp_path.iterdir()) == []
        server.objects["/a.txt"] = LINES + b"500\n"  # also if the range is still in the file
        with pytest.raises(ValueError, match=r"1894 bytes, no version now, but had 1890 bytes"):
            ids(dataset.batch(500))


def test_a_web_page_that_changes_is_noticed_by_its_etag(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))
        server.objects["/a.txt"] = LINES[::-1]
        with pytest.raises(ValueError, match=r"version .* now, but had .*It was replaced"):
            ids(dataset.batch(500))


# Google Cloud Storage: a server with a part of its interface.


@pytest.mark.slow
def test_objects_of_gcs_are_read_with_their_generation(tmp_path):
    pytest.importorskip("gcsfs", reason="needs the extra `remote`")
    with WebServer() as server:
        server.objects["/bkt/d/a.txt"] = LINES[:HALF]
        server.objects["/bkt/d/b.txt"] = LINES[HALF:]
        storage = {"endpoint_url": server.url, "token": "anon"}
        remote = options(tmp_path, storage_options=storage)
        dataset = from_files("gs://bkt/d/*.txt", parse=parse_line, remote=remote)
        assert ids(dataset.batch(64)) == list(range(500))
        assert ids(from_files("gs://bkt/d/b.txt", parse=parse_line, remote=remote).batch(9))
        with pytest.raises(ValueError, match=r"gs://bkt/none.txt cannot be read from 127.*exist"):
            from_files("gs://bkt/none.txt", parse=parse_line, remote=remote)
        server.objects["/bkt/d/a.txt"] = LINES[: HALF - 2] + b"0\n"
        with pytest.raises(ValueError, match=r"a.txt cannot be read .*now, but had.*It was"):
            ids(dataset.batch(500))


@pytest.mark.slow
def test_array_record_objects_of_gcs_are_read_by_grain(tmp_path, monkeypatch):
    pytest.importorskip("gcsfs", reason="needs the extra `remote`")
    from array_record.python import array_record_module

    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for i in range(50):
        writer.write(i.to_bytes(8, "little"))
    writer.close()
    with WebServer() as server:
        server.objects["/bkt/a.array_record"] = path.read_bytes()
        remote = gcs_options(tmp_path, server)
        with pytest.raises(ValueError, match=r"gs://bkt/a.array_record cannot.*Grain reads gs:// "):
            from_files("gs://bkt/*.array_record", parse=parse_record, remote=remote)
        # The remedy of the error.
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", server.url)
        source = grain.sources.ArrayRecordDataSource(["gs://bkt/a.array_record"])
        dataset = from_records(source, parse_record).shuffle(0).batch(20)
        assert sorted(ids(dataset)) == list(range(50))


def gcs_options(folder, server, **changes):
    storage = {"endpoint_url": server.url, "token": "anon"}
    return options(folder, storage_options=storage, **changes)


def test_requests_to_gcs_that_fail_are_repeated_by_tpudist_only(tmp_path, quick):
    """gcsfs would repeat each of them six times, with waits of a minute in all."""
    pytest.importorskip("gcsfs", reason="needs the extra `remote`")
    with WebServer() as server:
        for i in range(3):
            server.objects[f"/bkt/d/{i}.txt"] = LINES
        server.num_per_page = 1
        server.listing_faults.extend([503, 429, None, CUT, 500])
        server.faults.extend([503, 502, CUT, 429, None, 500, STALL])
        remote = gcs_options(tmp_path, server, timeout_s=1.0)
        dataset = from_files("gs://bkt/*/*.txt", parse=parse_line, remote=remote)
        assert sorted(ids(dataset.batch(100))) == sorted([*range(500)] * 3)
        assert not server.faults
        assert not server.listing_faults
        for status, complaint in (
            (503, r"a.txt cannot be read from 127.* in 3 attempts: HTTP 503.*Try again later"),
            (502, r"in 3 attempts: HTTP 502.*Try again later"),
            (403, r"a.txt cannot be read from 127.*: HTTP 403.*need storage.objects.get in the"),
            (401, r"HTTP 401.*The request needs storage.objects.get.*gcloud auth"),
        ):
            server.objects["/bkt/a.txt"] = LINES
            remote = gcs_options(tmp_path / "x", server, max_attempts=3)
            server.faults.clear()
            server.faults.extend([status] * 99)
            server.ranges.clear()
            with pytest.raises(ValueError, match=complaint):
                from_files("gs://bkt/a.txt", parse=parse_line, remote=remote)
            # The chunks of the file, each of them once or three times.
            assert len(server.ranges) == (3 if status > 500 else 1)


# Options.


def test_options_and_urls_must_be_valid(tmp_path):
    for changes, complaint in (
        ({"max_requests": 0}, r"RemoteOptions\(max_requests=0\): it must be an integer of at le"),
        ({"timeout_s": 0}, r"timeout_s=0\): it must be positive"),
        ({"read_ahead_bytes": True}, r"read_ahead_bytes=True"),
    ):
        with pytest.raises(ValueError, match=complaint):
            RemoteOptions(**changes)
    with pytest.raises(ValueError, match=r"index_folder='https://x'\): indexes are written to"):
        from_files("s3://x/a.txt", parse=len, remote=options("https://x"))
    with pytest.raises(ValueError, match=r"s3://x/a.txt cannot be read .*'wrong'.*storage_options"):
        from_files(
            "s3://x/a.txt", parse=len, remote=options(tmp_path, storage_options={"wrong": 1})
        )


PROGRAM = """
import sys, time
import tpudist
from remote_files import options, parse_line
from tpudist.input import from_files
remote = options(sys.argv[2], timeout_s=1e4)
dataset = from_files(sys.argv[1], parse=parse_line, num_records=[500], remote=remote)
batches = iter(tpudist.MirroredStrategy().experimental_distribute_dataset(dataset.batch(10)))
next(batches)
time.sleep(1.5)  # a thread waits for the next one
print("first batch", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_while_a_server_does_not_answer(tmp_path):
    """The server never answers later requests, and each request may take minutes."""
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        # The first byte, the file for its index, the first example and the first batch.
        server.faults.extend([None] * 4 + [STALL] * 100)
        command = [sys.executable, "-c", PROGRAM, f"{server.url}/a.txt", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (0, "first batch\n"), done.stderr
        assert len(server.ranges) > 4


@pytest.mark.slow
def test_importing_tpudist_does_not_import_fsspec():
    """It would take a part of a second of each start."""
    code = "import sys, tpudist.input; assert 'fsspec' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
