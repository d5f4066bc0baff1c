"""The times of saves, retention, and runs whose disk is full."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tpudist
from places import PYTHONPATH
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, steps_on_disk
from tpudist.checkpoint.one_save import Barrier
from tpudist.checkpoint.retention import Retention


def _checkpoint(value: float = 0.0, **more) -> Checkpoint:
    return Checkpoint(x=jnp.full(4, value), **more)


# Which are kept.


@pytest.mark.parametrize(
    ("rules", "newest", "kept"),
    [
        ({"max_to_keep": 2}, 60, [50, 60]),
        ({"max_to_keep": None}, 60, [10, 20, 30, 40, 50, 60]),
        ({"max_to_keep": 1, "keep_period": 30}, 60, [30, 60]),
        ({"max_to_keep": 1, "keep_every_s": 200.0}, 60, [10, 30, 50, 60]),
        ({"max_to_keep": 1, "best": ("loss", "min")}, 60, [20, 60]),
        ({"max_to_keep": 1, "best": ("loss", "max")}, 60, [50, 60]),
        ({"max_to_keep": 1, "best": ("other", "min")}, 60, [60]),
        # A run that went back to an older step saves a lower number than there is.
        ({"max_to_keep": 1}, 10, [10, 60]),
    ],
)
def test_each_retention_rule_keeps_its_checkpoints(rules, newest, kept):
    steps = [10, 20, 30, 40, 50, 60]
    losses = [float("nan"), 1.0, 1.5, 3.0, 4.0, 2.0]
    metrics = {step: {"loss": x} for step, x in zip(steps, losses, strict=True)}
    times = {step: 100.0 * i for i, step in enumerate(steps)}
    removed = Retention(**rules).steps_to_remove(steps, times, metrics, newest=newest)
    assert [step for step in steps if step not in removed] == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep=0"),
        ({"keep_period": 1.5}, "keep_period=1.5"),
        ({"keep_checkpoint_every_n_hours": -1}, "keep_checkpoint_every_n_hours=-1"),
        ({"best": "loss"}, "best='loss'.: best must be the name of a metric"),
        ({"best": ("loss", "least")}, "best must be the name of a metric and 'min' or 'max'"),
        ({"checkpoint_interval": 0}, "checkpoint_interval=0"),
        ({"checkpoint_interval": 2}, "needs a step counter"),
    ],
)
def test_invalid_retention_rules_raise(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(_checkpoint(), tmp_path, **arguments)


def test_ignored_arguments_warn(tmp_path):
    with pytest.warns(UserWarning, match="checkpoint_name='ckpt'.* has no effect"):
        manager = CheckpointManager(_checkpoint(), tmp_path, checkpoint_name="ckpt")
    with pytest.warns(UserWarning, match="options=1.* has no effect"):
        manager.save(1, options=1)
    manager.close()


def test_the_newest_and_the_best_checkpoints_are_kept_and_found(tmp_path):
    losses = [3.0, 1.0, 2.0, 5.0, 4.0]
    with CheckpointManager(
        _checkpoint(), tmp_path, max_to_keep=2, best=("held_out_loss", "min")
    ) as manager:
        assert (manager.latest_checkpoint, manager.best_checkpoint) == (None, None)
        for step, loss in enumerate(losses):
            path = manager.save(step, metrics={"held_out_loss": np.float32(loss), "n": 1})
            assert path == str(tmp_path / str(step))
        manager.wait()
        assert manager.steps == [1, 3, 4]
        with pytest.raises(
            ValueError, match="needs the metric 'held_out_loss', but metrics has 'loss'"
        ):
            manager.save(9, metrics={"loss": 1})
    again = CheckpointManager(_checkpoint(), tmp_path, best=("held_out_loss", "min"))
    assert again.checkpoints == [str(tmp_path / str(step)) for step in (1, 3, 4)]
    assert again.latest_checkpoint == str(tmp_path / "4")
    assert again.best_step == 1
    assert again.best_checkpoint == str(tmp_path / "1")


def test_checkpoints_are_numbered_by_the_step_or_one_after_another(tmp_path):
    with CheckpointManager(_checkpoint(), tmp_path / "a") as manager:
        assert [manager.save(), manager.save()] == [str(tmp_path / "a" / n) for n in "12"]
    for step in (7, np.int64(7), jnp.int32(7), tpudist.Variable(7)):
        folder = tmp_path / type(step).__name__
        with CheckpointManager(_checkpoint(step=step), folder) as manager:
            assert manager.save() == str(folder / "7")
    with pytest.raises(ValueError, match="checkpoint_number=1.5"):
        CheckpointManager(_checkpoint(), tmp_path).save(1.5)


def test_the_checkpoint_interval_applies_unless_forced(tmp_path):
    counter = tpudist.Variable(0)
    state = tpudist.TrainState(None)
    for name, arguments in (("a", {"step_counter": counter}), ("b", {})):
        manager = CheckpointManager(state, tmp_path / name, checkpoint_interval=3, **arguments)
        saved = []
        for step in range(8):
            counter.assign(step)
            state.step = step
            saved.append(manager.save(step, force=step == 4) is not None)
        assert [i for i, x in enumerate(saved) if x] == [0, 3, 4, 7]
        manager.close()


# Saves in the background.


@pytest.mark.slow
def test_a_state_may_be_overwritten_as_soon_as_save_returns(tmp_path):
    strategy = tpudist.MirroredStrategy()
    split = NamedSharding(strategy.mesh, PartitionSpec("replica"))
    arrays = {
        "split": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), split),
        "mirrored": strategy.replicate(jnp.arange(1 << 18, dtype=jnp.float32)),
        "alone": jnp.arange(1 << 18, dtype=jnp.float32),
    }
    expected = {name: np.array(x) for name, x in arrays.items()}
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoint = Checkpoint(arrays=arrays)
    manager = CheckpointManager(checkpoint, tmp_path)
    for step in range(3):
        manager.save(step)
        checkpoint.arrays = {name: overwrite(x) for name, x in checkpoint.arrays.items()}
        jax.block_until_ready(checkpoint.arrays)
        manager.restore(step)
        for name, x in checkpoint.arrays.items():
            np.testing.assert_array_equal(x, expected[name])


def test_numpy_arrays_may_be_changed_as_soon_as_save_returns(tmp_path):
    checkpoint = Checkpoint(x=np.arange(1 << 20))
    manager = CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    checkpoint.x[:] = -1
    manager.restore()
    np.testing.assert_array_equal(checkpoint.x, np.arange(1 << 20))


def test_a_synchronous_save_is_complete_when_it_returns(tmp_path):
    manager = CheckpointManager(_checkpoint(), tmp_path, asynchronous=False)
    manager.save(3)
    assert manager.verify(3) == []
    assert manager.latest_step == 3


@pytest.mark.slow
def test_a_save_waits_for_earlier_saves_also_of_another_manager(tmp_path):
    big = Checkpoint(x=jnp.arange(1 << 22))
    first, second = (CheckpointManager(big, tmp_path) for _ in range(2))
    for step in range(0, 6, 2):
        first.save(step)
        second.save(step + 1)
    first.close()
    second.close()
    assert first.steps == [1, 2, 3, 4, 5]
    assert all(first.verify(step) == [] for step in first.steps)


def test_a_closed_manager_raises(tmp_path):
    manager = CheckpointManager(_checkpoint(), tmp_path)
    manager.save(1)
    manager.close()
    assert manager.steps == [1]
    with pytest.raises(CheckpointError, match="is closed. Create another"):
        manager.save(2)


def test_a_new_directory_initializes(tmp_path):
    called = []
    manager = CheckpointManager(_checkpoint(), tmp_path / "new", init_fn=lambda: called.append(1))
    assert manager.restore_or_initialize() is None
    assert called == [1]
    assert not (tmp_path / "new").exists()
    manager.save(1)
    assert manager.restore_or_initialize() == str(tmp_path / "new" / "1")
    assert called == [1]


# Errors before anything is lost.


def test_a_step_is_not_replaced(tmp_path):
    checkpoint = _checkpoint(1.0)
    manager = CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    checkpoint.x = jnp.zeros(4)
    for force in (False, True):
        with pytest.raises(CheckpointError, match="/1 already exists"):
            manager.save(1, force=force)
    manager.restore()
    assert checkpoint.x.tolist() == [1] * 4


def test_a_missing_step_raises_and_existing_steps_are_listed(tmp_path):
    manager = CheckpointManager(_checkpoint(), tmp_path)
    with pytest.raises(CheckpointError, match="contains no checkpoint to restore"):
        manager.restore()
    manager.save(1)
    manager.save(5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3. It contains steps 1, 5\."):
        manager.restore(3)


def test_a_directory_that_is_a_file_raises(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CheckpointError, match="this is a file"):
        CheckpointManager(_checkpoint(), tmp_path / "file")
    manager = CheckpointManager(_checkpoint(), tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="cannot write to the directory"):
        manager.save(1)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_read_only_directory_raises():
    manager = CheckpointManager(_checkpoint(), "/proc/self/checkpoints")  # root may not either
    assert manager.restore_or_initialize() is None
    with pytest.raises(CheckpointError, match="cannot write to the directory"):
        manager.save(1)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_state_with_nan_is_not_saved_unless_asked(tmp_path, bad):
    strategy = tpudist.MirroredStrategy()
    split = NamedSharding(strategy.mesh, PartitionSpec("replica"))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    checkpoint = Checkpoint(
        model=model,
        split=jax.device_put(jnp.zeros(8), split),
        tree=[jnp.zeros(3, jnp.bfloat16), np.zeros(2), jnp.zeros(2, jnp.complex64)],
        whole=jnp.zeros(3, jnp.int32),
        empty=jnp.zeros((0,)),
    )
    manager = CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    model.bias[...] = model.bias[...].at[1].set(bad)
    checkpoint.split = checkpoint.split.at[7].set(bad)
    checkpoint.tree = [x.at[1].set(bad) if isinstance(x, jax.Array) else x for x in checkpoint.tree]
    checkpoint.tree[1][0] = bad
    with pytest.raises(
        CheckpointError,
        match=r"Step 2 was not saved: 5 arrays contain NaN or infinities: model.bias, split, "
        r"tree.0, tree.1, tree.2. The newest checkpoint has step 1",
    ):
        manager.save(2)
    assert manager.steps == [1]
    manager.save(2, allow_nan=True)
    manager.wait()
    assert manager.steps == [1, 2]


# Faults.


def _run(program: str, *args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


FULL_DISK = """
    import resource, signal, sys, time, warnings
    import jax, numpy as np, tpudist
    from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager

    folder, limit = sys.argv[1], int(sys.argv[2])
    checkpoint = Checkpoint(x=np.random.default_rng(0).random(100), step=1)
    manager = CheckpointManager(checkpoint, folder)
    manager.save()
    manager.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpoint.x, checkpoint.step = np.random.default_rng(0).random(4_000_000), 2  # 32 MB
    print("saving", manager.save())
    strategy = tpudist.OneDeviceStrategy()
    batches = iter(strategy.experimental_distribute_dataset(
        tpudist.NumpyDataset(np.arange(100000)).batch(1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in batches:
            time.sleep(0.01)
            if caught:
                break
    print("told", caught[0].filename, str(caught[0].message).splitlines()[0])
    for call in (manager.check, manager.wait):
        try:
            call()
            print("nothing")
        except CheckpointError as error:
            print("error", " ".join(str(error).split()))
    print("steps", manager.steps, manager.verify(1))
    checkpoint.x, checkpoint.step = np.zeros(100), 3
    print("saving", manager.save())
    manager.close()
    print("steps", manager.steps, manager.verify(3))
"""


def _check_full_disk(folder: Path, limit: int) -> None:
    finished = _run(FULL_DISK, folder, limit)
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [x for x in finished.stdout.splitlines() if not x.startswith("[")]
    assert lines[0] == f"saving {folder / '2'}"
    assert lines[1].startswith(
        f"told <string> The checkpoint of step 2 could not be saved to {folder}:"
    )
    assert lines[2].startswith("error The checkpoint of step 2 could not be saved")
    assert "The last checkpoint is of step 1." in lines[2]
    assert lines[3:] == [
        "nothing",
        "steps [1] []",
        f"saving {folder / '3'}",
        "steps [1, 3] []",
    ]
    assert sorted(x.name for x in folder.iterdir() if x.name != "lost+found") == ["1", "3"]


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint_and_warns_at_the_next_step(tmp_path):
    _check_full_disk(tmp_path / "run", 1_000_000)


@pytest.mark.slow
def test_a_full_file_system_keeps_the_last_checkpoint_too(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        _check_full_disk(tmp_path / "run", 0)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


SAVES_FOR_EVER = """
    import itertools, sys
    import numpy as np, tpudist
    from tpudist.checkpoint import Checkpoint, CheckpointManager

    checkpoint = Checkpoint(x=np.zeros(1_000_000), step=0)
    manager = CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
    manager.restore_or_initialize()
    print("restored", checkpoint.step, float(checkpoint.x.mean()), len(checkpoint.x), flush=True)
    for checkpoint.step in itertools.count(checkpoint.step + 1):
        checkpoint.x = np.full(1_000_000, float(checkpoint.step))
        manager.save()
        print("saving", checkpoint.step, flush=True)
"""


@pytest.mark.slow
def test_a_partial_checkpoint_of_a_killed_program_is_never_restored(tmp_path):
    """Each run is killed while it writes; the next one has the newest that was complete."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    for attempt in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVES_FOR_EVER), str(tmp_path / "run")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.readline().split()
            for _ in range(3):
                last = int(process.stdout.readline().split()[1])
            time.sleep(0.006 * attempt)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        process.wait()
        last = int(rest[-1]) if rest else last
        step, mean = int(first[1]), float(first[2])
        assert step == mean
        assert (step == 0) == (attempt == 0)
        committed = CheckpointManager(_checkpoint(), tmp_path / "run").steps
        assert last - 2 <= max(committed) <= last + 1
    state = Checkpoint(x=np.zeros(1_000_000), step=0)
    with CheckpointManager(state, tmp_path / "run", max_to_keep=1) as manager:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.restore_or_initialize()
        assert state.x.mean() == state.step == max(committed)
        manager.save(10**6)
    assert [x.name for x in (tmp_path / "run").iterdir()] == [str(10**6)]


def test_other_files_in_the_directory_are_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "mine.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "8").write_text("a file")
    manager = CheckpointManager(_checkpoint(), tmp_path, max_to_keep=1)
    assert manager.restore_or_initialize() is None
    manager.save(1)
    manager.save(2)
    manager.close()
    names = sorted(x.name for x in tmp_path.iterdir())
    assert names == ["007", "2", "8", "mine.orbax-checkpoint-tmp", "notes.txt"]


def test_an_old_checkpoint_that_cannot_be_deleted_causes_a_warning(tmp_path):
    """A link to a directory is not deleted: it is usually the checkpoint of another run."""
    manager = CheckpointManager(_checkpoint(), tmp_path / "run", max_to_keep=1)
    manager.save(1)
    manager.wait()
    (tmp_path / "run" / "1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")
    manager.save(2)
    with pytest.warns(UserWarning, match="old checkpoint .*1: .* Delete it manually"):
        manager.wait()
    assert manager.steps == [1, 2]
    assert manager.verify(2) == []


def test_a_checkpoint_is_not_deleted_while_its_metrics_cannot_be_read(tmp_path, monkeypatch):
    """The best checkpoint may be among those that an object store did not return."""
    rules = {"max_to_keep": 1, "best": ("loss", "min")}
    with CheckpointManager(_checkpoint(), tmp_path, **rules) as manager:
        manager.save(1, metrics={"loss": 1.0})
    manager = CheckpointManager(_checkpoint(), tmp_path, **rules)
    monkeypatch.setattr(steps_on_disk, "read_contents", _raise(OSError("try again")))
    manager.save(2, metrics={"loss": 2.0})
    with pytest.warns(UserWarning, match="of step 1 in .*: try again. They are kept until"):
        manager.wait()
    with pytest.raises(OSError, match="try again"):
        _ = manager.best_step
    monkeypatch.undo()
    manager.save(3, metrics={"loss": 3.0})
    manager.wait()
    assert (manager.steps, manager.best_step) == ([1, 3], 1)


def test_a_checkpoint_that_cannot_be_read_does_not_stop_the_deletion_of_others(tmp_path):
    """Without it, an error that lasts would fill the disk. It causes one warning."""
    rules = {"max_to_keep": 1, "best": ("loss", "min")}
    with CheckpointManager(_checkpoint(), tmp_path, **rules) as manager:
        manager.save(1, metrics={"loss": 1.0})
    contents = tmp_path / "1" / "tpudist" / "metadata"
    contents.unlink()
    contents.symlink_to(contents)  # reading it raises an OSError: too many levels of links
    manager = CheckpointManager(_checkpoint(), tmp_path, **rules)
    manager.save(2, metrics={"loss": 2.0})
    with pytest.warns(UserWarning, match="of step 1 in .* If the error remains, delete them"):
        manager.wait()
    for step in (3, 4):
        manager.save(step, metrics={"loss": float(step)})
        manager.wait()  # without a warning
    assert manager.steps == [1, 2, 4]  # 2 is the best of the others


def test_a_directory_that_cannot_be_listed_causes_a_warning(tmp_path, monkeypatch):
    manager = CheckpointManager(_checkpoint(), tmp_path, max_to_keep=1)
    manager.save(1)
    manager.wait()
    monkeypatch.setattr(steps_on_disk.StepsOnDisk, "facts", _raise(OSError("stale handle")))
    manager.save(2)
    with pytest.warns(UserWarning, match="so no old checkpoint was deleted: stale handle"):
        manager.wait()


def test_a_process_that_does_not_answer_hides_no_error(monkeypatch):
    barrier = Barrier("barrier")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(barrier, "_channel", SimpleNamespace(combine=_raise(RuntimeError("late"))))
    barrier.finish_round(OSError("full"))
    with pytest.raises(RuntimeError, match="late"):
        barrier.meet("", 1.0)


def _raise(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.slow
def test_the_error_of_a_save_does_not_hide_the_error_of_the_block(tmp_path):
    program = """
        import resource, signal, sys
        import numpy as np
        from tpudist.checkpoint import Checkpoint, CheckpointManager

        checkpoint = Checkpoint(x=np.random.default_rng(0).random(10**6))
        with CheckpointManager(checkpoint, sys.argv[1]) as manager:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
            manager.save(1)
            raise ZeroDivisionError
    """
    finished = _run(program, tmp_path)
    assert finished.returncode == 1
    assert "\nZeroDivisionError\n" in finished.stderr
    assert "UserWarning: The checkpoint of step 1 could not be saved" in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_program_that_does_not_wait_keeps_its_last_checkpoint(tmp_path):
    program = """
        import sys
        import numpy as np
        from tpudist.checkpoint import Checkpoint, CheckpointManager

        checkpoint = Checkpoint(x=np.random.default_rng(0).random(10**6))
        manager = CheckpointManager(checkpoint, sys.argv[1])
        manager.save(1)
    """
    assert _run(program, tmp_path).returncode == 0
    assert CheckpointManager(_checkpoint(), tmp_path).verify(1) == []


# What users do.


@pytest.mark.parametrize("metrics", [0.3, {"loss": "low"}, {"loss": jnp.ones(3)}])
def test_metrics_are_numbers_by_name(tmp_path, metrics):
    with pytest.raises(TypeError, match="must be a dict of numbers"):
        CheckpointManager(_checkpoint(), tmp_path).save(1, metrics=metrics)


def test_a_directory_is_a_path():
    with pytest.raises(ValueError, match="an empty path would mean the current"):
        CheckpointManager(_checkpoint(), "")
    with pytest.raises(TypeError, match="directory=None.: directory must be a path"):
        CheckpointManager(_checkpoint(), None)


def test_threads_save_one_after_another(tmp_path):
    with CheckpointManager(_checkpoint(), tmp_path, max_to_keep=None) as manager:
        threads = [threading.Thread(target=manager.save, args=(step,)) for step in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert manager.steps == [0, 1, 2, 3]
    assert not any(map(manager.verify, manager.steps))


def test_an_interrupted_save_does_not_disturb_the_next_one(tmp_path, monkeypatch):
    manager = CheckpointManager(_checkpoint(), tmp_path)
    manager.save(1)
    manager.wait()

    def interrupted(self, path, *args):
        path.with_name(f"{path.name}.orbax-checkpoint-tmp").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tpudist.checkpoint.arrays.Writer.begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2)
    assert manager.steps == [1]
    manager.save(2)
    manager.close()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.slow
def test_another_program_may_delete_a_checkpoint_that_is_being_read(tmp_path):
    """A training program does this while another one evaluates, which then uses a newer one."""
    checkpoint = Checkpoint(step=0, x=np.zeros(1000))
    stop = threading.Event()

    def train():
        state = Checkpoint(step=0, x=np.zeros(1000))
        with CheckpointManager(state, tmp_path / "run", max_to_keep=1) as manager:
            while not stop.is_set():
                state.step += 1
                state.x = np.full(1000, float(state.step))
                manager.save()

    # Under another name of the directory: as for another program, nobody waits for the writer.
    (tmp_path / "run").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "run")
    thread = threading.Thread(target=train)
    thread.start()
    manager = CheckpointManager(checkpoint, tmp_path / "same")
    seen, deadline = set(), time.monotonic() + 60
    try:
        while len(seen) < 10 and time.monotonic() < deadline:
            manager.restore_or_initialize()
            assert checkpoint.x.mean() == checkpoint.step
            seen.add(checkpoint.step)
    finally:
        stop.set()
        thread.join()
    assert len(seen) == 10
