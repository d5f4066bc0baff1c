"""Keras models, optimizers and metrics that replica functions change match one device."""

import copy
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import tpudist
from keras_loops import Loop, X, Y, assert_equal, batch_of, one


def mirrored():
    return tpudist.MirroredStrategy()


def split():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 4})


METRICS = (
    lambda: keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),
    lambda: keras.metrics.BinaryCrossentropy(from_logits=True),
    lambda: keras.metrics.AUC(from_logits=True, name="area"),
)


def run(step):
    return step


@functools.cache
def trained(make_strategy, around=run, is_built=True):
    """Trains a loop for two epochs; returns the loop, its losses and its metrics."""
    is_plain = (around, is_built) == (run, True)
    loop = Loop(make_strategy(), is_built=is_built, metrics=METRICS if is_plain else METRICS[:2])
    return loop, np.reshape(loop.train(60, num_epochs=2, around=around), (2, -1))


# Covers each option once; the other combinations are exhaustive.
COVER = [(mirrored, run, True), (split, tpudist.function, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_strategy", "around", "is_built"),
    [
        pytest.param(
            *case,
            id="-".join([case[0].__name__, case[1].__name__, "built" if case[2] else "unbuilt"]),
            marks=() if case in COVER else pytest.mark.exhaustive,
        )
        for case in itertools.product((mirrored, split), (run, tpudist.function), (True, False))
    ],
)
def test_a_loop_matches_one_device(make_strategy, around, is_built):
    """Batches of 60, 60, 60 and 7 rows: in the last one, seven of the 8 replicas have no rows."""
    (alone, wanted), (loop, found) = trained(one), trained(make_strategy, around, is_built)
    assert wanted.shape == (2, 4 + 3)
    assert found.shape[1] >= 4 + 2
    np.testing.assert_allclose(found, wanted[:, : found.shape[1]], atol=1e-5)
    assert_equal(loop, alone, atol=1e-5)
    assert int(loop.optimizer.iterations.value) == 8


@pytest.mark.slow
def test_a_loop_matches_fit_on_one_device():
    loop, found = trained(mirrored)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)]
    )
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[METRICS[0](), METRICS[2]()],
    )
    history = model.fit(X, Y, batch_size=60, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found[:, 4], history["accuracy"], atol=1e-5)
    np.testing.assert_allclose(found[:, 5], history["loss"], atol=1e-5)
    np.testing.assert_allclose(found[:, 6], history["area"], atol=1e-5)
    for a, b in zip(loop.model.variables, model.variables, strict=True):
        np.testing.assert_allclose(a.value, b.value, atol=1e-5)


@pytest.mark.slow
def test_fit_and_custom_loops_can_alternate():
    """Each continues with the state that the other left, in the arrays that Keras holds."""
    x, y = X[:60], Y[:60]
    found = []
    for strategy in (one(), mirrored()):
        loop = Loop(strategy)
        with strategy.scope():
            loop.model.compile(loop.optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        batch = batch_of(strategy, x, y)
        for _ in range(2):
            loop.run(batch)
            loop.model.fit(x, y, batch_size=60, shuffle=False, verbose=0)
        found.append((loop, loop.model.predict(x, batch_size=60, verbose=0)))
    (alone, wanted), (loop, seen) = found
    assert_equal(loop, alone, atol=1e-5)
    np.testing.assert_allclose(seen, wanted, atol=1e-5)


@pytest.mark.slow
def test_batch_statistics_are_averaged_over_replicas_and_dropout_seeds_advance():
    """Batches of 64, 64 and 59 rows: the last replica has 3 rows of the third batch."""
    norm_and_noise = (
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dropout(0.5, seed=3),
    )
    loop = Loop(mirrored(), *norm_and_noise)
    loop.optimizer.learning_rate.assign(0.0)  # so that all steps see the same activations
    [seed] = loop.model.layers[2].variables
    before = np.asarray(seed.value)
    assert np.isfinite(loop.train(64)).all()
    np.testing.assert_array_equal(seed.value, before + np.array([0, 3], before.dtype))
    dense, norm, *_ = loop.model.layers
    activations = np.asarray(dense(X))
    mean, variance = np.zeros(8), np.ones(8)
    for start in (0, 64, 128):
        rows = activations[start : start + 64]
        parts = [rows[i : i + 8] for i in range(0, len(rows), 8)]
        mean = 0.99 * mean + 0.01 * np.mean([x.mean(0) for x in parts], 0)
        variance = 0.99 * variance + 0.01 * np.mean([x.var(0) for x in parts], 0)
    np.testing.assert_allclose(norm.moving_mean.value, mean, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.value, variance, atol=1e-6)


def variable(values, **options):
    return keras.Variable(np.asarray(values, np.float32), name="state", trainable=False, **options)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"aggregation": "mean"}, 10 + 3.5),
        ({"aggregation": "sum"}, 80 + 28),
        ({"aggregation": "only_first_replica"}, 10),
        ({"aggregation": "mean", "synchronization": "on_read"}, 10 + 3.5),
        ({"aggregation": "sum", "synchronization": "on_read"}, 10 + 28),
    ],
)
def test_a_variable_follows_its_aggregation_rule(options, wanted):
    """Replica i adds i to 10. With ON_READ, the sum over replicas counts the initial 10 once."""
    strategy = mirrored()
    state = variable(10, **options)

    def step():
        replica = tpudist.get_replica_context().replica_id_in_sync_group
        state.assign(state + replica.astype("float32"))

    strategy.run(step)
    assert float(state.value) == wanted


