"""The loop, the steps it runs, and the text a model writes, on models one can check by hand."""

import io
import math
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.training import loop, steps
from tpudist.training.data.batches import InOrder
from tpudist.training.generate import generate
from tpudist.training.history import History
from tpudist.training.report import rows
from tpudist.training.saves import Saves
from tpudist.training.show.display import make_display
from tpudist.training.show.metrics import MetricsWriter


class Scale(nnx.Module):
    """Multiplies by one number."""

    def __init__(self):
        self.scale = nnx.Param(jnp.float32(3.0))


class Successor(nnx.Module):
    """Is sure that a byte is followed by the next one."""

    def __init__(self):
        self.sure = nnx.Param(jnp.float32(50.0))


def distance(model: Scale, batch: dict) -> jnp.ndarray:
    return jnp.square(model.scale[...] * batch["x"] - batch["x"])


@pytest.fixture(scope="module")
def strategy() -> tpudist.Strategy:
    return tpudist.MirroredStrategy()


def run(
    strategy,
    *,
    num_steps=8,
    learning_rate=0.1,
    should_stop=lambda: False,
    evaluate=None,
    saved_in=None,
):
    """Trains `Scale` towards 1; returns the history and what was printed."""
    model = strategy.create(Scale)
    optimizer = strategy.create(
        lambda model: tpudist.Optimizer(optax.sgd(learning_rate), model), model
    )
    batches = [{"x": np.ones(8, np.float32)}] * num_steps
    batches = iter(strategy.experimental_distribute_dataset(batches))
    out, history, saves = io.StringIO(), History(), None
    if saved_in is not None:
        state = tpudist.TrainState(model, optimizer, batches=batches, history=history)
        saves = Saves(state, history, saved_in, every=2)
    history = loop.train(
        strategy,
        steps.make_train_step(distance),
        (model, optimizer),
        batches,
        num_steps=num_steps,
        unit=loop.Unit("nats", 1.0, "examples", 8),
        evaluate=evaluate or (lambda: {"nats": 0.5}),
        evaluate_every=3,
        display=make_display(num_steps, file=out),
        metrics=MetricsWriter(None),
        should_stop=should_stop,
        saves=saves,
        history=history,
    )
    if saves is not None:
        saves.close()
    return history, model, optimizer, out.getvalue()


def test_training_follows_the_gradient_of_the_global_batch(strategy):
    history, *_ = run(strategy)
    scale, want = 3.0, []
    for _ in range(8):
        want.append((scale - 1) ** 2)
        scale -= 0.1 * 2 * (scale - 1)
    np.testing.assert_allclose(history.losses, want, rtol=1e-5)
    assert history.ended == "finished"
    assert history.num_steps == 8
    assert 0 < history.median_step_s < 10


def test_held_out_examples_are_judged_every_so_often_and_at_the_end(strategy):
    history, _, _, printed = run(strategy)
    assert [step for step, _ in history.held_out] == [3, 6, 8]
    assert "step 6/8  held out 0.500 nats" in printed


def test_a_run_that_is_asked_to_stop_keeps_what_it_has(strategy):
    asked = iter([False] * 4 + [True])
    history, model, optimizer, _ = run(strategy, should_stop=lambda: next(asked))
    assert history.ended == "interrupted"
    assert history.num_steps == 4
    told = dict(rows(strategy, model, optimizer, history, loop.Unit("nats", 1.0, "x", 8), {"b": 2}))
    assert told["  b baseline"] == "2.000, beaten by 1.500"


def test_a_run_may_be_stopped_before_its_first_step(strategy):
    history, model, optimizer, _ = run(strategy, should_stop=lambda: True)
    assert (history.ended, history.num_steps, history.held_out) == ("interrupted", 0, [])
    assert math.isnan(history.median_step_s)
    told = dict(rows(strategy, model, optimizer, history, loop.Unit("nats", 1.0, "x", 8), {"b": 2}))
    assert told["  b baseline"] == "2.000"
    assert "step time" not in told


