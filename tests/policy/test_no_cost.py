"""`strategy.run` costs nothing against hand-written JAX: both compile to the same program.

scripts/bench.py (`benchmarks.pairs`) defines the two steps, and measures Python time, too.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import bench
import tpudist
from benchmarks import figures, first_step, pairs, programs, published, scale, scale_plans
from places import PYTHONPATH, ROOT
from tpudist.models import TransformerConfig
from tpudist.xla import topology

SMALL = TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128)
TASKS = {"mlp": pairs.mlp((128, 512, 128)), "transformer": pairs.transformer(SMALL, length=32)}


def missed_targets(task: str, pair: pairs.Pair) -> list[figures.Figure]:
    ours, by_hand = read(pair.ours), read(pair.by_hand)
    assert ours.collectives  # or there would be nothing to compare
    return [x for x in programs.compare(task, ours, by_hand) if x.met is False]


@functools.cache  # tests below read the same programs
def lower_both(task: str, geometry: str) -> pairs.Pair:
    return pairs.lower_both(TASKS[task], geometry)


@functools.cache  # it compiles
def read(lowered: jax.stages.Lowered) -> pairs.Program:
    return pairs.read(lowered)


EVERY_TASK = ["mlp", pytest.param("transformer", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("geometry", pairs.GEOMETRIES)
@pytest.mark.parametrize("task", EVERY_TASK)
def test_the_compiled_step_is_the_hand_written_one(task, geometry):
    """Collectives, FLOPs, bytes accessed, temporary and peak memory."""
    assert missed_targets(task, lower_both(task, geometry)) == []


@pytest.mark.parametrize("task", EVERY_TASK)
def test_all_gradients_cross_the_mesh_in_one_all_reduce(task):
    """A step that stopped doing so would pay one latency per layer. The loss rides along."""
    ((kind, num_bytes),) = read(lower_both(task, "data parallel").ours).collectives
    model = nnx.eval_shape(TASKS[task].make_model)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert (kind, num_bytes) == ("all-reduce", 4 * parameters + 4)


@pytest.mark.parametrize("geometry", pairs.GEOMETRIES)
@pytest.mark.parametrize("task", EVERY_TASK)
def test_the_state_that_a_step_replaces_is_overwritten_in_place(task, geometry):
    pair = lower_both(task, geometry)
    step_count = 4  # of nnx.Optimizer, in addition to that of Optax
    assert read(pair.ours).figures.alias_bytes == pair.state_bytes + step_count


def test_variables_are_overwritten_in_place():
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        variables = [tpudist.Variable(np.ones((4, i + 1), np.float32)) for i in range(5)]

    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(variable.shape), read_value=False)

    memory = strategy.lower(step).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(4 * variable.size for variable in variables)


def test_a_donated_argument_is_overwritten_in_place_and_no_other_is():
    strategy = tpudist.MirroredStrategy()
    state = strategy.replicate({"a": np.ones((4, 4), np.float32), "b": np.ones(8, np.float32)})

    def step(state, update):
        return jax.tree.map(jnp.add, state, update)

    for donate, num_bytes in (((0,), 4 * 24), ((), 0)):
        options = tpudist.RunOptions(donate_argnums=donate)
        lowered = strategy.lower(step, args=(state, state), options=options)
        assert lowered.compile().memory_analysis().alias_size_in_bytes == num_bytes


def names_of_jax_functions(call) -> set[str]:
    """The Python functions of JAX's tracing and dispatch that run in `call()`."""
    found = set()

    def note(frame, event, _):
        if event == "call" and "/jax/_src/" in frame.f_code.co_filename:
            found.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {name for name in found if name.split(".")[0] in ("pjit", "pxla", "api", "core")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "pytree", "nnx", "variables"])
def test_every_signature_of_a_function_is_dispatched_in_compiled_code(kind):
    """`jit` sends a signature whose first trace failed through Python, three times as slow."""
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        variable = tpudist.Variable(np.zeros((), np.float32))

    def step(batch):
        array = batch["x"] if kind == "pytree" else batch
        if kind == "variables":
            variable.assign_add(array.sum(), read_value=False)
        return array.sum()

    def train(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda model: model(batch).sum())(model))

    def call(rows):
        batch = batches[rows]
        if kind == "nnx":
            return strategy.run(train, args=(model, optimizer, batch))
        return strategy.run(step, args=({"x": batch} if kind == "pytree" else batch,))

    batches = {n: strategy.replicate(jnp.ones((n, 3), jnp.float32)) for n in (1, 2, 3)}
    for rows in (1, 2, 3, 1, 2, 3):
        call(rows)
    slow = {rows: names_of_jax_functions(lambda rows=rows: call(rows)) for rows in (1, 2, 3)}
    assert all("cache_miss" not in name for names in slow.values() for name in names), slow