def test_replicas_must_assign_equal_values_without_a_rule():
    strategy = mirrored()
    state, equal = variable(np.zeros(6)), variable(0)

    def step(x):
        equal.assign_add(1)
        state.assign(x.mean(0))

    with pytest.raises(ValueError, match="'state' would differ between replicas") as error:
        strategy.run(step, args=batch_of(strategy, X[:56]))
    assert "argument 'x'" in str(error.value)
    assert "add_weight(..., aggregation='mean')" in str(error.value)
    assert float(equal.value) == 0
    strategy.run(lambda: equal.assign_add(1))
    assert float(equal.value) == 1


def test_gradients_that_are_not_summed_are_rejected():
    loop = Loop(mirrored())

    def step(x, y):
        compute = tpudist.keras.value_and_grad(lambda: loop.model(x).sum(), loop.model)
        for weight, gradient in zip(loop.model.trainable_variables, compute()[1], strict=True):
            weight.assign_sub(0.1 * gradient)

    with pytest.raises(ValueError, match="kernel' would differ between replicas"):
        loop.strategy.run(step, args=batch_of(loop.strategy, X[:56], Y[:56]))


def test_assigning_a_value_of_a_different_shape_raises_an_error():
    state = variable(np.zeros(6))
    with pytest.raises(ValueError, match="must match"):
        mirrored().run(lambda: state.assign(np.zeros(5)))
    np.testing.assert_array_equal(state.value, 0)


def test_reset_state_clears_a_metric_inside_the_step():
    strategy = mirrored()
    with strategy.scope():
        mean = keras.metrics.Mean()
    batch = batch_of(strategy, X[:56])

    def step(x):
        mean.reset_state()
        mean.update_state(x)

    @tpudist.function
    def whole():
        mean.reset_state()
        strategy.run(mean.update_state, args=batch)
        return mean.result()

    for _ in range(2):
        strategy.run(step, args=batch)
        np.testing.assert_allclose(mean.result(), X[:56].mean(), rtol=1e-4)
    with strategy.scope():
        np.testing.assert_allclose(whole(), X[:56].mean(), rtol=1e-4)
    assert float(mean.count.value) == 56


