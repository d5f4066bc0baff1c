"""Files on web servers and in GCS, and requests ahead of the loop."""

import subprocess
import sys
import traceback

import pytest

from object_servers import WebServer
from remote_files import HALF, LINES, ids, options, parse_line
from tpudist.input import RemoteOptions, from_files

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
        with pytest.raises(ValueError, match=r"/d/0.txt cannot be read .*certificate"):
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
        with pytest.raises(ValueError, match=r"a range request with HTTP 200.*supports range req"):
            from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))


def test_nothing_is_stored_for_files_whose_changes_would_not_be_noticed(tmp_path):
    with WebServer() as server:
        server.has_etags = False
        server.objects["/a.txt"] = LINES
        url = f"{server.url}/a.txt"
        dataset = from_files(url, parse=parse_line, remote=options(tmp_path))
        assert list(tmp_path.iterdir()) == []
        server.objects["/a.txt"] = LINES[:10]
        with pytest.raises(ValueError, match=r"it has 10 bytes, fewer than .*It was replaced"):
            ids(dataset.batch(500))


def test_a_web_page_that_changes_is_noticed_by_its_etag(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))
        server.objects["/a.txt"] = LINES[::-1]
        with pytest.raises(ValueError, match=r"its version is .* not .*It was replaced"):
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
        with pytest.raises(ValueError, match=r"a.txt cannot be read .*412.*It was replaced"):
            ids(dataset.batch(500))


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


@pytest.mark.slow
def test_importing_tpudist_does_not_import_fsspec():
    """It would take a part of a second of each start."""
    code = "import sys, tpudist.input; assert 'fsspec' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
