"""`Checkpoint.save`, `restore`, `write`, `read` and `latest_checkpoint` act as in `tf.train`."""

import json
import os
import shutil
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, latest_checkpoint


def names(folder):
    return sorted(os.listdir(folder))


def test_saves_are_counted_and_the_latest_is_found(tmp_path):
    checkpoint = Checkpoint(w=tpudist.Variable(1.0), n=5)
    assert latest_checkpoint(tmp_path / "run") is None
    prefix = str(tmp_path / "run" / "ckpt")
    assert checkpoint.save(prefix) == f"{prefix}-1"
    checkpoint.w.assign(2.0)
    assert checkpoint.save(tmp_path / "run" / "ckpt") == f"{prefix}-2"
    assert names(tmp_path / "run") == ["checkpoint", "ckpt-1", "ckpt-2"]
    assert latest_checkpoint(tmp_path / "run") == f"{prefix}-2"
    assert (tmp_path / "run" / "checkpoint").read_text().splitlines() == [
        'model_checkpoint_path: "ckpt-2"',
        'all_model_checkpoint_paths: "ckpt-2"',
    ]
    again = Checkpoint(w=tpudist.Variable(0.0), n=0)
    status = again.restore(latest_checkpoint(tmp_path / "run")).assert_consumed()
    assert status.report.step == 2
    assert (float(again.w.numpy()), again.n, again.save_counter) == (2.0, 5, 2)
    assert again.save(prefix) == f"{prefix}-3"
    again.restore(f"{prefix}-1").assert_consumed()
    assert (float(again.w.numpy()), again.save_counter) == (1.0, 1)


def test_a_written_checkpoint_is_replaced_and_is_not_the_latest(tmp_path):
    checkpoint, path = Checkpoint(x=jnp.zeros(2)), str(tmp_path / "best")
    for value in (1.0, 2.0):
        checkpoint.x = jnp.full(2, value)
        assert checkpoint.write(path) == path
    assert names(tmp_path) == ["best"]
    checkpoint.x = jnp.zeros(2)
    checkpoint.read(path).assert_consumed()
    assert checkpoint.x.tolist() == [2, 2]
    assert checkpoint.save_counter == 0
    assert latest_checkpoint(tmp_path) is None


def test_a_new_program_without_restore_replaces_the_first_checkpoint(tmp_path):
    for value in (1, 2):
        assert Checkpoint(x=value).save(tmp_path / "a") == str(tmp_path / "a-1")
    checkpoint = Checkpoint(x=0)
    checkpoint.restore(tmp_path / "a-1")
    assert checkpoint.x == 2


def test_a_failed_checkpoint_keeps_the_old_one(tmp_path, monkeypatch):
    checkpoint = Checkpoint(x=1)
    path = checkpoint.write(tmp_path / "best")
    checkpoint.x = float("nan")
    checkpoint.y = jnp.full(2, jnp.nan)
    with pytest.raises(CheckpointError, match=r"NaN or infinities: y. .*best was not changed"):
        checkpoint.write(path)
    checkpoint = Checkpoint(x=2)

    def fail(path, shards):
        raise OSError("no space left")

    monkeypatch.setattr("tpudist.checkpoint.manifest.write", fail)
    with pytest.raises(CheckpointError, match="could not be written: .*no space left"):
        checkpoint.write(path)
    assert names(tmp_path) == ["best"]
    checkpoint.read(path)
    assert checkpoint.x == 1


def test_a_program_that_was_killed_between_the_renames_loses_nothing(tmp_path):
    checkpoint = Checkpoint(x=1)
    checkpoint.save(tmp_path / "a")
    os.rename(tmp_path / "a-1", tmp_path / "a-1.new")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "a-1")
    checkpoint.x = 0
    checkpoint.restore(latest_checkpoint(tmp_path)).assert_consumed()
    assert checkpoint.x == 1
    Checkpoint(x=3).write(tmp_path / "a-1")
    assert names(tmp_path) == ["a-1", "checkpoint"]


def test_files_that_are_not_checkpoints_are_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of tpudist"):
        Checkpoint(x=1).write(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"Cannot write .*notes.txt"):
        Checkpoint(x=1).write(tmp_path / "mine" / "notes.txt" / "a")
    assert names(tmp_path / "mine") == ["notes.txt"]


def test_checkpoints_of_a_manager_are_restored_by_their_paths(tmp_path):
    checkpoint = Checkpoint(x=1)
    with CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(5)
        checkpoint.x = 0
        checkpoint.restore(manager.save(10)).assert_consumed()  # which is still being written
        assert checkpoint.x == 0
        assert latest_checkpoint(tmp_path) == manager.latest_checkpoint == str(tmp_path / "10")
        checkpoint.restore(manager.checkpoints[0]).assert_consumed()
    assert (checkpoint.x, checkpoint.save_counter) == (1, 0)
    with pytest.raises(CheckpointError, match=r"directory of checkpoints, .*latest_checkpoint\("):
        checkpoint.restore(tmp_path)


def test_the_latest_checkpoint_may_come_from_a_manager_or_a_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint(x=1)
    with CheckpointManager(checkpoint, "run") as manager:
        manager.save(5)
        assert checkpoint.save("run/ckpt") == latest_checkpoint("run") == "run/ckpt-1"
        manager.save(6)
        manager.wait()
        assert latest_checkpoint("run") == "run/6"
    checkpoint.restore(latest_checkpoint("run")).assert_consumed()


