"""Versions of objects: reads, resumed runs and processes that see one version of each."""

import json

import pytest

from object_servers import CUT, STALL, WebServer
from processes import run_processes
from remote_files import (
    HALF,
    LINES,
    distributed,
    distributed_ids,
    ids,
    options,
    parse_line,
)
from tpudist.input import from_files

pytest.importorskip("aiohttp", reason="needs the extra `remote`")
pytest.importorskip("s3fs", reason="needs the extra `remote`")

OTHER = LINES[:-2] + b"0\n"  # of the same size and number of lines


def begin(url, remote, num_records=None):
    dataset = from_files(url, parse=parse_line, remote=remote, num_records=num_records)
    return iter(distributed(dataset.shuffle(0).batch(50)))


def read(url, remote):
    """Returns the state after the first batch, and the examples of later ones."""
    iterator = begin(url, remote)
    next(iterator)
    return json.loads(json.dumps(iterator.get_state())), distributed_ids(iterator)


def resume(url, remote, state):
    iterator = begin(url, remote)
    iterator.set_state(state)
    return distributed_ids(iterator)


def test_a_run_does_not_resume_with_an_object_that_was_replaced(tmp_path, moto, bucket):
    name, files = bucket
    remote = options(tmp_path, moto)
    for x in ("a", "b"):
        files.pipe(f"{name}/{x}.txt", LINES)
    state, later = read(f"s3://{name}/*.txt", remote)
    assert resume(f"s3://{name}/*.txt", remote, state) == later
    files.pipe(f"{name}/b.txt", OTHER)
    with pytest.raises(
        ValueError,
        match=rf"objects: s3://{name} at http://127.*: versions: b.txt: '1890 bytes, version .*' "
        r"in the state, '1890 bytes, version .*' here. Make",
    ) as caught:
        begin(f"s3://{name}/*.txt", remote).set_state(state)
    assert "a.txt" not in str(caught.value)
    # Objects that no listing and no read had are looked at, too.
    with pytest.raises(ValueError, match=r"b.txt: '1890 bytes, version"):
        begin(f"s3://{name}/b.txt", remote, [500]).set_state(
            state | {"plan": {**state["plan"], "files": None}}
        )


def test_a_run_resumes_with_a_copy_and_from_a_state_without_versions(tmp_path, moto, bucket):
    name, files = bucket
    remote = options(tmp_path, moto)
    for x in ("in/a", "copy/a"):
        files.pipe(f"{name}/{x}.txt", LINES)
    state, later = read(f"s3://{name}/in/*.txt", remote)
    old = state | {"plan": {k: v for k, v in state["plan"].items() if k != "objects"}}
    assert resume(f"s3://{name}/copy/*.txt", remote, state) == later
    assert resume(f"s3://{name}/in/*.txt", remote, old) == later


def test_a_new_generation_of_the_same_bytes_is_the_same_data(tmp_path):
    """Rewriting an object of Google Cloud Storage, such as into another class, changes it."""
    pytest.importorskip("gcsfs", reason="needs the extra `remote`")
    with WebServer() as server:
        server.objects["/b/a.txt"] = LINES
        remote = options(tmp_path, storage_options={"endpoint_url": server.url, "token": "anon"})
        state, _ = read("gs://b/a.txt", remote)
        server.generation = 1
        begin("gs://b/a.txt", remote).set_state(state)
        server.objects["/b/a.txt"] = OTHER
        with pytest.raises(ValueError, match=r"a.txt: '1890 bytes, crc32c .*' in the state, .*cr"):
            begin("gs://b/a.txt", remote).set_state(state)


def test_urls_that_differ_in_the_query_are_several_files(tmp_path):
    with WebServer() as server:
        server.objects["/a.txt"] = LINES[:HALF]
        urls = [f"{server.url}/a.txt?part={i}" for i in range(2)]
        dataset = from_files(urls, parse=parse_line, remote=options(tmp_path))
        assert sorted(ids(dataset.batch(100))) == sorted([*range(250)] * 2)
        (folder,) = dataset.plan["objects"].values()
        assert list(folder["versions"]) == ["a.txt", "a.txt (2)"]
        with pytest.raises(ValueError, match=r"contain http.*/a.txt twice") as caught:
            from_files([*urls, urls[0]], parse=parse_line, remote=options(tmp_path))
        assert "part" not in str(caught.value)