def test_a_metric_result_in_a_replica_function_raises_an_error():
    strategy, alone = mirrored(), one()
    mean = keras.metrics.Mean()
    with pytest.raises(RuntimeError, match="has counted only its own part") as error:
        strategy.run(mean, args=batch_of(strategy, X[:56]))
    assert f"{os.path.basename(__file__)}:" in str(error.value)
    np.testing.assert_allclose(alone.run(mean, args=(X[:56],)), X[:56].mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("update", "count"),
    [
        (lambda mean: jax.jit(lambda x: [mean.update_state(x), None][1]), 56),
        (lambda mean: lambda x: jax.lax.map(lambda row: [mean.update_state(row), 0][1], x), 56 * 6),
        (
            lambda mean: (
                lambda x: jax.lax.cond(
                    x[0, 0] < 1e6, lambda: [mean.update_state(x), 0][1], lambda: 0
                )
            ),
            56,
        ),
    ],
    ids=["jit", "map", "cond"],
)
def test_nested_transformations_update_a_metric(update, count):
    """Replicas choose the branch of `cond` by their own rows, and each counts by itself."""
    strategy = mirrored()
    mean = keras.metrics.Mean()
    change = update(mean)

    def step(x):
        change(x)
        change(x)

    for _ in range(2):
        strategy.run(step, args=batch_of(strategy, X[:56]))
    np.testing.assert_allclose(mean.result(), X[:56].mean(), rtol=1e-4)
    assert float(mean.count.value) == 4 * count


@pytest.mark.slow
def test_updates_in_checkpointed_or_vmapped_code_are_rejected():
    strategy = mirrored()
    loop = Loop(strategy, keras.layers.BatchNormalization)
    batch = batch_of(strategy, X[:56])

    def again(x):
        forward = jax.checkpoint(lambda x: loop.model(x, training=True))
        return tpudist.keras.value_and_grad(lambda: forward(x).sum(), loop.model)()

    def each(x):
        return jax.vmap(lambda row: loop.model(row[None], training=True))(x)

    for step, place in ((again, "inside jax.checkpoint"), (each, "inside jax.vmap")):
        with pytest.raises(RuntimeError, match="moving_mean' *.* assign") as error:
            strategy.run(step, args=batch)
        assert place in str(error.value)
    loop.model.predict(X, verbose=0)


@pytest.mark.slow
def test_arrays_that_were_read_keep_their_values():
    """A step overwrites arrays, so it first copies arrays that were read or are shared."""
    strategy = mirrored()
    loop, target = Loop(strategy), Loop(strategy)
    batch = batch_of(strategy, X[:56], Y[:56])
    first = loop.model.layers[0].kernel.value
    held = [(first, np.asarray(first))]
    for _ in range(3):
        for a, b in zip(target.model.variables, loop.model.variables, strict=True):
            a.assign(b)
        read = loop.model.layers[0].kernel.value
        held.append((read, np.asarray(read)))
        copied = copy.deepcopy(loop.model.layers[0].kernel)
        before = [np.asarray(v.value) for v in target.model.variables]
        loop.run(batch)
        for array, value in held:
            np.testing.assert_array_equal(array, value)
        np.testing.assert_array_equal(copied.value, held[-1][1])
        for a, b in zip(target.model.variables, before, strict=True):
            np.testing.assert_array_equal(a.value, b)
        assert np.abs(np.asarray(loop.model.layers[0].kernel.value) - held[-1][1]).max() > 0


@pytest.mark.slow
def test_a_variable_of_a_batch_norm_subclass_follows_its_own_rule():
    """Only the batch statistics are averaged. Another variable differs and raises an error."""

    class Counted(keras.layers.BatchNormalization):
        def build(self, shape):
            super().build(shape)
            self.seen = self.add_weight(shape=(), trainable=False, name="seen")

        def call(self, x, training=False):
            self.seen.assign(keras.ops.sum(x))
            return super().call(x, training=training)

    loop = Loop(mirrored(), Counted)
    with pytest.raises(ValueError, match="seen' would differ between replicas"):
        loop.run(batch_of(loop.strategy, X[:56], Y[:56]))


def test_a_copied_variable_is_independent():
    strategy = mirrored()
    state = variable(1)
    strategy.run(lambda: state.assign_add(1))
    other = copy.copy(state)
    strategy.run(lambda: other.assign_add(5))
    assert (float(state.value), float(other.value)) == (2, 7)
    strategy.run(lambda: state.assign_add(1))
    assert (float(state.value), float(other.value)) == (3, 7)


@pytest.mark.slow
def test_one_model_works_under_two_strategies_in_turn():
    strategies, loop = (mirrored(), split()), Loop(mirrored())
    alone = Loop(one())
    for strategy in strategies * 2:
        loop.strategy = strategy
        loop.run(batch_of(strategy, X[:56], Y[:56]))
        alone.run(batch_of(alone.strategy, X[:56], Y[:56]))
    assert_equal(loop, alone, atol=1e-5)


