"""`Strategy.verify` tells a right distributed step from a wrong one, and names cause and line."""

import dataclasses
import linecache
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.testing import assert_same_as_one_device
from tpudist.verification import comparison

N = 2
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 3)).astype(np.float32),
    "y": RNG.normal(size=16).astype(np.float32),
    "m": ((np.arange(16) % 3 > 0) & (np.arange(16) < 13)).astype(np.float32),
}


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy([f"cpu:{i}" for i in range(N)])


@pytest.fixture(scope="module")
def batch(strategy):
    return batch_of(strategy, BATCH)


def batch_of(strategy, arrays):
    dataset = strategy.experimental_make_numpy_dataset(arrays).batch(16)
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def errors(w, b):
    return jnp.square(b["x"] @ w - b["y"])


def reduce(op, x):
    return tpudist.get_replica_context().all_reduce(op, x)  # line of: reduce


def mean(w, b):
    return errors(w, b).mean()


def average(w, b):
    return tpudist.compute_average_loss(errors(w, b))


def masked_by_own_count(w, b):
    return (errors(w, b) * b["m"]).sum() / b["m"].sum()  # line of: masked


def masked_by_count_of_all(w, b):
    return (errors(w, b) * b["m"]).sum() / reduce("sum", b["m"].sum())


def reduced_inside(w, b):
    return reduce("sum", average(w, b))


def dropped(w, b):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("replica"))
    return (errors(w, b) * jax.random.bernoulli(key, 0.5, b["y"].shape)).mean()


def dropped_in_a_loop(w, b):
    keys = jax.random.split(tpudist.get_replica_context().random_key(jax.random.key(0)), 2)

    def turn(values, key):
        return values * jax.random.bernoulli(key, 0.5, values.shape), None

    return jax.lax.scan(turn, errors(w, b), keys)[0].mean()


def with_decay(w, b):
    return average(w, b) + 0.1 * jnp.square(w).sum()  # line of: mixed


def with_a_mean(w, b):
    key = tpudist.get_replica_context().random_key(jax.random.PRNGKey(0))
    draws = jax.random.normal(key, b["y"].shape)
    return average(w, b) + jnp.cos(b["x"] @ w + draws).mean()  # line of: mixed


def clip_as_tensorflow(g):
    return g * 1e6 / jnp.maximum(jnp.linalg.norm(g), 1e6)


def in_parts(w, b):
    parts = jnp.split(jnp.repeat(w, N), jax.lax.axis_size("replica"))  # one part on one device
    return mean(jnp.concatenate(parts)[::N], b)


def clip(g):
    return g * jnp.minimum(1.0, 0.1 / jnp.linalg.norm(g))  # line of: clip


def stepper(loss, reduction, before=lambda g: g):
    def step(w, b):
        g = before(jax.grad(loss)(w, b))
        if reduction is not None:
            g = reduce(reduction, g)
        return w - 0.1 * g  # line of: update

    return step


def sum_of_changes(w, b):
    return w + reduce("sum", stepper(average, None)(w, b) - w)


RIGHT = {
    "a sum of changes": sum_of_changes,
    "a mean that is averaged": stepper(mean, "mean"),
    "a loss over all rows that is summed": stepper(average, "sum"),
    "a masked loss over the count of all": stepper(masked_by_count_of_all, "sum"),
    "a loss that is reduced inside": stepper(reduced_inside, "mean"),
    "clipped before at a norm that is not reached": stepper(average, "sum", clip_as_tensorflow),
    "dropout": stepper(dropped, "mean"),
    "dropout in a loop": stepper(dropped_in_a_loop, "mean"),
}
WRONG = {
    "a mean that is summed": (stepper(mean, "sum"), N, "reduce"),
    "averaged twice": (stepper(average, "mean"), 1 / N, "reduce"),
    "not reduced": (stepper(average, None), None, "update"),
    "a masked loss over the own count": (stepper(masked_by_own_count, "sum"), N, "masked"),
    "a masked loss that is averaged": (stepper(masked_by_own_count, "mean"), None, "masked"),
    "reduced inside and again": (stepper(reduced_inside, "sum"), N, "reduce"),
    "a share and a decay": (stepper(with_decay, "sum"), None, "mixed"),
    "a share and a mean": (stepper(with_a_mean, "sum"), None, "mixed"),
    "as many parts as replicas": (stepper(in_parts, "sum"), N, "reduce"),
    "clipped before": (stepper(mean, "mean", before=clip), None, "clip"),
    "dropout that is summed": (stepper(dropped, "sum"), N, "reduce"),
    "dropout and clipped before": (stepper(dropped, "mean", before=clip), None, "clip"),
    "dropout and not reduced": (stepper(dropped, None), None, "update"),
    "dropout in a loop and clipped before": (
        stepper(dropped_in_a_loop, "mean", clip),
        None,
        "clip",
    ),
}


