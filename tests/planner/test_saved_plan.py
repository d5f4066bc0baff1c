"""A compiled step is saved after planning and run in another process without a compiler."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from kept_programs import jax_keeps_programs
from places import PROGRAMS
from tpudist.planner import Plan, saved_plan
from tpudist.xla import compile_log, topology

PROGRAM = PROGRAMS / "plan_program.py"


def strategy():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 2})


def double(x):
    return x * 2 + jnp.arange(8)


X = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    strategy().plan(double, (X,), in_process=True, cache=False).save(folder / "plan")
    return folder / "plan"


@pytest.fixture
def saved(saved_once, tmp_path):
    """Returns a copy of a saved plan, which the test may damage."""
    folder = tmp_path / "plan"
    folder.mkdir(mode=0o700)
    for file in saved_once.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
        (folder / file.name).chmod(0o600)
    return folder


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("axes", ["fsdp", pytest.param("", marks=pytest.mark.exhaustive)])
def test_another_process_runs_a_saved_step_without_compiling(tmp_path, axes):
    def run(action):
        command = [sys.executable, str(PROGRAM), action, axes, str(tmp_path / "plan")]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        return json.loads(ended.stdout.splitlines()[-1])

    compiled, loaded = run("save"), run("load")
    assert compiled["logged"] == ["first call"]
    assert (loaded["compiles"], loaded["logged"]) == (0, [])
    for what in ("losses", "total", "end"):
        np.testing.assert_array_equal(loaded[what], compiled[what])
    # A different shape is a different program; a different number uses the same program.
    assert len(loaded["later"]) == len(compiled["later"]) == 1


def test_a_saved_plan_is_private_and_loads_completely(tmp_path):
    planned = strategy().plan(double, (X,), in_process=True)
    planned.save(tmp_path / "new" / "plan")
    folder = tmp_path / "new" / "plan"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert strategy().load_plan(folder, double, (X,)) == planned


@pytest.mark.parametrize("in_process", [True, False])
def test_a_cached_plan_is_saved_and_runs_without_compiling(
    tmp_path, monkeypatch, caplog, in_process
):
    """The planner makes the compiler write its buffers to a temporary folder; a run must not."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    ours = strategy()
    first = ours.plan(double, (X,))
    plan = ours.plan(double, (X,), in_process=in_process)
    assert plan.memory == first.memory
    with caplog.at_level(logging.WARNING, "tpudist"):
        plan.save(tmp_path / "plan")
    assert ("double is compiled again" in caplog.text) != in_process
    assert ours.load_plan(tmp_path / "plan", double, (X,)) == plan
    before = compile_log.backend_compiles().num_programs
    np.testing.assert_array_equal(ours.run(double, (X,)), X * 2 + np.arange(8))
    assert compile_log.backend_compiles().num_programs == before
    assert list((tmp_path / "temporary").iterdir()) == []


def _count(state):
    return {name: value + 1 for name, value in state.items()}


@pytest.mark.parametrize(
    "state",
    [
        {"n": 3, "w": 2.5},
        {"n": np.arange(3), "w": np.ones(2)},
        {"n": np.array(2), "w": np.float32(2.5)},
    ],
    ids=["python", "numpy", "numpy_scalars"],
)
def test_state_on_no_device_runs_as_it_was_planned(tmp_path, state):
    strategy().plan(_count, (state,), in_process=True, cache=False).save(tmp_path / "plan")
    ours = strategy()
    ours.load_plan(tmp_path / "plan", _count, (state,))
    new_compiles = NewCompiles()
    after = ours.run(_count, (ours.run(_count, (state,)),))
    assert new_compiles() == []
    for name in state:
        np.testing.assert_array_equal(after[name], np.asarray(state[name]) + 2)


def test_a_step_with_different_arguments_compiles_normally(saved):
    ours = strategy()
    ours.load_plan(saved, double, (X,))
    before = compile_log.compile_log()
    np.testing.assert_array_equal(ours.run(double, (X,)), X * 2 + np.arange(8))
    assert compile_log.compile_log() == before
    np.testing.assert_array_equal(ours.run(double, (X[:1],)), X[:1] * 2 + np.arange(8))
    np.testing.assert_array_equal(ours.run(double, (X,)), X * 2 + np.arange(8))
    # The log keeps only the last 1000 entries and may be full.
    assert compile_log.compile_log()[:-1] == before[-999:]


def _change(**changes):
    def damage(folder):
        header = json.loads((folder / "program.json").read_text())
        (folder / "program.json").write_text(json.dumps(header | changes))

    return damage


def _versions(**others):
    def damage(folder):
        header = json.loads((folder / "program.json").read_text())
        _change(versions=header["versions"] | others)(folder)

    return damage


