"""`assert_collectives` limits communication in a test without TPUs and names the source line."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tpudist
from places import ROOT
from tpudist import pytest_plugin
from tpudist.testing import budgets, ledger

WIDTH = 256
ROWS = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


def reduces(x):
    context = tpudist.get_replica_context()
    return context.all_reduce("MEAN", x.sum(axis=0))


def reduces_and_gathers(x):
    context = tpudist.get_replica_context()
    rows = context.all_gather(x, axis=0)
    return context.all_reduce("MEAN", x.sum(axis=0)) + rows.sum(axis=0)


def line_of(function, text: str) -> str:
    """Returns the line of `function` that contains `text`, in the format of error messages."""
    lines, first = inspect.getsourcelines(function)
    (at,) = (number for number, line in enumerate(lines, first) if text in line)
    return f"{os.path.relpath(inspect.getsourcefile(function))}:{at}"


@pytest.fixture(autouse=True)
def on_my_own_machine(monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # in CI, a missing ledger is an error
    monkeypatch.delenv("TPUDIST_UPDATE_LEDGER", raising=False)


@pytest.fixture
def strategy():
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        yield strategy


def failure(*args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        budgets.assert_collectives(*args, **kwargs)
    return str(caught.value)


# Budgets.


def test_a_step_within_its_budget_passes_and_returns_its_plan(strategy):
    plan = budgets.assert_collectives(reduces, (ROWS,), allow={"all-reduce"})
    assert [use.kind for use in plan.collectives] == ["all-reduce"]
    assert plan.collectives[0].num_bytes == 4 * WIDTH


def test_an_added_all_gather_fails_with_its_source_line(strategy):
    message = failure(reduces_and_gathers, (ROWS,), allow={"all-reduce"})
    assert "reduces_and_gathers on 8 x cpu (mesh: replica 8):" in message
    assert "all-gather must not occur: allow is {'all-reduce'}" in message
    (row,) = (line for line in message.splitlines() if line.startswith("  all-gather"))
    assert row.split() == [
        *("all-gather", "64.0", "KiB", "1", "56.0", "KiB", "replica", "ICI"),
        line_of(reduces_and_gathers, "all_gather("),
    ]
    assert "add it to allow" in message


def test_an_empty_set_allows_nothing(strategy):
    assert "all-reduce must not occur" in failure(reduces, (ROWS,), allow=set())


def test_a_single_kind_may_be_a_string(strategy):
    budgets.assert_collectives(reduces, (ROWS,), allow="all-reduce")


def test_a_budget_in_bytes_applies_to_one_device_and_one_step(strategy):
    """Each device in a ring of 8 sends 2 * 7 / 8 of the reduced bytes."""
    sent = 2 * 7 / 8 * 4 * WIDTH
    plan = budgets.assert_collectives(reduces, (ROWS,), max_ici_bytes=sent, max_dcn_bytes=0)
    assert plan.ici_bytes == sent
    message = failure(reduces, (ROWS,), max_ici_bytes=sent - 1)
    assert "A device sends 1,792 bytes (1.75 KiB) per step over ICI" in message
    assert "max_ici_bytes is 1,791" in message
    assert line_of(reduces, "all_reduce(") in message


def test_all_violations_are_reported_together(strategy):
    message = failure(reduces_and_gathers, (ROWS,), allow={"all-reduce"}, max_ici_bytes=10)
    assert "must not occur" in message
    assert "max_ici_bytes is 10" in message


def test_the_strategy_can_be_an_argument(monkeypatch):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    plan = budgets.assert_collectives(reduces, (ROWS,), strategy=strategy, allow={"all-reduce"})
    assert plan.num_devices == 2


def test_an_unknown_kind_is_rejected(strategy):
    with pytest.raises(ValueError, match="'all_reduce', which is not a kind.*all-reduce"):
        budgets.assert_collectives(reduces, (ROWS,), allow={"all_reduce"})


# Ledgers.


def test_a_missing_ledger_is_written_and_reproduced(strategy, tmp_path):
    path = tmp_path / "collectives.json"
    budgets.assert_collectives(reduces, (ROWS,), ledger=path)
    written = path.read_text()
    (step,) = json.loads(written)["steps"].values()
    (found,) = step["collectives"]
    assert found.pop("source").endswith("test_budgets.py::reduces")
    assert found == {
        "kind": "all-reduce",
        "axes": ["replica"],
        "network": "ici",
        "num_bytes": 4 * WIDTH,
        "count": 1,
    }
    budgets.assert_collectives(reduces, (ROWS,), ledger=path)
    assert path.read_text() == written


def test_a_change_fails_with_the_added_and_removed_collectives(strategy, tmp_path):
    path = tmp_path / "collectives.json"
    budgets.assert_collectives(reduces, (ROWS,), ledger=path, name="step")
    written = path.read_text()
    message = failure(reduces_and_gathers, (ROWS,), ledger=path, name="step")
    added, removed = (
        [line.split() for line in message.splitlines() if line.startswith(f"  {sign} ")]
        for sign in "+-"
    )
    assert [row[1:6] for row in added] == [
        ["all-gather", "64.0", "KiB", "1", "replica"],
        ["all-reduce", "1.00", "KiB", "1", "replica"],  # from a different function
    ]
    assert added[0][-1] == line_of(reduces_and_gathers, "all_gather(")
    assert [row[1] for row in removed] == ["all-reduce"]
    assert removed[0][-1].endswith("test_budgets.py::reduces")
    assert "TPUDIST_UPDATE_LEDGER=1" in message
    assert path.read_text() == written


def test_the_environment_variable_updates_a_ledger(strategy, tmp_path, monkeypatch):
    path = tmp_path / "collectives.json"
    budgets.assert_collectives(reduces, (ROWS,), ledger=path, name="step")
    budgets.assert_collectives(reduces, (ROWS,), ledger=path, name="other")
    monkeypatch.setenv("TPUDIST_UPDATE_LEDGER", "1")
    budgets.assert_collectives(reduces_and_gathers, (ROWS,), ledger=path, name="step")
    monkeypatch.delenv("TPUDIST_UPDATE_LEDGER")
    budgets.assert_collectives(reduces_and_gathers, (ROWS,), ledger=path, name="step")
    budgets.assert_collectives(reduces, (ROWS,), ledger=path, name="other")


def test_a_step_over_its_budget_is_not_recorded(strategy, tmp_path):
    path = tmp_path / "collectives.json"
    failure(reduces, (ROWS,), allow=(), ledger=path)
    assert not path.exists()


def test_a_missing_record_fails_in_ci(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "true")
    message = failure(reduces, (ROWS,), ledger=tmp_path / "collectives.json")
    assert 'has no "reduces on 8 x cpu"' in message
    assert "commit the file" in message


def test_a_different_mesh_requires_a_different_name(tmp_path):
    path = tmp_path / "collectives.json"
    strategy = tpudist.MirroredStrategy()

    def does_nothing(x):
        return x

    budgets.assert_collectives(does_nothing, (ROWS,), strategy=strategy, ledger=path)
    other = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    message = failure(does_nothing, (ROWS,), strategy=other, ledger=path)
    assert (
        "was written for the mesh replica 8. To keep one record per mesh, use a different name for "
        "each" in message
    )
    budgets.assert_collectives(does_nothing, (ROWS,), strategy=other, ledger=path, name="with fsdp")


@pytest.mark.parametrize("text", ["no json", '{"format": 0, "steps": {}}', "[]", '{"format": 1}'])
def test_a_file_that_is_not_a_ledger_is_rejected(text, strategy, tmp_path):
    path = tmp_path / "collectives.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a ledger of this version.*Delete the file"):
        budgets.assert_collectives(reduces, (ROWS,), ledger=path)
    assert path.read_text() == text


MODULE = """
import tpudist

