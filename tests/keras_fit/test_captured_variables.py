"""Keras models that replica functions capture: each call reads their current values."""

import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest

import tpudist

X = np.random.default_rng(0).normal(size=(61, 6)).astype(np.float32)
Y = (X.sum(1, keepdims=True) > 0).astype(np.float32)


def mirrored():
    return tpudist.MirroredStrategy()


def split():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 4})


def one():
    return tpudist.OneDeviceStrategy(jax.devices()[0])


def make_model(strategy, *layers):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "gelu"), *(make() for make in layers)]
        )
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse")
    return model


def batch_of(strategy, rows=X):
    dataset = tpudist.NumpyDataset(rows).batch(len(rows))
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def join(strategy, value):
    return np.concatenate(list(map(np.asarray, strategy.experimental_local_results(value))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_strategy", [mirrored, split, pytest.param(one, marks=pytest.mark.exhaustive)]
)
def test_a_step_reads_the_current_values_of_a_model(make_strategy):
    strategy = make_strategy()
    model = make_model(strategy, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5))
    batch = batch_of(strategy, X[:56])

    def infer(x):
        return model(x, training=False)

    seen = []
    for _ in range(3):
        seen.append(join(strategy, strategy.run(infer, args=(batch,))))
        wanted = model.predict(X[:56], batch_size=56, verbose=0)
        np.testing.assert_allclose(seen[-1], wanted, atol=1e-5)
        model.fit(X, Y, batch_size=61, verbose=0)
    assert np.abs(seen[1] - seen[0]).max() > 1e-4
    model.layers[-1].kernel.assign(np.zeros((8, 1)))
    model.layers[-1].bias.assign([3.0])
    np.testing.assert_array_equal(join(strategy, strategy.run(infer, args=(batch,))), 3.0)


@pytest.mark.slow
def test_losses_of_a_partial_batch_match_one_device():
    strategy = mirrored()
    model = make_model(strategy)
    batch = batch_of(strategy, X[:11])
    squared = keras.losses.MeanSquaredError(reduction="none")

    def measure(x):
        return tpudist.compute_average_loss(squared(model(x), x[:, :1]))

    for _ in range(2):
        found = strategy.reduce("sum", strategy.run(measure, args=(batch,)), axis=None)
        wanted = np.mean((model.predict(X[:11], verbose=0) - X[:11, :1]) ** 2)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        model.fit(X, Y, batch_size=61, verbose=0)


@pytest.mark.slow
def test_a_model_is_read_in_nested_transformations_and_cross_replica_functions():
    strategy = mirrored()
    model = make_model(strategy)
    batch = batch_of(strategy, X[:56])
    of_rows = jax.jit(lambda x: model(x).sum())

    def nested(x):
        return jax.grad(lambda x: of_rows(x) + jax.checkpoint(of_rows)(x))(x)

    @tpudist.function
    def whole():
        bias = model.layers[-1].bias.value
        return strategy.reduce("sum", strategy.run(of_rows, args=(batch,)), axis=None), bias

    for _ in range(2):
        wanted = jax.grad(lambda x: 2 * model(x).sum())(X[:56])
        found = join(strategy, strategy.run(nested, args=(batch,)))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        with strategy.scope():
            total, bias = whole()
        np.testing.assert_allclose(total, np.sum(model(X[:56])), rtol=1e-4)
        np.testing.assert_array_equal(bias, model.layers[-1].bias.value)
        model.fit(X, Y, batch_size=61, verbose=0)


@pytest.mark.slow
def test_a_captured_model_is_cast_by_its_dtype_policy():
    strategy = mirrored()
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = make_model(strategy)
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    found = strategy.run(model, args=(batch_of(strategy, X[:56]),))
    wanted = np.asarray(model(X[:56]), np.float32)
    np.testing.assert_allclose(join(strategy, found).astype(np.float32), wanted, atol=0.02)
    assert strategy.experimental_local_results(found)[0].dtype == "bfloat16"


