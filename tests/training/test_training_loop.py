"""`train`: how it uses a step, a state and data, and which arguments it rejects."""

import io
import json
import math
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import tpudist
from tpudist.training import (
    ReportOptions,
    RunFolder,
    StopOptions,
    evaluate,
    history,
    loop,
    make_evaluation_step,
    make_train_step,
    train,
)
from tpudist.training.display import make_display
from tpudist.training.metrics_writers import read_lines
from tpudist.training.step_state import StepState
from tpudist.training.step_timer import StepTimer
from tpudist.training.steps import make_should_stop

SCALES = [3.0]
for _ in range(8):
    SCALES.append(SCALES[-1] - 0.1 * 2 * (SCALES[-1] - 1))
LOSSES = [(scale - 1) ** 2 for scale in SCALES[:8]]  # one per step


class Scale(nnx.Module):
    """Multiplies by one parameter."""

    def __init__(self):
        self.scale = nnx.Param(jnp.float32(3.0))


def distance(model: Scale, batch: dict) -> jnp.ndarray:
    return jnp.square(model.scale[...] * batch["x"] - batch["x"])


update = make_train_step(distance)


def step(model, optimizer, batch):
    return {"loss": update(model, optimizer, batch)}


def ones(num_batches: int = 8) -> list[dict]:
    return [{"x": np.ones(8, np.float32)}] * num_batches


@pytest.fixture(scope="module")
def strategy() -> tpudist.Strategy:
    return tpudist.MirroredStrategy(jax.devices()[:2])


def make_state(strategy, learning_rate=0.1):
    model = strategy.create(Scale)
    make_optimizer = lambda model: tpudist.Optimizer(optax.sgd(learning_rate), model)  # noqa: E731
    return model, strategy.create(make_optimizer, model)


def run(strategy, *, step=step, data=None, learning_rate=0.1, num_steps=8, **options):
    """Trains `Scale` towards 1; returns the history and the printed output."""
    out = io.StringIO()
    options = {"progress": make_display(num_steps or 1, file=out), **options}
    state = make_state(strategy, learning_rate)
    data = ones() if data is None else data
    return train(strategy, step, state, data, num_steps=num_steps, **options), out.getvalue()


def test_training_follows_the_gradient_of_the_global_batch(strategy):
    found, _ = run(strategy)
    np.testing.assert_allclose(found.losses, LOSSES, rtol=1e-5)
    assert (found.ended, found.num_steps) == ("finished", 8)
    assert 0 < found.median_step_s < 10
    assert 0 < found.goodput < 1
    model, _ = found.state
    np.testing.assert_allclose(model.scale[...], SCALES[8], rtol=1e-5)


def test_a_user_needs_five_lines_and_sees_the_progress(strategy, capsys):
    data = tpudist.NumpyDataset({"x": np.ones(24, np.float32)}).batch(8)
    state = make_state(strategy)
    found = train(
        strategy, step, state, data, num_epochs=2, report=ReportOptions(items=("examples", 8))
    )
    assert found.num_steps == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/6  loss 4.000"
    assert lines[1].startswith("step 6/6  loss 0.429  ")
    assert " examples/s  0:00 left" in lines[1]
    assert lines[2].startswith("Finished after 6 steps  0:0")
    assert lines[2].endswith(" of it in compiled steps  loss 0.429")
    train(strategy, step, state, data, num_steps=1, progress=False)
    assert capsys.readouterr().out == ""


def test_the_program_equals_a_hand_written_loop_and_is_compiled_once(strategy):
    def hand_step(model, optimizer, batch):
        return {"loss": update(model, optimizer, batch)}

    state = make_state(strategy)
    for batch in strategy.experimental_distribute_dataset(ones(3)):
        strategy.run(hand_step, args=(*state, batch))
    num_compiled = len(tpudist.compile_log())
    train(strategy, hand_step, state, ones(), num_steps=20, progress=False)
    assert len(tpudist.compile_log()) == num_compiled