def on_full_batches(report):
    return [x for x in report.differences if x.comparison != "tail"]


QUICK = (
    "clipped before at a norm that is not reached",
    "dropout in a loop",
    "a masked loss over the own count",
    "not reduced",
    "clipped before",
)


def in_part(names):
    """The cases that are quick together reach all that there is."""
    return [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in names]


@pytest.mark.parametrize("name", in_part(RIGHT))
def test_a_right_step_has_no_difference(strategy, batch, name):
    report = strategy.verify(RIGHT[name], (jnp.ones(3), batch))
    assert on_full_batches(report) == [], str(report)


@pytest.mark.parametrize("name", in_part(WRONG))
def test_a_wrong_step_is_found_with_its_factor_and_its_line(strategy, batch, name):
    step, factor, line = WRONG[name]
    found, *_ = on_full_batches(strategy.verify(step, (jnp.ones(3), batch)))
    file, _, number = found.where.rpartition(":")
    assert f"# line of: {line}" in linecache.getline(file, int(number)), found
    if factor is not None:
        assert found.factor == pytest.approx(factor, rel=1e-3)
        assert f"{factor:.4g} times" in found.cause


def test_a_mean_of_means_differs_only_on_a_partial_batch(strategy, batch):
    report = strategy.verify(RIGHT["a mean that is averaged"], (jnp.ones(3), batch))
    assert {x.comparison for x in report.differences} == {"tail"}
    assert report.ok
    assert not report.exact_on_partial_batches
    assert "only on a partial batch" in report.differences[0].cause


def test_a_count_of_rows_is_right_if_it_is_reduced(strategy, batch):
    def step(count, b):
        return count + reduce("sum", b["m"].sum()), count

    report = strategy.verify(step, (jnp.zeros(()), batch))
    assert report.ok, str(report)
    assert set(report.compared) == {"copies", "rows", "tail"}