class Step:
    def __call__(self, x):
        def inner(x):
            return tpudist.get_replica_context().all_reduce("SUM", x)
        return inner(x)

step = Step()
"""


def imported(path: Path, text: str):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_edit_above_the_line_does_not_change_the_ledger(strategy, tmp_path):
    path = tmp_path / "tests" / "collectives.json"
    before = imported(tmp_path / "before.py", MODULE)
    budgets.assert_collectives(before.step, (ROWS,), ledger=path, name="step")
    written = path.read_text()
    assert '"../before.py::Step.__call__.inner"' in written
    ledger._definitions.cache_clear()  # files change between processes, not within one
    ledger._innermost_definition.cache_clear()
    after = imported(tmp_path / "before.py", "# A comment.\n" + MODULE)
    budgets.assert_collectives(after.step, (ROWS,), ledger=path, name="step")
    assert path.read_text() == written


def test_files_of_installed_packages_have_the_same_name_everywhere(tmp_path):
    source = "/home/me/venv/lib/python3.11/site-packages/optax/losses.py:12"
    assert ledger.function_of(source, tmp_path) == "optax/losses.py"
    line = line_of(tpudist.Strategy.scope, "def scope")  # possibly in a checkout
    assert ledger.function_of(os.path.abspath(line), tmp_path) == (
        "tpudist/strategy/strategy.py::Strategy.scope"
    )
    assert ledger.function_of(None, tmp_path) == ""
    assert ledger.function_of("/elsewhere/on/this/machine.py:3", tmp_path) == "machine.py"
    (tmp_path / "old.py").write_text("# coding: latin-1\ndef wörk():\n    pass\n", "latin-1")
    assert ledger.function_of(f"{tmp_path}/old.py:3", tmp_path) == "old.py::wörk"


def test_a_ledger_has_one_collective_per_line_and_is_sorted(tmp_path):
    path = tmp_path / "collectives.json"
    entries = [
        ledger.Entry("all-reduce", ("replica",), "dcn", 8, "a.py::f"),
        ledger.Entry("all-gather", ("fsdp", "tensor"), "ici", 1024, ""),
    ]
    records = {
        name: ledger.Record({"replica": 2}, {"jax": "1"}, dict.fromkeys(entries, 1.5))
        for name in ("b", "a")
    }
    ledger.write(path, records)
    assert ledger.read(path) == records
    lines = [line for line in path.read_text().splitlines() if '"kind"' in line]
    assert ["all-gather" in line for line in lines] == [True, False, True, False]
    written = path.read_text()
    ledger.write(path, ledger.read(path))
    assert path.read_text() == written


def test_concurrent_tests_keep_each_others_records(tmp_path):
    """pytest-xdist runs tests concurrently."""
    path = tmp_path / "new" / "collectives.json"
    names = [f"step {i}" for i in range(48)]

    def add(name):
        ledger.add(path, name, ledger.Record({"replica": 2}, {"jax": "1"}, {}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, names))
    assert set(ledger.read(path)) == set(names)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_plugin_sets_the_variable_that_ledgers_read():
    assert pytest_plugin.UPDATE_VARIABLE == ledger.UPDATE


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_pytest_option_updates_ledgers(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import os
            def test_it():
                assert os.environ["TPUDIST_UPDATE_LEDGER"] == "1"
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-p", "tpudist.pytest_plugin", "-q"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TPUDIST"))}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--tpudist-update-ledger"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()


# On a described slice.


def matmul(w, x):
    return jnp.tanh(x @ w)


def matmul_of_a_whole_matrix(w, x):
    w = jax.lax.with_sharding_constraint(w, P())
    return jnp.tanh(x @ w)


@pytest.mark.slow
@pytest.mark.libtpu
def test_an_added_all_gather_on_a_slice_fails_with_its_source_line(tmp_path):
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 8})
    weights = jax.ShapeDtypeStruct(
        (1024, 1024), jnp.bfloat16, sharding=jax.NamedSharding(strategy.mesh, P(None, "tensor"))
    )
    args = (weights, jax.ShapeDtypeStruct((128, 1024), jnp.bfloat16))
    path = tmp_path / "collectives.json"
    how = {"strategy": strategy, "topology": "v5e:2x4"}
    allowed = budgets.assert_collectives(
        matmul, args, allow={"all-reduce", "all-gather"}, ledger=path, name="step", **how
    )
    kinds = {use.kind for use in allowed.collectives} - {"all-gather"}
    message = failure(matmul_of_a_whole_matrix, args, allow=kinds, **how)
    # The line of the constraint; since libtpu 0.0.50, the line of the product that needs it.
    asks = line_of(matmul_of_a_whole_matrix, "with_sharding_constraint")
    uses = line_of(matmul_of_a_whole_matrix, "tanh")
    assert "matmul_of_a_whole_matrix on v5e:2x4 (mesh: replica 1 x tensor 8)" in message
    assert asks in message or uses in message
    message = failure(matmul_of_a_whole_matrix, args, ledger=path, name="step", **how)
    added = [row for row in message.splitlines() if row.startswith("  + all-gather")]
    assert any(asks in row or uses in row for row in added)


@pytest.mark.slow
@pytest.mark.libtpu
def test_bytes_between_slices_count_as_dcn():
    strategy = tpudist.MirroredStrategy()
    x = jax.ShapeDtypeStruct((16, 1 << 20), jnp.float32)
    how = {"strategy": strategy, "topology": "2xv5e:2x2"}
    message = failure(reduces, (x,), max_dcn_bytes=10, **how)
    assert "per step over DCN, but max_dcn_bytes is 10" in message
    assert line_of(reduces, "all_reduce(") in message


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_step_that_does_not_fit_fails_with_the_reason():
    strategy = tpudist.TPUStrategy()
    x = jax.ShapeDtypeStruct((200_000, 100_000), jnp.float32)
    message = failure(lambda x: x + 1, (x,), strategy=strategy, topology="v5e:2x2")
    assert "cannot be compiled. The program needs" in message
    assert "of each device, which has 15.75 GiB" in message