def test_no_step_waits_for_the_metrics_of_the_one_before(strategy, monkeypatch):
    """Devices would idle while the host reads metrics, so two later steps are dispatched."""
    ahead = []

    class Watched(history.History):
        def add(self, metrics):
            super().add(metrics)
            ahead.append(started[0] - self.num_steps)

    started = [0]
    original = loop.StepSchedule._start_step

    def start(self):
        original(self)
        started[0] += 1

    monkeypatch.setattr(loop.StepSchedule, "_start_step", start)
    monkeypatch.setattr(loop, "History", Watched)
    run(strategy)
    assert ahead == [0, 2, 2, 2, 2, 2, 1, 0]  # the first compiles; the last are waited for


def test_held_out_examples_are_evaluated_at_intervals_and_at_the_end(strategy, tmp_path):
    seen = []

    def judge(model, optimizer):
        seen.append(float(model.scale[...]))
        return {"distance": jnp.float32(0.5), "other": 2}

    found, shown = run(strategy, evaluate=judge, evaluate_every=3, folder=tmp_path)
    assert found.held_out == [(n, {"distance": 0.5, "other": 2.0}) for n in (3, 6, 8)]
    np.testing.assert_allclose(seen, [SCALES[n] for n in (3, 6, 8)], rtol=1e-5)
    assert "step 6/8  held out distance 0.500, other 2.000" in shown
    lines = [line for line in read_lines(tmp_path) if line["split"] == "held_out"]
    assert [(line["step"], line["distance"]) for line in lines] == [(3, 0.5), (6, 0.5), (8, 0.5)]
    once, _ = run(strategy, evaluate=judge)
    assert [n for n, _ in once.held_out] == [8]


def linen_step(state, batch):
    def loss_fn(params):
        predicted = state.apply_fn({"params": params}, batch["x"][:, None])
        return tpudist.compute_average_loss(jnp.square(predicted - 1).sum(-1))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    all_reduce = tpudist.get_replica_context().all_reduce
    return state.apply_gradients(grads=all_reduce("sum", grads)), {"loss": all_reduce("sum", loss)}


def make_linen_state():
    model = linen.Dense(1)
    params = model.init(jax.random.key(0), jnp.ones((1, 1)))["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)
    )


@pytest.mark.slow
def test_a_linen_state_is_returned_and_resumes_from_a_checkpoint(strategy, tmp_path):
    options = {"progress": False, "num_steps": 6}
    whole = train(strategy, linen_step, make_linen_state(), ones(), **options)
    assert int(whole.state.step) == 6
    folder = tmp_path / "run"
    options["folder"] = folder
    first = train(strategy, linen_step, make_linen_state(), ones(), **options | {"num_steps": 4})
    again = train(strategy, linen_step, make_linen_state(), ones(), **options)
    assert first.losses + again.losses[4:] == whole.losses
    assert again.losses == whole.losses  # losses of the first start are read from metrics.jsonl
    assert int(again.state.step) == 6
    jax.tree.map(np.testing.assert_array_equal, again.state.params, whole.state.params)


def test_a_tuple_of_pytrees_is_returned_as_a_tuple(strategy):
    def pytree_step(params, count, batch):
        loss = tpudist.compute_average_loss(jnp.square(params["w"] - batch["x"]))
        loss = tpudist.get_replica_context().all_reduce("sum", loss)
        return (jax.tree.map(lambda w: w * 0.5, params), count + 1), {"loss": loss}

    state = {"w": jnp.float32(8)}, jnp.int32(0)
    found = train(strategy, pytree_step, state, ones(), num_steps=3, progress=False)
    params, count = found.state
    assert (float(params["w"]), int(count)) == (1.0, 3)
    assert found.losses == [49.0, 9.0, 1.0]


def test_a_train_state_names_its_checkpoint_entries_and_knows_its_step(strategy, tmp_path):
    model, optimizer = make_state(strategy)
    state = tpudist.TrainState(model, optimizer)
    found = train(strategy, step, state, ones(), num_steps=8, folder=tmp_path, progress=False)
    assert found.state is state
    assert state.step == 8
    alone = tpudist.TrainState(strategy.create(Scale))
    manager = tpudist.checkpoint.CheckpointManager(alone, tmp_path / "checkpoints")
    manager.restore(only="model")
    assert float(alone.model.scale[...]) == float(model.scale[...])