def _swap(folder):
    header = json.loads((folder / "program.json").read_text())
    _change(devices=header["devices"][::-1])(folder)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "program.json").unlink(), FileNotFoundError, "holds no saved plan"),
        (lambda f: (f / "program.json").write_text("no"), ValueError, "program.json is damaged"),
        (lambda f: (f / "program.json").write_text("[]"), ValueError, "program.json is damaged"),
        (lambda f: (f / "program.json").write_text('{"format": 1}'), ValueError, "it has no"),
        (_change(format=0), ValueError, "format 0, but this tpudist reads format 1"),
        (lambda f: (f / "program.bin").write_bytes(b"no"), ValueError, "damaged: it has 2 bytes"),
        (_change(kind="TPU v5 lite"), ValueError, "8 x TPU v5 lite, but the strategy has 8 x cpu"),
        (_change(devices=[[0, 0]]), ValueError, "1 x cpu, but the strategy has 8 x cpu"),
        (_change(mesh={"replica": 8}), ValueError, r"the mesh {'replica': 8}, but"),
        (_change(processor="other"), ValueError, "the processor other, but this is"),
        (_versions(jax="0.1"), ValueError, "jax 0.1, but .* is installed.*install jax==0.1"),
        (_versions(tpudist="9"), ValueError, "tpudist 9, but .* is installed"),
        (_swap, ValueError, "devices in a different order or place"),
        (lambda f: f.chmod(0o770), PermissionError, "other users may write to it"),
        (lambda f: (f / "program.bin").chmod(0o622), PermissionError, "users may write to it"),
        (lambda f: (f / "plan.json").chmod(0o622), PermissionError, "other users may write to it"),
    ],
)
def test_a_changed_saved_plan_is_rejected_before_unpickling(
    saved, monkeypatch, damage, error, message
):
    def never(*_):
        raise AssertionError("unpickled")

    monkeypatch.setattr(saved_plan.executables, "from_bytes", never)
    damage(saved)
    with pytest.raises(error, match=message):
        strategy().load_plan(saved, double, (X,))


def test_a_folder_of_another_user_is_rejected(saved, monkeypatch):
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {me}, but this is user {me + 1}"):
        strategy().load_plan(saved, double, (X,))


def test_a_different_program_is_rejected(saved):
    for fn, args in [(lambda x: x * 3, (X,)), (double, (X[:1],)), (double, (X.astype("int32"),))]:
        with pytest.raises(ValueError, match="is program .* Load it with the same function"):
            strategy().load_plan(saved, fn, args)


def test_an_executable_that_cannot_be_loaded_raises_an_error(saved):
    (saved / "program.bin").write_bytes(b"no pickle")
    _change(checksum=hashlib.sha256(b"no pickle").hexdigest())(saved)
    ours = strategy()
    ours.load_plan(saved, double, (X,))
    with pytest.raises(ValueError, match="The saved program cannot be loaded on 8 x cpu"):
        ours.run(double, (X,))


def test_a_step_that_calls_back_into_python_cannot_be_saved(tmp_path):
    def step(x):
        jax.debug.print("{}", x)
        return x

    plan = strategy().plan(step, (X,), in_process=True)
    with pytest.raises(ValueError, match="cannot be saved: .*callback into Python"):
        plan.save(tmp_path / "plan")


def test_a_plan_from_json_cannot_be_saved(tmp_path):
    plan = Plan.from_json(strategy().plan(double, (X,)).to_json())
    with pytest.raises(ValueError, match="was read from JSON, .*holds no program"):
        plan.save(tmp_path / "plan")


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_program_for_a_slice_is_saved_and_loads_only_on_such_a_slice(tmp_path):
    ours = strategy()
    plan = ours.plan(double, (X,), topology="v5e:2x2", in_process=True)
    plan.save(tmp_path / "plan")
    assert (tmp_path / "plan" / "program.bin").stat().st_size > 1000
    with pytest.raises(ValueError, match="4 x TPU v5 lite, but the strategy has 8 x cpu"):
        ours.load_plan(tmp_path / "plan", double, (X,))
    described = ours.on(topology.devices("v5e:2x2"))
    with pytest.raises(ValueError, match="are only descriptions of devices"):
        described.load_plan(tmp_path / "plan", double, (X,))


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_plan_that_does_not_fit_cannot_be_saved(tmp_path):
    x = jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32)
    plan = tpudist.OneDeviceStrategy().plan(lambda x: x @ x @ x, (x,), topology="v5e:1x1")
    with pytest.raises(ValueError, match="does not fit v5e:1x1, so there is no program"):
        plan.save(tmp_path / "plan")


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_program_for_a_slice_is_saved_although_jax_caches_programs(tmp_path):
    """scripts/train.py enables this cache; jax 0.12 cannot load cached programs of a slice."""
    with jax_keeps_programs(tmp_path / "kept"):
        strategy = tpudist.MirroredStrategy()
        x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        for name in ("first", "second"):
            plan = strategy.plan(
                lambda x: x @ x, (x,), topology="v5e:2x4", in_process=True, cache=False
            )
            plan.save(tmp_path / name)