def test_arrays_are_overwritten_in_place():
    """Arrays that nobody reads between steps are donated to the compiler, as for Variables."""
    loop = Loop(mirrored())
    batch = batch_of(loop.strategy, X[:56], Y[:56])
    for _ in range(2):
        loop.run(batch)
    held = [x._value for x in loop.variables]  # a read would be noted
    loop.run(batch)
    kept = [x.path for x, old in zip(loop.variables, held, strict=True) if not old.is_deleted()]
    assert kept == [loop.optimizer.learning_rate.path]


@pytest.mark.slow
def test_a_retraced_step_leaves_other_variables_unchanged():
    """While JAX traces the step, an unrelated metric was reset and is placed on one device."""
    loop = Loop(mirrored())
    other = keras.metrics.Mean()
    loop.strategy.run(other.update_state, args=batch_of(loop.strategy, X[:56]))
    for rows in (56, 40):
        other.reset_state()
        loop.run(batch_of(loop.strategy, X[:rows], Y[:rows]))
        assert float(other.total.value) == 0
        assert isinstance(other.total._value, jax.Array)
        assert not isinstance(other.total._value, jax.core.Tracer)


@pytest.mark.slow
def test_gradients_are_summed_in_one_collective():
    loop = Loop(mirrored())
    batch = batch_of(loop.strategy, X[:56], Y[:56])

    def step(x, y):
        compute = tpudist.keras.value_and_grad(lambda: jnp.sum(loop.model(x) - y), loop.model)
        loop.optimizer.apply(compute()[1], loop.model.trainable_variables)

    loop.strategy.run(step, args=batch)
    text = loop.strategy.lower(step, args=batch).compile().as_text()
    assert text.count(" all-reduce(") == 1


@pytest.mark.slow
def test_a_model_built_by_its_first_call_is_built_once():
    strategy = mirrored()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    batch = batch_of(strategy, X[:56])
    results = [strategy.run(model, args=batch) for _ in range(2)]
    assert len(model.variables) == 4
    for found in results:
        parts = strategy.experimental_local_results(found)
        np.testing.assert_allclose(np.concatenate(parts), model(X[:56]), atol=1e-5)
    model.layers[-1].bias.assign([3.0])
    again = strategy.run(lambda x: model(x), args=batch)
    np.testing.assert_allclose(
        np.concatenate(strategy.experimental_local_results(again)), model(X[:56]), atol=1e-5
    )


@pytest.mark.slow
def test_a_step_that_changes_the_model_between_batches_of_fit_raises_an_error():
    strategy = mirrored()
    loop = Loop(strategy)
    with strategy.scope():
        loop.model.compile(loop.optimizer, "mse")
        other = tpudist.Variable(0.0)
    batch = batch_of(strategy, X[:56], Y[:56])
    loop.run(batch)

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch_number, logs=None):
            strategy.run(lambda: other.assign_add(1.0))  # which has nothing to do with it
            with pytest.raises(RuntimeError, match="which holds no value now: while `fit` runs"):
                loop.run(batch)

        def on_epoch_end(self, epoch, logs=None):
            loop.run(batch)

    loop.model.fit(X, Y, verbose=0, batch_size=100, epochs=2, callbacks=[Change()])
    assert float(other.read_value()) == 4
    assert int(loop.optimizer.iterations.value) == 1 + 2 * (2 + 1)


def test_assigning_in_debug_mode_raises_an_error():
    strategy = mirrored()
    state = variable(0)
    with strategy.debug(), pytest.raises(RuntimeError, match="While functions run eagerly"):
        strategy.run(lambda: state.assign(1))
    assert float(state.value) == 0


def test_a_coordinator_closure_cannot_change_a_model():
    strategy = tpudist.ParameterServerStrategy(num_workers=1)
    coordinator = tpudist.coordinator.ClusterCoordinator(strategy)
    state = variable(0)

    def closure():
        inner = tpudist.get_strategy()
        inner.run(lambda: state.assign_add(1))

    coordinator.schedule(closure)
    with pytest.raises(RuntimeError, match="A coordinator has scheduled the function"):
        coordinator.join()
    assert float(state.value) == 0
    coordinator.shutdown()