def test_run_folder_saves_only_the_requested_part_of_the_state(strategy, tmp_path):
    """A pretrained model needs this: its other weights are loaded again at each start."""

    def start(num_steps):
        model, optimizer = make_state(strategy)
        saved = tpudist.checkpoint.Checkpoint(scale=model.scale)
        folder = RunFolder(tmp_path, saved=saved)
        options = {"num_steps": num_steps, "folder": folder, "progress": False}
        return saved, train(strategy, step, (model, optimizer), ones(), **options)

    saved, _ = start(3)
    assert saved.step == 3
    _, found = start(8)
    np.testing.assert_allclose(found.losses, LOSSES, rtol=1e-5)
    folder = RunFolder(tmp_path, saved=tpudist.checkpoint.Checkpoint())
    options = {"num_steps": 1, "folder": folder, "progress": False}
    with pytest.raises(ValueError, match="the state is plain pytrees"):
        train(strategy, linen_step, make_linen_state(), ones(), **options)


def test_an_iterable_is_read_repeatedly_and_an_exhausted_one_raises_an_error(strategy):
    found, _ = run(strategy, data=ones(3), num_steps=8)
    np.testing.assert_allclose(found.losses, LOSSES, rtol=1e-5)
    found, _ = run(strategy, data=lambda: iter(ones(3)), num_steps=4)
    assert found.num_steps == 4
    with pytest.raises(ValueError, match="generator, which can be read only once"):
        run(strategy, data=(batch for batch in ones(3)))
    iterator = iter(strategy.experimental_distribute_dataset(ones(3)))
    with pytest.raises(ValueError, match="the iterator ended after 3 of 8 steps .* dataset"):
        run(strategy, data=iterator)
    used_up = iter(ones(3))
    with pytest.raises(ValueError, match="gave no batches.* exhausted, pass a function"):
        run(strategy, data=lambda: used_up)
    passes = iter([ones(3)])
    with pytest.raises(ValueError, match="no more batches after 3 steps, with 5 steps left"):
        run(strategy, data=lambda: next(passes, []))


def test_epochs_of_data_whose_length_counts_examples_are_an_error(strategy):
    """Otherwise one epoch would read 3 batches of 8 examples 8 times."""

    class Loader(list):
        def __len__(self):
            return 24

    with pytest.raises(ValueError, match=r"len\(data\) is 24, but a pass .* has 3 batches"):
        run(strategy, data=Loader(ones(3)), num_steps=None, num_epochs=1)
    assert run(strategy, data=Loader(ones(3)), num_steps=8)[0].num_steps == 8


@pytest.mark.parametrize("data", [list, lambda: lambda: iter(()), "iterator"])
def test_data_without_batches_trains_no_step_and_warns_once(strategy, data, caplog):
    dataset = [] if data == "iterator" else data()
    if data == "iterator":
        dataset = iter(strategy.experimental_distribute_dataset(dataset))
    measured = lambda model, optimizer: evaluate(strategy, step, model, [])  # noqa: E731
    found, out = run(strategy, data=dataset, evaluate=measured)
    assert (found.num_steps, found.held_out) == (0, [(0, {})])
    assert "step 0/8  held out" in out
    if data is list:
        caplog.clear()
        assert run(strategy, data=[], num_steps=None, num_epochs=2)[0].num_steps == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_default_strategy_trains(tmp_path):
    alone = tpudist.get_strategy()
    found, _ = run(alone, data=ones(3), folder=tmp_path)
    np.testing.assert_allclose(found.losses, LOSSES, rtol=1e-5)


