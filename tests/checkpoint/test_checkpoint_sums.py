"""Each process sums its own files: process 0 reads nothing that others wrote, at any number."""

import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from processes import start_processes
from tpudist.checkpoint import Checkpoint, CheckpointManager, manifest

MANIFEST = "tpudist_manifest.json"
# Written after the sums. The second one is also read by Orbax; both have a checksum of their own.
LATER = {MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"}
NUM_PROCESSES = 3
ROWS, ROW_BYTES = 12, 1 << 20  # random, so they do not compress

PROGRAM = """
    import os, sys
    import jax, numpy as np, tpudist
    from pathlib import Path
    from jax.sharding import NamedSharding, PartitionSpec
    from processes import report
    from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, manifest

    tpudist.emulate()
    tpudist.MultiWorkerMirroredStrategy()
    strategy = tpudist.TPUStrategy()
    rows, row_bytes, folder, found = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], {}
    values = np.random.default_rng(0).integers(0, 2**31, (rows, row_bytes // 4), np.int32)
    split = NamedSharding(strategy.mesh, PartitionSpec("replica"))
    state = Checkpoint(x=jax.make_array_from_callback(values.shape, split, values.__getitem__))
    opened = []
    sys.addaudithook(lambda name, args: opened.append(args) if name == "open" else None)

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    manager = CheckpointManager(state, folder)
    for step in (1, 2):  # the first save imports Orbax
        opened.clear()
        before = bytes_read()
        manager.save(step)
        manager.wait()
        found["bytes"] = bytes_read() - before
    start = os.path.join(folder, "2.orbax-checkpoint-tmp/")
    found["read"] = sorted(
        str(path).removeprefix(start).replace(".orbax-checkpoint-tmp", "")
        for path, mode, _ in opened
        if str(path).startswith(start) and mode and "r" in mode
    )
    found["problems"] = manager.verify(2)

    # The last process cannot read one of its files, and then ends while it sums them.
    last, sum_shards = jax.process_count() - 1, manifest.sum_shards

    def fail(path, process):
        raise OSError("cannot read the shards")

    if jax.process_index() == last:
        manifest.sum_shards = fail
    manager.save(3)
    try:
        manager.wait()
    except CheckpointError as error:
        found["failed"] = str(error)
    manifest.sum_shards = sum_shards
    found["steps"] = manager.steps
    report(found)
    if jax.process_index() == last:
        manifest.sum_shards = lambda *_: os._exit(3)
    manager.save(4)
    manager.wait()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    args = [str(ROWS), str(ROW_BYTES), str(folder)]
    with start_processes(
        PROGRAM, num_processes=NUM_PROCESSES, devices_per_process=2, args=args
    ) as running:
        return folder, running.wait(exit_codes=(3, 75))


def _files(step: Path) -> list[str]:
    files = {str(x.relative_to(step)) for x in step.rglob("*") if x.is_file()}
    return sorted(files - LATER)


def _sums(step: Path) -> dict[str, list]:
    """The sums that a manifest of format 1 lists, each file read by this test."""
    contents = {x: (step / x).read_bytes() for x in _files(step)}
    return {name: [len(x), f"{zlib.crc32(x):08x}"] for name, x in contents.items()}


def _manifest(step: Path) -> dict:
    return json.loads((step / MANIFEST).read_bytes().partition(b"\n")[0])


def test_one_process_reads_each_file_once(tmp_path):
    state = Checkpoint(x=np.random.default_rng(0).random(10**5), step=1)
    read = []
    hook_is_on = [True]

    def record(event, args):
        if hook_is_on and event == "open" and args[1] and "r" in args[1]:
            read.append(str(args[0]))

    sys.addaudithook(record)
    with CheckpointManager(state, tmp_path) as manager:
        manager.save()
    hook_is_on.clear()  # a hook cannot be removed
    names = [x.partition("1.orbax-checkpoint-tmp/")[2] for x in read if "1.orbax-checkpoint" in x]
    assert sorted(x for x in names if x not in LATER) == _files(tmp_path / "1")
    assert _manifest(tmp_path / "1")["files"] == _sums(tmp_path / "1")


def test_a_manifest_of_an_earlier_version_is_read(tmp_path):
    """Format 1 as the first version wrote it: process 0 had read all files."""
    with CheckpointManager(Checkpoint(x=np.arange(10.0), step=1), tmp_path) as manager:
        manager.save()
        manager.wait()
        body = {"format": 1, "files": _sums(tmp_path / "1")}
        body["metadata"] = _manifest(tmp_path / "1")["metadata"]
        text = json.dumps(body).encode()
        (tmp_path / "1" / MANIFEST).write_bytes(text + f"\n{zlib.crc32(text):08x}\n".encode())
        assert manager.verify(1) == []


def test_the_shares_of_a_verification_are_even_and_complete():
    sizes = np.random.default_rng(0).integers(1, 10**6, 5000).tolist()
    files = {f"file {i}": (size, "") for i, size in enumerate(sizes)}
    shares = [manifest._share(files, i, 16) for i in range(16)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name][0] for name in share) for share in shares]
    assert max(loads) - min(loads) <= min(sizes) + max(sizes) // 100


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_reads_only_the_files_that_it_wrote(finished):
    folder, processes = finished
    names = _files(folder / "2")
    for process, result in enumerate(x.result for x in processes):
        own = [x for x in names if x.startswith(f"state/ocdbt.process_{process}/")]
        assert own
        small = [x for x in names if "ocdbt.process_" not in x]
        read = [x for x in result["read"] if x not in LATER]
        assert read == (sorted([*own, *small]) if process == 0 else own)
        assert sum(os.path.getsize(folder / "2" / x) for x in small) < 10_000
        # All reads of the process, with those of TensorStore: the share, and a few small files.
        share = ROWS * ROW_BYTES / NUM_PROCESSES
        assert 0.9 * share < result["bytes"] < 1.1 * share
        assert result["problems"] == []


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_manifest_of_several_processes_lists_every_file(finished):
    folder, _ = finished
    assert _manifest(folder / "2")["files"] == _sums(folder / "2")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_faults_in_the_files_of_each_process_are_detected(finished, tmp_path):
    folder, _ = finished
    manager = CheckpointManager(Checkpoint(), tmp_path)
    shutil.copytree(folder / "2", tmp_path / "2")
    assert manager.verify(2) == []
    for process in range(NUM_PROCESSES):
        data = max(
            (tmp_path / "2" / "state" / f"ocdbt.process_{process}" / "d").iterdir(),
            key=lambda x: x.stat().st_size,
        )
        content = data.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        other_save = content[::-1]  # of the same size
        for fault in (bytes(flipped), content[:-1], content + b"\0", other_save, None):
            data.unlink() if fault is None else data.write_bytes(fault)
            (problem,) = manager.verify(2)
            assert problem.startswith(str(data.relative_to(tmp_path / "2")))
        data.write_bytes(content)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_that_fails_during_its_sums_fails_the_save_of_all(finished):
    _, processes = finished
    *others, last = (x.result for x in processes)
    assert "OSError: cannot read the shards" in last["failed"]
    for result in others:
        assert "process 2: OSError: cannot read the shards" in result["failed"]
        assert "The last checkpoint is of step 2." in result["failed"]
    assert [x.result["steps"] for x in processes] == [[1, 2]] * NUM_PROCESSES


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_that_ends_during_its_sums_ends_all_and_is_named(finished):
    folder, processes = finished
    assert [x.exit_code for x in processes] == [75, 75, 3]
    for process in processes[:-1]:
        assert "Process 2 ended without a message" in process.stderr
    assert {x.name for x in folder.iterdir()} == {"1", "2", "4.orbax-checkpoint-tmp"}
    assert CheckpointManager(Checkpoint(), folder).latest_step == 2