def test_names_that_only_one_side_has_are_reported(tmp_path):
    path = Checkpoint(a=1, b=2).save(tmp_path / "x")
    more, less = Checkpoint(a=0, b=0, c=0), Checkpoint(a=0)
    with pytest.raises(AssertionError, match=r"Not restored, left unchanged \(1\):\n  c int"):
        more.restore(path).assert_consumed()
    assert (more.a, more.b, more.c) == (1, 2, 0)
    with pytest.raises(AssertionError, match="Not all values of the objects"):
        more.restore(path).assert_existing_objects_matched()
    with pytest.raises(AssertionError, match=r"Only in the checkpoint \(1\):\n  b int"):
        less.restore(path).assert_consumed()
    less.restore(path).assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.warns(UserWarning, match=r"b int\nIf you expect this, call expect_partial\(\)"):
        less.restore(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        less.restore(path).expect_partial()
        Checkpoint(a=0, b=0).restore(path)
        less.restore(path, only="a")


def test_restoring_none_restores_nothing(tmp_path):
    status = Checkpoint(x=1).restore(latest_checkpoint(tmp_path))
    assert status.report is None
    status.expect_partial()
    with pytest.raises(AssertionError, match="Nothing was restored, because save_path is None"):
        status.assert_consumed()


def test_a_mismatch_raises(tmp_path):
    path = Checkpoint(x=jnp.zeros(2)).save(tmp_path / "x")
    for objects, message in (
        ({"x": jnp.zeros(3)}, r"x is float32\[3\] in the objects"),
        ({"y": 1}, r"no name in common; the checkpoint has: x float32\[2\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(**objects).restore(path)
    with pytest.raises(
        CheckpointError, match=rf"The checkpoint .*x-9 does not exist. {tmp_path} contains: x-1"
    ):
        Checkpoint(x=1).restore(tmp_path / "x-9")


def test_replica_values_do_not_match_one_value_and_the_error_has_a_remedy(tmp_path):
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])

    def count(variable, rows):
        variable[...] += rows.sum()

    def make():
        value = jnp.zeros((), jnp.float32)
        return strategy.create(lambda: nnx.Variable(value, aggregation="none"))

    [rows] = strategy.experimental_distribute_dataset([np.arange(4, dtype=np.float32)])
    old, new = Checkpoint(total=make()), Checkpoint(total=make())
    strategy.run(count, (old.total, rows))
    path = old.save(tmp_path / "ckpt")
    with pytest.raises(
        CheckpointError, match=r"total float32\[\] is one value .* call the step once"
    ):
        new.restore(path)
    strategy.run(count, (new.total, rows))
    new.restore(path).assert_consumed()
    assert float(strategy.reduce("sum", new.total[...], axis=None)) == 6


def test_a_damaged_checkpoint_is_not_restored(tmp_path):
    path = Checkpoint(x=jnp.arange(3.0)).save(tmp_path / "x")
    checkpoint = Checkpoint(x=jnp.zeros(3))
    metadata = tmp_path / "x-1" / "tpudist" / "metadata"
    metadata.write_text(metadata.read_text().replace('"x"', '"y"'))
    with pytest.raises(CheckpointError, match="is damaged, so nothing was restored"):
        checkpoint.restore(path)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "tpudist/metadata",
            '"leaves"',
            '"leafs"',
            r"metadata .* is damaged \(KeyError: 'leaves'\)",
        ),
        ("tpudist/metadata", '"kind"', '"king"', r"metadata .* is damaged \(KeyError: 'kind'\)"),
        ("tpudist/metadata", "{", "", "metadata .* is damaged .*Restore another checkpoint"),
        ("state/_METADATA", "{", "", "Cannot read the arrays of .* so nothing was restored"),
    ],
)
def test_fatal_damage_raises_without_verification(tmp_path, file, old, new, message):
    path = Checkpoint(x=jnp.arange(3.0), n=1).save(tmp_path / "x")
    description = tmp_path / "x-1" / file
    description.write_text(description.read_text().replace(old, new, 1))
    checkpoint = Checkpoint(x=jnp.zeros(3), n=0)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(path, verify=False)
    assert checkpoint.n == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is damaged"), ("\xff", "is damaged"), ('model_checkpoint_path: "x-7"\n', "'x-7'")],
)
def test_a_damaged_state_file_does_not_hide_the_checkpoints(tmp_path, text, message):
    """TensorFlow's `latest_checkpoint` gives None, and training starts from scratch."""
    checkpoint = Checkpoint(x=1)
    checkpoint.save(tmp_path / "y")
    checkpoint.save(tmp_path / "x")
    checkpoint.write(tmp_path / "best")
    (tmp_path / "checkpoint").write_bytes(text.encode("latin1"))
    with pytest.warns(UserWarning, match=message):
        assert latest_checkpoint(tmp_path) == str(tmp_path / "x-2")
    for name in ("x-2", "y-1", "best"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{message}.* To start from scratch, delete that"):
        latest_checkpoint(tmp_path)
    (tmp_path / "checkpoint").unlink()
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("time", [None, "noon", []])
def test_a_checkpoint_whose_time_is_damaged_is_not_the_latest(tmp_path, time):
    checkpoint = Checkpoint(x=1)
    for _ in range(2):
        path = checkpoint.save(tmp_path / "x")
    (tmp_path / "checkpoint").unlink()
    metadata = Path(path) / "tpudist" / "metadata"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"time": time}))
    assert latest_checkpoint(tmp_path) == str(tmp_path / "x-1")


def test_names_of_methods_are_reserved():
    with pytest.raises(ValueError, match="'save' is reserved"):
        Checkpoint(save=1)
