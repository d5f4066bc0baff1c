"""Checkpoints of several processes: one directory, and the same result in all of them."""

import warnings

import pytest

import tpudist
from checkpoint_program import digest, make_state
from processes import run_processes
from tpudist.checkpoint import CheckpointManager

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = """
    import resource, signal, sys, time, warnings
    import jax, numpy as np, tpudist
    from jax.sharding import PartitionSpec
    from checkpoint_program import digest, make_state
    from processes import report
    from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, latest_checkpoint

    tpudist.emulate()
    tpudist.MultiWorkerMirroredStrategy()
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    from_one, to_one, faulty = sys.argv[1:]
    found = {}

    # What one process has saved; its newest is damaged.
    state = make_state(strategy, 7)
    manager = CheckpointManager(state, from_one)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = manager.restore_or_initialize()
    found["restored"] = digest(state)
    found["path"] = path
    found["warned"] = [str(x.message) for x in caught]

    # For one process.
    state = make_state(strategy, 8)
    with CheckpointManager(state, to_one) as manager:
        manager.save()
        manager.save(9)
    found["saved"] = digest(state)
    found["problems"] = manager.verify(9)

    # One of them cannot write its part: here the disk is as good as full.
    rows = np.random.default_rng(0).random((8, 300_000), np.float32)
    split = jax.sharding.NamedSharding(strategy.mesh, PartitionSpec(("replica", "fsdp")))
    checkpoint = Checkpoint(x=jax.make_array_from_callback(rows.shape, split, rows.__getitem__))
    manager = CheckpointManager(checkpoint, faulty)
    manager.save(1)
    manager.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
    manager.save(2)
    start = time.monotonic()
    try:
        manager.wait()
    except CheckpointError as error:
        found["error"] = str(error)
    found["waited_s"] = time.monotonic() - start
    try:
        checkpoint.write(faulty + "/best")
    except CheckpointError as error:
        found["write_error"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    found["steps"] = manager.steps

    # At paths of their own.
    try:
        checkpoint.write(faulty + f"/best-{jax.process_index()}")
    except CheckpointError as error:
        found["paths_apart"] = str(error)
    few = Checkpoint(n=1, v=strategy.create(lambda: jax.numpy.ones(4)))
    found["paths"] = [few.save(faulty + "/ckpt"), few.write(faulty + "/best")]
    few.n = 2
    few.save(faulty + "/ckpt"), few.write(faulty + "/best")
    found["paths"].append(latest_checkpoint(faulty))
    few.n = 0
    found["restores_apart"] = []
    for second in (None, found["paths"][1]):
        path = second if jax.process_index() else found["paths"][0]
        try:
            few.restore(path)
        except CheckpointError as error:
            found["restores_apart"].append(str(error))
    try:
        manager.restore(1 if jax.process_index() else None)
    except CheckpointError as error:
        found["restores_apart"].append(str(error))
    few.restore(found["paths"][0]).assert_consumed()
    found["numbers"] = [few.n, few.save_counter]
    few.read(faulty + "/best").assert_consumed()
    found["numbers"].append(few.n)
    checkpoint.x = checkpoint.x * np.nan
    try:
        manager.save(3)
    except CheckpointError as error:
        found["nan"] = str(error)
    checkpoint.x = jax.numpy.ones_like(checkpoint.x)
    try:
        manager.save(20 + jax.process_index())
    except CheckpointError as error:
        found["apart"] = str(error)
    manager.save(3)
    manager.close()
    found["steps"] = [found["steps"], manager.steps, manager.verify(3)]
    report(found)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    saved = {}
    for seed in (3, 4):
        state = make_state(tpudist.MirroredStrategy(), seed)
        saved[seed] = digest(state)
        with CheckpointManager(state, folder / "from_one") as manager:
            manager.save()
    (folder / "from_one" / "4" / "state" / "_METADATA").write_text("damaged")
    names = [str(folder / name) for name in ("from_one", "to_one", "faulty")]
    return folder, saved, [x.result for x in run_processes(PROGRAM, args=names)]


@pytest.mark.exhaustive
def test_two_processes_restore_a_checkpoint_of_one(finished):
    folder, saved, results = finished
    for result in results:
        assert result["path"] == str(folder / "from_one" / "3")
        assert result["restored"] == saved[3]


@pytest.mark.exhaustive
def test_all_processes_report_a_damaged_file(finished):
    _, _, results = finished
    for result in results:
        (warned,) = result["warned"]
        assert "state/_METADATA: has 7 bytes" in warned
        assert "Using the checkpoint of step 3 instead" in warned


@pytest.mark.parametrize("make", [tpudist.OneDeviceStrategy, tpudist.MirroredStrategy])
def test_one_process_restores_a_checkpoint_of_two(finished, make):
    folder, _, results = finished
    state = make_state(make(), 1)
    manager = CheckpointManager(state, folder / "to_one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.restore_or_initialize()
    assert manager.steps == [8, 9]
    assert digest(state) == results[0]["saved"] == results[1]["saved"]
    assert results[0]["problems"] == results[1]["problems"] == []


def test_a_process_that_cannot_write_fails_the_save_of_all_at_once(finished):
    """Else the others would wait for it, and each process think of another newest step."""
    _, _, results = finished
    here, there = results
    assert "could not be saved" in here["error"]
    assert "process 1: " in here["error"]
    assert "The last checkpoint is of step 1." in here["error"]
    assert "could not be saved" in there["error"]
    for result in results:
        assert result["waited_s"] < 30
        assert result["nan"].startswith("Step 3 was not saved: 1 array contains NaN")
        assert "different steps" in result["apart"]
        assert "(process 0: step 20; process 1: step 21)" in result["apart"]
        assert result["steps"] == [[1], [1, 3], []]


def test_files_of_a_failed_save_are_deleted(finished):
    folder, _, _ = finished
    names = ["1", "3", "best", "checkpoint", "ckpt-1", "ckpt-2"]
    assert sorted(x.name for x in (folder / "faulty").iterdir()) == names


def test_processes_save_and_restore_checkpoints_at_paths(finished):
    folder, _, results = finished
    ckpt = f"{folder}/faulty/ckpt"
    for result in results:
        assert "could not be written" in result["write_error"]
        assert "Processes tried to write different paths" in result["paths_apart"]
        assert len(result["restores_apart"]) == 3
        assert (
            f"different paths (process 0: {ckpt}-1; process 1: None)" in result["restores_apart"][0]
        )
        assert "tried to restore different paths (process 0: " in result["restores_apart"][1]
        assert "(process 0: the newest; process 1: step 1)" in result["restores_apart"][2]
        assert result["paths"] == [f"{ckpt}-1", f"{folder}/faulty/best", f"{ckpt}-2"]
        assert result["numbers"] == [1, 1, 2]