@pytest.mark.parametrize("has_conditions", [True, False])
def test_a_web_server_receives_a_request_for_a_range_of_one_version(tmp_path, has_conditions):
    """Also a server that ignores the condition does not mix two versions."""
    with WebServer() as server:
        server.has_conditions = has_conditions
        server.objects["/a.txt"] = LINES
        dataset = from_files(f"{server.url}/a.txt", parse=parse_line, remote=options(tmp_path))
        version = server.headers[-1]["If-Range"]
        assert len(version) == 34
        server.objects["/a.txt"] = OTHER
        with pytest.raises(ValueError, match=r"version .* now, but had .*It was replaced"):
            ids(dataset.batch(500))


def test_a_server_of_s3_that_ignores_ranges_is_named(tmp_path, moto, bucket):
    name, files = bucket
    files.pipe(f"{name}/a.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.has_ranges = False
        with pytest.raises(ValueError, match=r"a.txt cannot be read .*with the whole file. Use a"):
            from_files(f"s3://{name}/a.txt", parse=parse_line, remote=options(tmp_path, server.url))


PROGRAM = """
    import sys
    import jax, s3fs
    import tpudist
    from jax.experimental.multihost_utils import sync_global_devices
    from processes import report
    from remote_files import LINES, options, parse_line
    from tpudist.input import from_files
    folder, name, *urls = sys.argv[1:]
    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    me = jax.process_index()
    remote = options(f"{folder}/{me}", urls[me], timeout_s=2.0)

    def make(folder):
        dataset = from_files(f"s3://{name}/{folder}/*.txt", parse=parse_line, remote=remote)
        return dataset.shuffle(0).batch(48)

    def begin(dataset):
        return iter(strategy.experimental_distribute_dataset(dataset))

    def rows(elements):
        return [strategy.gather(x["id"], axis=0).tolist() for x in elements]

    iterator = begin(make("a"))
    first = rows([next(iterator) for _ in range(3)])
    state = iterator.get_state()
    rest = rows(iterator)
    resumed = begin(make("a"))
    resumed.set_state(state)
    assert rows(resumed) == rest

    # Process 0 lists the objects before one is replaced, and process 1 lists them after that.
    dataset = make("b") if me == 0 else None
    sync_global_devices("listed")
    if me:
        files = s3fs.S3FileSystem(endpoint_url=urls[0])
        files.pipe(f"{name}/b/0.txt", LINES[:-2] + b"0" + LINES[-1:])
        dataset = make("b")
    try:
        next(begin(dataset))
    except ValueError as error:
        report([first + rest, str(error)])
"""


@pytest.mark.multiprocess
def test_two_processes_read_shards_of_objects_and_refuse_two_versions(tmp_path, moto, bucket):
    """Requests of one of them fail often."""
    name, files = bucket
    lines = LINES.splitlines(keepends=True)
    for i in range(5):
        files.pipe(f"{name}/a/{i}.txt", b"".join(lines[100 * i : 100 * i + 100]))
    files.pipe(f"{name}/b/0.txt", LINES)
    with WebServer(upstream=moto) as server:
        server.faults.extend([503, CUT, None, 429, STALL, None] * 3)
        server.listing_faults.append(503)
        args = [str(tmp_path), name, moto, server.url]
        first, second = (x.result for x in run_processes(PROGRAM, args=args))
        assert not server.faults
    remote = options(tmp_path, moto)
    dataset = from_files(f"s3://{name}/a/*.txt", parse=parse_line, remote=remote)
    expected = [x["id"].tolist() for x in dataset.shuffle(0).batch(48)]
    assert first[0] == second[0] == expected
    for _, text in (first, second):
        assert "A file was replaced while the processes began to read: objects" in text
        assert "0.txt: '1890 bytes, version" in text
        assert "in process 0" in text
        assert "in process 1" in text