@pytest.mark.parametrize("made", ["outside", pytest.param("in the step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_key_for_all_replicas_is_found(strategy, batch, shares, made):
    def step(w, key, b):
        key = jax.random.key(0) if made == "in the step" else key
        own = key if shares else tpudist.get_replica_context().random_key(key)
        noise = jax.random.normal(own, b["y"].shape)  # line of: draw
        gradient = jax.grad(lambda w: (errors(w, b) * noise).mean())(w)
        common = jax.random.normal(key, w.shape)
        return w - reduce("mean", gradient) + 0.1 * common

    report = strategy.verify(step, (jnp.ones(3), jax.random.key(0), batch))
    assert report.ok is not shares, str(report)
    if shares:
        (found,) = on_full_batches(report)
        file, _, number = found.where.rpartition(":")
        assert found.comparison == "program"
        assert "# line of: draw" in linecache.getline(file, int(number))


def test_a_sum_that_clipping_hides_is_found_in_the_program(strategy, batch):
    def step(w, b):
        gradient = reduce("sum", jax.grad(mean)(w, b))
        return w - optax.clip_by_global_norm(1e-3).update(gradient, optax.EmptyState())[0]

    found, *_ = on_full_batches(strategy.verify(step, (jnp.ones(3), batch)))
    assert (found.comparison, found.factor) == ("program", N)


def test_a_batch_that_all_replicas_have_is_found(strategy):
    part = {k: x[: len(x) // N] for k, x in BATCH.items()}
    parts = {
        k: strategy.experimental_distribute_values_from_function(lambda _, x=x: x)
        for k, x in part.items()
    }
    (found,) = on_full_batches(
        strategy.verify(RIGHT["a mean that is averaged"], (jnp.ones(3), parts))
    )
    assert "same rows" in found.cause


def test_an_average_of_own_steps_is_found(strategy, batch):
    def step(w, average_w, b):
        g = jax.grad(mean)(w, b)
        mine = w - 0.1 * g
        return w - 0.1 * reduce("mean", g), 0.9 * average_w + 0.1 * mine

    found, *_ = on_full_batches(strategy.verify(step, (jnp.ones(3), jnp.ones(3), batch)))
    assert found.leaf == "result[1]"
    assert "differs between replicas" in found.cause


@pytest.mark.filterwarnings("ignore::tpudist.LocalMeanWarning")
def test_a_partial_batch_is_filled_and_the_note_about_it_is_left_to_the_run(strategy, caplog):
    rows = {k: np.concatenate([x, x[:1]]) for k, x in BATCH.items()}
    dataset = strategy.experimental_make_numpy_dataset(rows).batch(16)
    _, partial = strategy.experimental_distribute_dataset(dataset)
    step = RIGHT["a mean that is averaged"]
    report = strategy.verify(step, (jnp.ones(3), partial), rows=N)
    assert report.ok, str(report)
    assert "The batch is partial" in report.notes[0]
    assert "have no rows" not in caplog.text
    strategy.run(step, (jnp.ones(3), partial))
    assert "have no rows" in caplog.text


@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_are_exchanged_where_their_positions_count(strategy, batch, clips):
    """Each replica draws one time in each part of an interval, as many parts as it has rows."""

    def step(w, b):
        key = tpudist.get_replica_context().random_key(jax.random.key(0))
        count = len(b["y"])
        times = (jax.random.uniform(key, (count,)) + jnp.arange(count)) / count
        g = jax.grad(lambda w: (times * jnp.square(b["x"] @ w - b["y"])).mean())(w)
        return w - 0.1 * reduce("mean", g / jnp.linalg.norm(g) if clips else g)

    report = strategy.verify(step, (jnp.ones(3), batch))
    assert report.ok != clips, str(report)
    assert "positions of rows" in report.notes[-1]
    assert {x.comparison for x in report.differences} == ({"rows"} if clips else set())


def test_rows_are_not_exchanged_if_arguments_have_different_numbers_of_rows(strategy, batch):
    """Each label belongs to two rows, which an exchange at equal positions would separate."""

    def step(w, rows, labels):
        count = len(rows)
        order = jnp.argsort(jax.random.uniform(jax.random.key(0), (count,)) * 0 + jnp.arange(count))
        pairs = rows[order].reshape(len(labels), -1, 3).mean(1)
        return w - 0.1 * reduce(
            "mean", jax.grad(lambda w: jnp.square(pairs @ w - labels).mean())(w)
        )

    labels = strategy.distribute_batch(BATCH["y"][: 2 * N])
    report = strategy.verify(step, (jnp.ones(3), batch["x"], labels))
    assert report.ok, str(report)
    assert set(report.compared) == {"copies"}
    assert "numbers of rows" in report.skipped["rows"]


@pytest.mark.parametrize("uses", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_accepts_a_sum_over_rows_with_draws(strategy, batch, uses):
    """One device with each row once has a smaller sum than replicas with copies of the rows."""

    def step(w, b):
        key = tpudist.get_replica_context().random_key(jax.random.key(0))
        first = jnp.arange(len(b["y"])) < 1  # NumPyro's plates do not use theirs
        draws = jax.random.normal(key, b["y"].shape) * (first if uses else 1)
        g = jax.grad(lambda w: jnp.square(b["x"] @ w + draws - b["y"]).sum())(w)
        return w - 0.01 * reduce("sum", g)

    report = strategy.verify(step, (jnp.ones(3), batch))
    assert report.ok, str(report)
    assert ("tail" in report.compared) != uses
    assert any("sums over rows" in note for note in report.notes) == uses


def test_verify_accepts_the_rounding_of_sums(strategy):
    """A variance from a mean of squares loses most digits, also from inputs without an error."""

    def step(w, b):
        values = 50.3 + b["x"][:, 0] / 10
        first, square = reduce("mean", (values.mean(), (values**2).mean()))
        normalized = (values - first) / jnp.sqrt(jnp.abs(square - first**2) + 1e-8)
        g = jax.grad(lambda w: (normalized * jnp.tanh(b["x"] @ w)).mean())(w)
        return w - 0.1 * reduce("mean", g)

    rows = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
    report = strategy.verify(step, (jnp.ones(3), batch_of(strategy, {"x": rows})))
    assert on_full_batches(report) == [], str(report)


def test_complex_numbers_have_a_factor():
    one = np.asarray([1 + 2j, -1j], np.complex64)
    nearby = [(np.zeros_like(one), one)]
    found = comparison.compare(
        comparison.Pair("w", 0, np.zeros_like(one), one, nearby, 2 * one), 1e-7
    )
    assert found is not None
    assert found.factor == pytest.approx(2)
    assert found.max_error == pytest.approx(5**0.5)


def test_comparison_accepts_the_rounding_of_addends_that_cancel():
    """The gradient of a bias before batch normalization is zero except for rounding."""
    rest = np.array([1.0, -2.0, 0.5, 1.5])
    near = [(None, rest * 0.2e-9)]
    values = comparison.Pair("mu", 0, None, rest * 1e-9, near, 8 * rest[[1, 3, 0, 2]] * 1e-9)
    assert comparison.compare(values, 1e-7, 1) is not None
    assert comparison.compare(values, 1e-7, 8) is None
    exact = dataclasses.replace(values, disturbed=[(None, rest * (1 + 1e-7) * 1e-9)])
    assert comparison.compare(exact, 1e-7, 8) is not None


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout, self.outer = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))[:, 0]


@pytest.mark.parametrize(
    ("reduce_op", "factor"), [("mean", None), pytest.param("sum", N, marks=pytest.mark.slow)]
)
def test_nnx_state_is_compared_and_stays_as_it_was(strategy, batch, reduce_op, factor):
    with strategy.scope():
        model = strategy.create(lambda: Net(nnx.Rngs(0)))
        optimizer = tpudist.Optimizer(optax.adam(0.1), model, reduce_op=reduce_op)

    def step(model, optimizer, b):
        gradients = nnx.grad(lambda m: jnp.square(m(b["x"]) - b["y"]).mean())(model)
        optimizer.update(model, gradients)

    def state():
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Param)))

    before = state()
    report = strategy.verify(step, (model, optimizer, batch))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, state()))
    assert set(report.skipped) == {"rows", "tail"}
    assert report.ok == (factor is None), str(report)
    if factor is not None:
        assert "2 times" in report.differences[0].cause