@pytest.mark.slow
def test_a_run_resumes_exactly_with_the_next_batch(strategy, tmp_path):
    """The checkpoint is in the middle of a second pass over shuffled data and is not the last."""

    def watched(model, optimizer, batch):
        x = tpudist.get_replica_context().all_reduce("sum", batch["x"].sum())
        return step(model, optimizer, batch) | {"x": x}

    def data():
        values = np.random.default_rng(0).normal(size=40).astype(np.float32)
        return tpudist.NumpyDataset({"x": values}).shuffle(seed=3).batch(8)

    options = {"step": watched, "learning_rate": 0.05}
    whole, _ = run(strategy, data=data(), num_steps=12, folder=tmp_path / "whole", **options)
    stops = iter([False] * 7 + [True])
    options["folder"] = RunFolder(tmp_path / "run", checkpoint_every=2)
    stop = StopOptions(lambda: next(stops))
    part, _ = run(strategy, data=data(), num_steps=12, stop=stop, **options)
    assert (part.ended, part.num_steps) == ("interrupted", 7)
    started: list = []
    again, shown = run(
        strategy,
        data=data(),
        num_steps=12,
        report=ReportOptions(on_start=lambda history: started.append(history.num_steps)),
        **options,
    )
    assert started == again.resumed_at == [7]
    assert shown.startswith(f"Resuming after step 7 of 12, from {tmp_path}/run/checkpoints/7.")
    assert again.losses == whole.losses
    lines = [
        [(line["step"], line["x"]) for line in read_lines(tmp_path / name) if "x" in line]
        for name in ("run", "whole")
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 12
    assert sorted(int(x.name) for x in (tmp_path / "run" / "checkpoints").iterdir()) == [8, 10, 12]
    ended, shown = run(strategy, data=data(), num_steps=12, **options)
    assert "This run has already finished: " in shown
    assert ended.losses == whole.losses


def test_a_run_that_is_requested_to_stop_keeps_its_progress(strategy):
    asked = iter([False] * 4 + [True])
    found, _ = run(strategy, stop=StopOptions(lambda: next(asked)))
    assert (found.ended, found.num_steps) == ("interrupted", 4)
    found, _ = run(strategy, stop=StopOptions(lambda: True), evaluate=lambda *_: {})
    assert (found.ended, found.num_steps, found.held_out) == ("interrupted", 0, [])
    assert math.isnan(found.median_step_s)
    assert math.isnan(found.mean_step_s)


def test_step_times_exclude_compilation_and_pauses(monkeypatch):
    now = iter([10.0, 11.0, 11.5, 20.0, 23.0, 23.0])
    monkeypatch.setattr("tpudist.training.step_timer.time.perf_counter", lambda: next(now))
    timed = history.History()
    timer = StepTimer(timed, 4)
    timer.begin_step()  # compiles
    assert timer.end_step() == (None, None)  # at 10
    timer.begin_step()
    timer.end_step()
    timer.end_step()
    timer.pause()
    timer.begin_step()  # at 20
    timer.begin_step()  # before the first has finished
    timer.end_step()
    timer.end_step()
    assert timed.seconds == [1.0, 0.5, 3.0, 0.0]


def test_ctrl_c_finishes_the_step_and_saves(strategy, tmp_path):
    interrupted = []

    def interrupt():
        if not interrupted:
            interrupted.append(signal.raise_signal(signal.SIGINT))
        return False

    found, _ = run(strategy, folder=tmp_path, stop=StopOptions(interrupt))
    assert (found.ended, found.num_steps) == ("interrupted", 1)
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_nonfinite_loss_ends_the_run_and_is_not_saved(strategy, tmp_path):
    folder = RunFolder(tmp_path, checkpoint_every=1)
    options = {"num_steps": 30, "learning_rate": 1e30, "folder": folder}
    found, _ = run(strategy, **options)
    assert found.ended == "diverged"
    assert found.num_steps < 30
    assert not math.isfinite(found.losses[-1])
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert max(saved) < found.num_steps
    again, _ = run(strategy, **options)
    assert again.num_steps == found.num_steps  # a resumed run diverges at the same step


def test_sigterm_in_an_evaluation_saves_the_step_and_repeats_the_evaluation(strategy, tmp_path):
    """Iterators of held-out examples also watch for SIGTERM, because grace periods are short."""
    held_out = strategy.experimental_distribute_dataset([{"x": np.arange(8)}] * 8)

    def judge(*_):
        signal.raise_signal(signal.SIGTERM)
        assert len(list(held_out)) == 8
        raise AssertionError("SIGTERM was not heard")

    options = {"evaluate_every": 3, "folder": RunFolder(tmp_path, checkpoint_every=2)}
    stop = StopOptions(exit_when_preempted=False)
    found, _ = run(strategy, evaluate=judge, stop=stop, **options)
    assert (found.ended, found.num_steps, found.held_out) == ("preempted", 3, [])
    assert found.num_saves == 2
    assert found.blocked_s > 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "3"}

    again, shown = run(strategy, evaluate=lambda *_: {"nats": 0.5}, **options)
    assert [n for n, _ in again.held_out] == [3, 6, 8]
    assert shown.splitlines()[1] == "step 3/8  held out nats 0.500"
    np.testing.assert_allclose(again.losses, LOSSES, rtol=1e-5)
    assert (again.num_steps, again.first_step) == (8, 1)


