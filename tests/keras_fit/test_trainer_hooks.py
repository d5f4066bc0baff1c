"""A Keras program in a scope gives the same results as on one device, for any batch."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import keras_models as km
import tpudist
from tpudist.keras import current_distribution, trainer_hooks, uneven_rows


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy()


def both(strategy, build, x, y, batch_size, *, policy="float32", options=None, **fit):
    """Trains in the scope and on one device; returns both results."""
    return [
        km.train(km.make(build, where, policy, **(options or {})), x, y, batch_size, **fit)
        for where in (strategy, None)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "num_rows"),
    [
        pytest.param(60, 187, id="60 on 8 devices, and a tail of 7"),
        pytest.param(64, 192, id="batches that divide", marks=pytest.mark.exhaustive),
        pytest.param(64, 5, id="an epoch smaller than the replicas", marks=pytest.mark.exhaustive),
    ],
)
def test_all_methods_of_a_model_match_one_device(strategy, batch_size, num_rows):
    x, y = km.IMAGES[:num_rows], km.LABELS[:num_rows]
    found, wanted = [], []
    for where, results in ((strategy, found), (None, wanted)):
        model = km.make(km.mlp, where)
        results += [km.train(model, x, y, batch_size), km.use(model, x, y, batch_size)]
        results += [{f"{i}": np.asarray(w.value) for i, w in enumerate(model.weights)}]
    for one, other in zip(found, wanted, strict=True):
        km.assert_same(one, other)
    assert wanted[0]["rows"].tolist() == [num_rows] * 2  # this metric ignores sample weights


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [60, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_batch_norm_statistics_and_dropout_masks_use_the_whole_batch(strategy, num_rows):
    """One step only: with max pooling, rounding errors grow over several steps."""
    x, y = km.IMAGES[:num_rows], km.LABELS[:num_rows]
    found, wanted = both(strategy, km.convolutions, x, y, num_rows, epochs=1)
    km.assert_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("build", [km.bag, km.lstm])
def test_embeddings_masks_and_recurrent_layers_match_one_device(strategy, build):
    found, wanted = both(strategy, build, km.TOKENS[:60], km.BITS[:60], 60)
    km.assert_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_every_loss_reduction_uses_the_real_rows(strategy, reduction):
    weights = np.linspace(0.1, 2, 60).astype("float32")
    options = {"loss": km.cross_entropy(reduction)}
    results = []
    for where in (strategy, None):
        with where.scope() if where else contextlib.nullcontext():
            options["optimizer"] = keras.optimizers.SGD(1e-3)
            model = km.make(km.mlp, where, **options)
        results.append(
            km.train(model, km.IMAGES[:60], km.LABELS[:60], 60, sample_weight=weights, epochs=1)
        )
    km.assert_same(*results)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": False}])
def test_uncompiled_steps_match_one_device_and_warn_that_each_device_computes_all(strategy, option):
    x, y = km.IMAGES[:7], km.LABELS[:7]
    wanted = km.make(km.mlp).train_on_batch(x, y)
    model = km.make(km.mlp, strategy, **option)
    with pytest.warns(UserWarning, match="each of the 8 devices"):
        found = model.train_on_batch(x, y)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_is_not_built_can_predict(strategy):
    """Keras builds it by calling it on a batch, outside any compiled program."""

    def build():
        return keras.Sequential([layers.Flatten(), layers.Dense(3)])

    found = km.make(build, strategy)
    with strategy.scope():
        found = found.predict(km.IMAGES[:13], batch_size=13, verbose=0)
    keras.utils.set_random_seed(1)
    wanted = build().predict(km.IMAGES[:13], batch_size=13, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_work_is_split_over_the_devices(strategy):
    """Each of 8 devices computes at most 8 of 60 rows; one device computes all 60."""
    flops = []
    for where in (strategy, tpudist.OneDeviceStrategy()):
        model = km.make(km.mlp, where)
        with where.scope():
            distribution = current_distribution.current()
            batch = (km.IMAGES[:60], km.LABELS[:60])
            model.train_on_batch(*batch)
            state = [[v.value for v in vs] for vs in _state(model)]
            data = uneven_rows.place_batch((*batch, None), distribution)
            step = trainer_hooks._compile_step(model, "train", distribution)
            compiled = step.lower(tuple(state), data).compile()
        flops.append(compiled.cost_analysis()["flops"])
    assert flops[0] < 0.25 * flops[1]  # an eighth, plus work independent of rows


def _state(model):
    optimizer = model.optimizer.variables
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer,
        model.metrics_variables,
    )


@pytest.mark.slow
def test_deleted_state_raises_an_error_instead_of_a_crash(strategy):
    """JAX 0.10 crashes the process if an array is donated twice."""
    model = km.make(km.mlp, strategy)
    kernel = model.layers[1].kernel
    with strategy.scope():
        model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)
        old = kernel.value
        model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)
        kernel._value = old
        with pytest.raises(RuntimeError, match="Array has been deleted with shape=float32"):
            model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)


@pytest.mark.slow
def test_fit_outside_the_scope_uses_the_strategy_of_the_model(strategy):
    """TensorFlow's guides call `fit` outside. Also covers a model that is compiled outside."""
    model = km.make(km.mlp, strategy)
    model.fit(km.IMAGES[:13], km.LABELS[:13], batch_size=13, verbose=0)
    kernel = model.layers[1].kernel.value
    assert len(kernel.sharding.device_set) == 8
    with strategy.scope():
        later = keras.Sequential([layers.Input((6, 6, 1)), layers.Flatten(), layers.Dense(5)])
    later.compile("sgd", km.cross_entropy())
    later.fit(km.IMAGES[:13], km.LABELS[:13], batch_size=13, verbose=0)
    assert len(later.optimizer.iterations.value.sharding.device_set) == 8
    assert keras.distribution.distribution() is None


def test_a_model_with_a_part_from_outside_the_scope_is_rejected(strategy):
    outside = km.make(km.mlp)
    with strategy.scope(), pytest.raises(ValueError, match=r"made outside of the strategy's scope"):
        outside.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)
    optimizer = keras.optimizers.SGD()
    inside = km.make(km.mlp, strategy, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"optimizer's variable 'sgd.*/iteration'.* on 1 device"):
        inside.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)
    metric = km.Rows()
    inside = km.make(km.mlp, strategy, metrics=[metric])
    with pytest.raises(ValueError, match=r"metrics' variable 'rows/count'"):
        inside.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)


def test_a_model_that_overrides_make_train_function_is_rejected(strategy):
    class Compiles(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    with strategy.scope():
        model = Compiles([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"Compiles overrides make_train_function.*train_step"):
            model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def test_fit_in_a_replica_function_is_rejected(strategy):
    model = km.make(km.mlp, strategy)

    def step():
        model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)

    with pytest.raises(RuntimeError, match=r"fit of the Keras model .* in a replica function"):
        strategy.run(step)


def test_weights_set_on_one_device_cause_no_warning():
    """Keras places them without the strategy's mesh, and would warn that a step fails."""
    with tpudist.OneDeviceStrategy().scope():
        model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.set_weights([np.ones((2, 1)), np.zeros(1)])
    assert np.isfinite(model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0))


def test_a_model_outside_all_scopes_trains_on_one_device():
    model = km.make(km.mlp)
    model.fit(km.IMAGES[:13], km.LABELS[:13], batch_size=13, verbose=0)
    assert len(model.layers[1].kernel.value.sharding.device_set) == 1