@pytest.mark.parametrize(
    ("loss", "is_right"),
    [(reduced_inside, True), pytest.param(mean, True, marks=pytest.mark.slow), (average, False)],
)
def test_an_average_is_compared_by_its_value(strategy, batch, loss, is_right):
    metrics = strategy.create(lambda: nnx.MultiMetric(loss=nnx.metrics.Average()))
    report = strategy.verify(
        lambda metrics, b: metrics.update(values=loss(jnp.ones(3), b)), (metrics, batch)
    )
    assert report.ok is is_right, str(report)
    if not is_right:
        (found,) = on_full_batches(report)
        assert found.remedy.startswith("Pass the losses of the examples to the metric"), found


def test_a_total_and_a_count_of_another_class_are_not_an_average(strategy, batch):
    """Their quotient may have no meaning."""

    class Sums(nnx.Metric):
        def __init__(self):
            self.total = nnx.metrics.MetricState(jnp.zeros(()))
            self.count = nnx.metrics.MetricState(jnp.zeros(()))

    def step(sums, b):
        sums.total[...] += reduce("sum", reduce("sum", b["m"].sum()))
        sums.count[...] += reduce("sum", reduce("sum", b["m"].sum()))

    report = strategy.verify(step, (strategy.create(Sums), batch))
    assert {x.factor for x in on_full_batches(report)} == {N}


def test_a_captured_batch_is_compared_by_its_rows_only(strategy, batch):
    w = jnp.ones(3)
    report = strategy.verify(lambda: stepper(average, "sum")(w, batch))
    assert report.ok
    assert set(report.compared) == {"rows"}
    assert "captures the batch" in report.skipped["copies"]


def test_a_step_without_results_is_not_ok(strategy, batch):
    report = strategy.verify(lambda b: None, (batch,))
    assert not report.ok
    assert "was not compared" in str(report)


def test_a_run_after_it_warns_of_a_sum(strategy, batch):
    step = stepper(mean, "sum")
    assert not strategy.verify(step, (jnp.ones(3), batch)).ok
    for number in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step, (jnp.ones(3), batch))
        assert [x.category for x in caught] == [tpudist.LocalMeanWarning] * number


def test_an_assertion_raises_the_report(strategy, batch):
    step = WRONG["a mean that is summed"][0]
    with pytest.raises(tpudist.VerificationError, match=r"DIFFERS FROM one device.*\n- 2 times"):
        assert_same_as_one_device(step, (jnp.ones(3), batch), strategy=strategy)


def test_an_environment_variable_verifies_the_first_call(monkeypatch):
    monkeypatch.setenv("TPUDIST_VERIFY", "1")
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    batch = batch_of(strategy, BATCH)
    strategy.run(stepper(average, "sum"), (jnp.ones(3), batch))
    with pytest.raises(tpudist.VerificationError, match="not reduced"):
        strategy.run(stepper(average, None), (jnp.ones(3), batch))