def test_sigterm_exits_with_its_code_after_the_save(strategy, tmp_path):
    asked = []

    def end():
        if not asked:
            asked.append(signal.raise_signal(signal.SIGTERM))
        return False

    with pytest.raises(SystemExit) as exited:
        run(strategy, folder=tmp_path, stop=StopOptions(end))
    assert exited.value.code == 143
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert run(strategy, folder=tmp_path)[0].num_steps == 8


def test_run_folder_records_goodput_on_request(strategy, tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr(loop.goodput, "record_goodput", noted.append)
    run(strategy, folder=RunFolder(tmp_path, goodput=True))
    assert noted == [tmp_path]


def test_custom_writers_receive_all_metrics_and_stay_open(strategy, tmp_path):
    got = []

    class Writer:
        def begin(self, history):
            got.append(("begin", history.num_steps))

        def write(self, step, split, values):
            got.append((split, step, values["loss"]))

        def sync(self):
            got.append(("sync",))

        def close(self):
            raise AssertionError("it is the caller's")

    found, _ = run(strategy, report=ReportOptions([Writer()]), folder=tmp_path, num_steps=2)
    assert got[0] == ("begin", 0)
    assert got[1:3] == [("train", 1, found.losses[0]), ("train", 2, found.losses[1])]
    assert set(got[3:]) == {("sync",)}
    assert not (tmp_path / "metrics.jsonl").exists()


REFUSED_RESULTS = {
    "loss": (lambda loss: loss, TypeError, r"a float32\[\]. It must return a mapping of names"),
    "none": (lambda loss: None, TypeError, "The step returned None"),
    "pair": (
        lambda loss: (loss, loss),
        TypeError,
        "The step returned a tuple. It must return a mapping",
    ),
    "state": (
        lambda loss: (loss, {"loss": loss}),
        TypeError,
        r"as its new state, but received 2 part\(s\) of state \(model, optimizer\). Return",
    ),
    "vector": (
        lambda loss: {"loss": loss[None]},
        TypeError,
        r"The metric 'loss' is a float32\[1\], but must be a scalar",
    ),
    "word": (lambda loss: {"loss": "low"}, TypeError, "The metric 'loss' is a str"),
}


@pytest.mark.parametrize("name", REFUSED_RESULTS)
def test_a_step_that_returns_no_metrics_is_rejected(strategy, name):
    change, error, said = REFUSED_RESULTS[name]

    def wrong(model, optimizer, batch):
        return change(update(model, optimizer, batch))

    with pytest.raises(error, match=said):
        run(strategy, step=wrong)


def test_a_metric_that_differs_between_replicas_is_rejected(strategy):
    def wrong(model, optimizer, batch):
        return step(model, optimizer, batch) | {"first": batch["x"][0]}

    with pytest.raises(ValueError, match="metric 'first' differs between replicas.*Combine it"):
        run(strategy, step=wrong)


@pytest.mark.parametrize(
    "beside", [np.float32(0.1), 1j, jax.nn.relu, len], ids=["NumPy", "complex", "JAX", "Python"]
)
def test_leaves_that_are_not_arrays_do_not_count_as_changed_in_place(beside):
    """Otherwise a step that returns only metrics would silently learn nothing."""
    assert not StepState({"weights": np.ones(2), "beside": beside}).is_changed_in_place


def test_a_state_that_would_never_change_is_rejected(strategy):
    def wrong(state, batch):
        return linen_step(state, batch)[1]

    with pytest.raises(TypeError, match=r"metrics but no state. Its state \(state\) is plain"):
        train(strategy, wrong, make_linen_state(), ones(), num_steps=1, progress=False)


def test_a_state_that_no_checkpoint_can_store_is_rejected_before_the_first_step(strategy, tmp_path):
    state = (*make_state(strategy), threading.Lock())
    with pytest.raises(TypeError, match="A checkpoint cannot save these objects:\n  state_2"):
        train(strategy, step, state, ones(), num_steps=1, folder=tmp_path)


def test_an_evaluation_that_returns_no_mapping_is_rejected(strategy):
    with pytest.raises(TypeError, match="evaluate returned a float. It must return a mapping"):
        run(strategy, evaluate=lambda *_: 0.5)


REFUSED = {
    "no length": (
        {"num_steps": None, "num_epochs": 2, "data": lambda: iter(ones())},
        "num_epochs=2\\): the data has no known length, .* Pass num_steps",
    ),
    "both": ({"num_epochs": 2}, "train.. received both"),
    "neither": ({"num_steps": None}, "neither num_steps nor num_epochs"),
    "no steps": (
        {"num_steps": 0},
        "num_steps=0\\): num_steps must be a whole number of at least 1",
    ),
    "nothing to judge": ({"evaluate_every": 2}, "evaluate_every=2\\) needs a function to call"),
    "no interval": ({"evaluate_every": 0}, r"train\(evaluate_every=0\): .* a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_effect_are_rejected(strategy, name):
    options, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        run(strategy, **options)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("checkpoint_every", r"Pass folder=RunFolder\(folder, checkpoint_every=...\)"),
        ("items", r"Pass report=ReportOptions\(items=...\)"),
        ("exit_when_preempted", r"Pass stop=StopOptions\(exit_when_preempted=...\)"),
        ("every", "unexpected keyword argument 'every'"),
    ],
)
def test_an_option_that_has_moved_names_its_place(strategy, option, remedy):
    with pytest.raises(TypeError, match=remedy):
        run(strategy, **{option: 1})


@pytest.mark.parametrize("interval", [0, -1, True, 1.5])
def test_run_folder_rejects_an_interval_that_is_not_a_positive_integer(interval):
    with pytest.raises(ValueError, match=r"RunFolder\(checkpoint_every=.*at least 1"):
        RunFolder("x", checkpoint_every=interval)


def test_data_of_a_different_strategy_is_rejected(strategy):
    other = tpudist.OneDeviceStrategy()
    with pytest.raises(ValueError, match="OneDeviceStrategy distributed the data, but another"):
        run(strategy, data=other.experimental_distribute_dataset(ones()))


def test_a_partial_batch_is_weighted_by_its_examples():
    """Two of the eight replicas contain only padding, so a mean over replicas is wrong."""
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(Scale)
    values = np.arange(22, dtype=np.float32)
    batches = strategy.experimental_distribute_dataset([{"x": values[:16]}, {"x": values[16:]}])
    judge = make_evaluation_step(
        lambda model, batch: {"x": batch["x"], "both": jnp.stack([batch["x"], -batch["x"]], axis=1)}
    )
    means = evaluate(strategy, judge, model, batches)
    assert means["x"] == pytest.approx(values.mean())
    np.testing.assert_allclose(means["both"], [values.mean(), -values.mean()], rtol=1e-6)


def test_a_single_process_stops_on_request(strategy):
    wants = False
    should_stop = make_should_stop(strategy, lambda: wants)
    assert not should_stop()
    wants = True
    assert should_stop()


def test_metrics_lines_contain_the_returned_values_and_the_throughput(strategy, tmp_path):
    run(strategy, folder=tmp_path, num_steps=3, report=ReportOptions(items=("examples", 8)))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.keys() for line in lines] == [
        {"step", "split", "time_s", "loss"},
        {"step", "split", "time_s", "loss", "step_s", "examples_per_s"},
        {"step", "split", "time_s", "loss", "step_s", "examples_per_s"},
    ]