@pytest.mark.slow
def test_the_benchmark_writes_every_figure_with_its_baseline(tmp_path, capsys, monkeypatch):
    file = tmp_path / "figures.json"
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell wraps
    assert bench.main(["--suites", "calls", "--calls", "5", "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["versions"]["jax"] == jax.__version__
    assert report["machine"]["num_cores"] == os.cpu_count()
    for figure in report["figures"]:
        assert figure["subject"] in printed
        assert figure["ratio"] == pytest.approx(figure["ours"] / figure["baseline"])
        assert figure["met"] in (True, False, None)
        assert (figure["met"] is None) == (figure["target"] == "")
        missed = f"Missed: {figure['subject']}, {figure['quantity']}:"
        assert (missed in printed) == (figure["met"] is False)
    assert {figure["subject"].partition(",")[0] for figure in report["figures"]} == {
        "10 arguments",
        "300 arrays",
        "300 captured Variables",
        "16 steps at once",
        "NNX model and optimizer",
        "a TrainState of 301 arrays",
    }


@pytest.mark.slow
def test_the_benchmark_of_the_training_loop_compares_it_with_one_by_hand(tmp_path):
    file = tmp_path / "figures.json"
    assert bench.main(["--suites", "train", "--train-steps", "5", "--out", str(file)]) == 0
    quiet, with_folder = json.loads(file.read_text())["figures"]
    assert quiet["baseline"] == with_folder["baseline"] > 0
    assert (quiet["target"], with_folder["target"]) == ("<= +0.1", "")


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.slow
def test_the_benchmark_of_the_first_step_compares_it_with_nnx_jit(tmp_path, monkeypatch):
    monkeypatch.setattr(first_step, "DEPTHS", (1, 2))
    file = tmp_path / "figures.json"
    options = ["--suites", "first_step", "--first-step-repeats", "1", "--out", str(file)]
    assert bench.main(options) == 0
    *compared, load = json.loads(file.read_text())["figures"]
    assert [x["subject"] for x in compared] == ["1 layers", "2 layers", "growth from 1 to 2 layers"]
    assert all(x["ours"] > 0 and x["baseline"] > 0 for x in compared[:2])
    assert set(compared[0]["details"]) == {"wall seconds of the phases", "tpudist", "nnx.jit"}
    assert load["baseline"] is None


def test_the_benchmarks_of_the_planner_say_what_they_found(tmp_path, capsys, monkeypatch):
    """Plans of 8 chips, of a small run, and of a run that does not fit."""
    file = tmp_path / "figures.json"
    runs = {
        name: published.Run(name, "nowhere", "v5e-4", {"fsdp": 4}, SMALL, batch, 32, step_s=1e-3)
        for name, batch in {"small": 1, "large": 2**20}.items()
    }
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(scale, "module_names", lambda: ["scale_plans"])
    monkeypatch.setattr(scale_plans, "SLICES", scale_plans.SLICES[:1])
    monkeypatch.setattr(published, "RUNS", runs)
    bench.main(["--suites", "scale", "published", "--out", str(file)])
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    found = {(figure["subject"], figure["quantity"]): figure for figure in report["figures"]}
    assert found["small", "step time, s"]["baseline"] == 1e-3
    assert found["all", "median error"]["met"] is False  # a microsecond or so, not a millisecond
    assert found["large", "fits"]["details"]["fits"] is False
    assert found["v5e-8: 8 chips, data parallel", "compile, s"]["ratio"] is None
    for subject, quantity in found:
        assert subject in printed
        assert quantity in printed


def print_missed_on_tpu(task: str, geometry: str) -> None:
    """The program of the test below, in a separate process: libtpu may end it."""
    pair = pairs.lower_both(TASKS[task], geometry, topology.devices("v5e:2x4"))
    print(missed_targets(task, pair))


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("geometry", pairs.GEOMETRIES)
@pytest.mark.parametrize("task", TASKS)
def test_the_step_compiled_for_a_tpu_slice_is_the_hand_written_one(task, geometry):
    program = (
        "import jax, test_no_cost; jax.config.update('jax_platforms', 'cpu'); "
        f"test_no_cost.print_missed_on_tpu({task!r}, {geometry!r})"
    )
    paths = [PYTHONPATH, str(ROOT / "scripts"), str(Path(__file__).parent)]
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert ended.stdout == "[]\n"