def test_a_loss_that_is_no_number_ends_the_run(strategy):
    history, *_ = run(strategy, num_steps=30, learning_rate=1e30)
    assert history.ended == "diverged"
    assert history.num_steps < 30
    assert not math.isfinite(history.losses[-1])


def test_a_loss_that_is_no_number_is_not_saved(strategy, tmp_path):
    history, *_ = run(strategy, num_steps=30, learning_rate=1e30, saved_in=tmp_path)
    assert history.ended == "diverged"
    assert all(int(path.name) < history.num_steps for path in tmp_path.iterdir())
    again, *_ = run(strategy, num_steps=30, learning_rate=1e30, saved_in=tmp_path)
    assert again.num_steps == history.num_steps  # from the last good one it comes to the same


def test_sigterm_in_an_evaluation_saves_the_step_and_the_evaluation_is_done_again(
    strategy, tmp_path
):
    """Iterators of held-out examples are watched too: grace periods are short."""
    held_out = strategy.experimental_distribute_dataset(InOrder({"x": np.arange(64)}, 8))

    def evaluate():
        signal.raise_signal(signal.SIGTERM)
        assert len(list(held_out)) == 8
        raise AssertionError("SIGTERM was not heard")

    history, *_ = run(strategy, evaluate=evaluate, saved_in=tmp_path)
    assert (history.ended, history.num_steps, history.held_out) == ("preempted", 3, [])
    assert history.num_saves == 2
    assert history.blocked_s > 0
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}

    again, _, _, printed = run(strategy, saved_in=tmp_path)
    assert [step for step, _ in again.held_out] == [3, 6, 8]
    assert printed.startswith("step 3/8  held out 0.500 nats")
    whole, *_ = run(strategy)
    assert history.losses + again.losses == whole.losses
    assert (again.num_steps, again.first_step) == (8, 4)


def test_a_partial_batch_counts_by_its_examples(strategy):
    """Not by its replicas: two of the eight hold nothing here but padding."""
    model = strategy.create(Scale)
    values = np.arange(22, dtype=np.float32)
    batches = strategy.experimental_distribute_dataset(InOrder({"x": values}, 16))
    step = steps.make_evaluation_step(
        lambda model, batch: {"x": batch["x"], "both": jnp.stack([batch["x"], -batch["x"]], axis=1)}
    )
    means = steps.evaluate(strategy, step, model, batches)
    assert means["x"] == pytest.approx(values.mean())
    np.testing.assert_allclose(means["both"], [values.mean(), -values.mean()], rtol=1e-6)


def test_one_process_stops_when_it_wants_to(strategy):
    wants = False
    should_stop = steps.make_should_stop(strategy, lambda: wants)
    assert not should_stop()
    wants = True
    assert should_stop()


def successor_logits(model: Successor, tokens: jnp.ndarray) -> jnp.ndarray:
    return nnx.one_hot(tokens + 1, 256) * model.sure[...]


@pytest.mark.parametrize("prompt", [b"a", b"xyza", b"much longer than the window: a"])
def test_text_goes_on_from_the_last_byte_of_the_prompt(strategy, prompt):
    """Before the window is full, when it is, and after."""
    model = strategy.create(Successor)
    written = generate(strategy, successor_logits, model, prompt, num_bytes=10, window=6)
    assert written == b"bcdefghijk"


def test_another_seed_writes_another_text(strategy):
    model = strategy.create(Successor)

    def write(**options):
        options = {"num_bytes": 20, "window": 4, "temperature": 40.0} | options
        return generate(strategy, successor_logits, model, b"a", **options)

    assert write() == write()
    assert write() != write(seed=1)


def test_a_prompt_and_a_temperature_are_needed_to_write(strategy):
    model = strategy.create(Successor)
    with pytest.raises(ValueError, match="empty prompt. Give it a byte at least"):
        generate(strategy, successor_logits, model, b"", num_bytes=1, window=4)
    with pytest.raises(ValueError, match="temperature=0. It must be positive"):
        generate(strategy, successor_logits, model, b"a", num_bytes=1, window=4, temperature=0)
