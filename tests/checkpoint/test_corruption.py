"""Damage to any file of a checkpoint is detected: no fault is silent.

Orbax alone restores an array with a flipped bit as if nothing had happened.
"""

import random
import shutil
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx

from checkpoint_program import Counter
from places import PACKAGE
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from tpudist.checkpoint.directory import Directory

FLIPS_PER_FILE = 24
RESTORED_FULLY = 40  # number of faults after which the values are restored, too; that takes longer


def _state(value: float) -> Checkpoint:
    return Checkpoint(
        big=jnp.full((512, 256), value) + jnp.arange(256) / 256,
        layer=nnx.Linear(4, 4, rngs=nnx.Rngs(int(value))),
        half=jnp.full(7, value, jnp.bfloat16),
        key=jax.random.key(int(value)),
        batches=Counter(int(value)),
        step=int(value),
    )


def _values(state: Checkpoint) -> list:
    arrays = [state.big, state.layer.kernel[...], state.half, jax.random.key_data(state.key)]
    return [*(np.asarray(x).tobytes() for x in arrays), state.batches.position, state.step]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two good checkpoints."""
    path = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        with CheckpointManager(_state(step), path) as manager:
            manager.save()
    return path


def _files(folder: Path, step: int = 2) -> list[Path]:
    return sorted(x for x in (folder / str(step)).rglob("*") if x.is_file())


def _faults(content: bytes, rng: random.Random):
    """Names of faults, and what the file holds then; None if it is gone."""
    yield "deleted", None
    yield "emptied", b""
    yield "truncated", content[: rng.randrange(1, len(content))]
    yield "longer", content + b"\0"
    for _ in range(FLIPS_PER_FILE):
        position, bit = rng.randrange(len(content)), rng.randrange(8)
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        yield f"bit {bit} of byte {position} flipped", bytes(flipped)


def _inject(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def _restored(folder: Path) -> tuple[list, list[str]]:
    """The values that a new run gets, and what it is warned of."""
    state = _state(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CheckpointManager(state, folder).restore_or_initialize()
    return _values(state), [str(x.message) for x in caught]


@pytest.mark.slow
def test_no_fault_in_any_file_is_silent(folder):
    """Either the values of the step before are restored, with a warning, or the right ones."""
    rng = random.Random(0)
    good, before = _values(_state(2)), _values(_state(1))
    manager = CheckpointManager(_state(0), folder)
    assert manager.verify(2) == []
    faults = [
        (file, file.read_bytes(), what, content)
        for file in _files(folder)
        for what, content in _faults(file.read_bytes(), rng)
    ]
    assert len(faults) >= 300
    followed = set(rng.sample(range(len(faults)), RESTORED_FULLY))
    silent, harmless = [], 0
    for number, (file, original, what, content) in enumerate(faults):
        name = file.relative_to(folder / "2").as_posix()
        _inject(file, content)
        try:
            problems = manager.verify(2)
            if problems and number not in followed:
                if not any(problem.startswith(f"{name}: ") for problem in problems):
                    silent.append(f"{name} {what}, but reported: {problems}")
                continue
            values, warned = _restored(folder)
            told = any("Using the checkpoint of step 1" in x and name in x for x in warned)
            harmless += not problems
            if not (values == before and told if problems else values == good):
                silent.append(f"{name} {what}: {problems}, warned of {warned}")
        finally:
            file.write_bytes(original)
    assert silent == []
    assert manager.verify(2) == []
    # Only the time of the commit and the path in Orbax's marker do not affect a restore.
    assert harmless < len(faults) / 10


@pytest.mark.parametrize("gone", ["state", "tpudist", "state/d", "tpudist_manifest.json"])
def test_a_step_without_one_of_its_parts_is_not_restored(folder, tmp_path, gone):
    shutil.copytree(folder, tmp_path / "copy")
    lost = tmp_path / "copy" / "2" / gone
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    values, warned = _restored(tmp_path / "copy")
    assert values == _values(_state(1))
    assert any("2 is damaged" in x and "is missing" in x for x in warned)


def test_swapped_files_are_detected(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    for file in ("tpudist/metadata", "tpudist_manifest.json"):
        shutil.copy(tmp_path / "copy" / "1" / file, tmp_path / "copy" / "2" / file)
        assert CheckpointManager(_state(0), tmp_path / "copy").verify(2), file


def test_damaged_checkpoints_raise_and_never_start_from_scratch(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    for step in (1, 2):
        (tmp_path / "copy" / str(step) / "tpudist" / "metadata").write_text("{}")
    state = _state(9)
    called = []
    manager = CheckpointManager(state, tmp_path / "copy", init_fn=lambda: called.append(1))
    with pytest.raises(CheckpointError, match=r"Every requested checkpoint is damaged") as error:
        manager.restore_or_initialize()
    assert str(error.value).count("tpudist/metadata: has 2 bytes") == 2
    assert called == []
    assert _values(state) == _values(_state(9))


def test_requesting_a_damaged_step_raises(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "2" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="state/_METADATA: is missing"):
        CheckpointManager(_state(9), tmp_path / "copy").restore(2)


def test_a_damaged_step_can_be_saved_again(folder, tmp_path):
    """Else a run that recomputes it could never save it, or would lose a good one to it."""
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "2" / "state" / "_METADATA").unlink()
    state = _state(9)
    with CheckpointManager(state, tmp_path / "copy", max_to_keep=1) as manager:
        with pytest.warns(UserWarning, match="is damaged"):
            manager.restore_or_initialize()
        assert manager.latest_step == 1
        state.step = 2
        manager.save()
        manager.wait()
        assert manager.steps == [2]
        assert manager.verify(2) == []
    assert {x.name for x in (tmp_path / "copy").iterdir()} == {"2", "2.damaged"}


def test_a_damaged_step_that_cannot_be_renamed_stays_damaged(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "2" / "state" / "_METADATA").unlink()
    state = _state(9)
    with CheckpointManager(state, tmp_path / "copy") as manager:
        with pytest.warns(UserWarning, match="is damaged"):
            manager.restore_or_initialize()
        state.step = 2
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "set_aside", Mock(side_effect=OSError("busy")))
            with pytest.raises(CheckpointError, match="Cannot save step 2 .*: busy"):
                manager.save()
        assert manager.latest_step == 1
        manager.save()
        manager.wait()
        assert manager.verify(2) == []


def test_a_plain_orbax_checkpoint_needs_verify_false(tmp_path):
    tree = {"big": jnp.arange(4.0), "layer": {"kernel": jnp.ones((2, 2))}}
    with ocp.CheckpointManager(tmp_path) as orbax:
        orbax.save(3, args=ocp.args.StandardSave(tree))
    state = Checkpoint(big=jnp.zeros(4), layer=nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
    manager = CheckpointManager(state, tmp_path)
    with pytest.raises(CheckpointError, match="was not written by tpudist, or has lost"):
        manager.restore_or_initialize()
    report = manager.restore(verify=False)
    assert report.restored == ("big", "layer.kernel")
    assert state.big.tolist() == [0, 1, 2, 3]
    assert state.layer.kernel[...].tolist() == [[1, 1], [1, 1]]


def test_no_pickle_is_loaded(folder, tmp_path, monkeypatch):
    """With pickle, anybody who can write to the directory could run code."""
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    monkeypatch.setattr(np, "load", None)
    values, warned = _restored(folder)
    assert values == _values(_state(2))
    assert warned == []
    sources = [*PACKAGE.glob("checkpoint/*.py")]
    for word in ("pickle", "allow_pickle", "marshal", "eval(", "exec("):
        assert [x.name for x in sources if word in x.read_text()] == [], word


def test_metadata_of_orbax_may_be_written_late(tmp_path, monkeypatch):
    path = type(epath.Path(tmp_path))
    write_text = path.write_text

    def write_late(self, *args, **kwargs):
        if self.name == "_CHECKPOINT_METADATA":
            time.sleep(0.2)
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(path, "write_text", write_late)
    with CheckpointManager(_state(1), tmp_path) as manager:
        manager.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CheckpointManager(_state(0), tmp_path).restore_or_initialize()