def test_a_model_made_outside_all_scopes_is_read():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    for strategy in (tpudist.get_strategy(), mirrored()):
        for value in (1.0, 2.0):
            model.layers[0].kernel.assign(np.full((6, 1), value))
            found = strategy.run(lambda x: model(x).sum(), args=(X[:1],))
            found = np.asarray(strategy.experimental_local_results(found)[0])
            np.testing.assert_allclose(found, value * X[:1].sum(), rtol=1e-5)


@pytest.mark.slow
def test_jax_grad_uses_the_current_weights_of_a_model():
    strategy = mirrored()
    model = make_model(strategy)
    batch = batch_of(strategy, X[:56])

    def compute(weights, x):
        return model.stateless_call(weights, [], x)[0].sum()

    def step(x):
        weights = [x.value for x in model.trainable_variables]
        gradients = jax.grad(compute)(weights, x)
        return tpudist.get_replica_context().all_reduce("sum", gradients)

    for _ in range(2):
        found = strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]
        wanted = jax.grad(compute)([x.value for x in model.trainable_variables], X[:56])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)
        model.fit(X, Y, batch_size=61, verbose=0)


@pytest.mark.slow
def test_a_step_may_create_layers_for_its_own_use():
    strategy = mirrored()

    def step(x):
        dropped = keras.layers.Dropout(0.5, seed=0)(keras.layers.Rescaling(2.0)(x), training=True)
        return keras.layers.Dense(3)(dropped)

    for _ in range(2):
        found = strategy.run(step, args=(batch_of(strategy, X[:56]),))
        assert join(strategy, found).shape == (56, 3)


def test_a_value_of_one_trace_is_rejected_in_another():
    """The step creates a layer and stores it outside."""
    strategy = mirrored()
    batch, kept = batch_of(strategy, X[:56]), []

    def step(x):
        kept.append(keras.layers.Dense(3))
        return kept[-1](x)

    strategy.run(step, args=(batch,))
    for use in (
        lambda: strategy.run(lambda x: kept[-1](x) + 1, args=(batch,)),
        lambda: kept[-1](X),
    ):
        with pytest.raises(RuntimeError, match="was made while a replica function was") as error:
            use()
        assert "keras.Input(shape)" in str(error.value)


@pytest.mark.slow
def test_a_step_that_reads_the_model_between_batches_of_fit_raises_an_error():
    strategy = mirrored()
    model = make_model(strategy)
    batch = batch_of(strategy, X[:56])

    def infer(x):
        return model(x)

    strategy.run(infer, args=(batch,))
    seen = []

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch_number, logs=None):
            with pytest.raises(RuntimeError, match="which holds no value now: while `fit` runs"):
                strategy.run(infer, args=(batch,))

        def on_epoch_end(self, epoch, logs=None):
            seen.append(join(strategy, strategy.run(infer, args=(batch,))))

    model.fit(X, Y, verbose=0, callbacks=[Measure()])
    np.testing.assert_allclose(seen[0], model.predict(X[:56], verbose=0), atol=1e-5)


_LATER = """
import sys
import tpudist

tpudist.emulate(num_devices=2)
strategy = tpudist.MirroredStrategy()
import keras
import numpy as np

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
x = np.ones((1, 2), np.float32)
step = lambda: model(x).sum()
for value in (1.0, 2.0):
    model.layers[0].kernel.assign(np.full((2, 1), value))
    try:
        print(float(strategy.reduce("mean", strategy.run(step), axis=None)))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("nnx", "wanted"), [("", "2.0\n4.0\n"), ("true", "KERAS_NNX_ENABLED")], ids=["jax", "nnx"]
)
def test_keras_may_be_imported_later_and_without_a_scope(nnx, wanted):
    environment = os.environ | {"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": nnx}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", _LATER], env=environment, capture_output=True, text=True, timeout=120
    )
    assert wanted in done.stdout, done.stderr
    assert (nnx != "") == ("was read in a function that MirroredStrategy" in done.stdout)


def test_a_model_split_inside_replicas_is_passed_in_shards():
    strategy = split()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    x = np.ones((8, 64), np.float32)
    lowered = strategy.lower(lambda x: model(x), args=(batch_of(strategy, x),))
    text = lowered.compile().as_text()
    assert "all-gather" in text
    assert "f32[16,64]" in text[text.index("ENTRY") :]  # the parameter: a quarter of the kernel
