"""Finds the strategy that a model belongs to, from every place that needs it."""

import copy
import gc

import keras
import numpy as np
import pytest

import keras_models as km
import tpudist
from tpudist.keras import current_distribution
from tpudist.keras.mesh_distribution import MeshDistribution, owner_of


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy()


def test_a_scope_sets_its_distribution_and_removes_it(strategy):
    assert keras.distribution.distribution() is None
    with strategy.scope(), strategy.scope():
        found = keras.distribution.distribution()
        assert isinstance(found, MeshDistribution)
        assert found.strategy is strategy
        assert "MirroredStrategy(replica=8" in repr(found)
        assert found.num_model_replicas == 8
    assert keras.distribution.distribution() is None
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert keras.distribution.distribution() is None


def test_clearing_the_session_in_a_scope_does_not_end_it(strategy):
    with strategy.scope():
        keras.utils.clear_session()
        assert keras.distribution.distribution() is None
        model = km.mlp()
        assert len(model.layers[1].kernel.value.sharding.device_set) == 8
    assert keras.distribution.distribution() is None


def test_a_keras_distribution_and_a_scope_conflict(strategy):
    """Covers both orders of nesting, and `fit` of a model from the scope."""
    other = keras.distribution.DataParallel()
    match = r"Two Keras distributions conflict: the scope of MirroredStrategy.*DataParallel"
    with other.scope(), pytest.raises(RuntimeError, match=match), strategy.scope():
        pass
    with strategy.scope(), other.scope(), pytest.raises(RuntimeError, match=match):
        km.mlp()
    model = km.make(km.mlp, strategy)
    with other.scope(), pytest.raises(RuntimeError, match=match):
        model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)


@pytest.mark.slow
def test_a_keras_distribution_works_unchanged_outside_scopes():
    with keras.distribution.DataParallel().scope():
        assert current_distribution.current() is None
        found = km.train(km.make(km.mlp), km.IMAGES[:64], km.LABELS[:64], 32, epochs=1)
    km.assert_same(found, km.train(km.make(km.mlp), km.IMAGES[:64], km.LABELS[:64], 32, epochs=1))


def test_a_model_belongs_to_one_strategy(strategy):
    model = km.make(km.mlp, strategy)
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    with other.scope(), pytest.raises(RuntimeError, match=r"was made in the scope of .*replica=8"):
        model.fit(km.IMAGES[:8], km.LABELS[:8], verbose=0)


def test_two_strategies_on_one_mesh_are_distinguished(strategy):
    """Also covers a model that is not compiled."""
    other = tpudist.MultiWorkerMirroredStrategy()
    assert other.mesh == strategy.mesh
    with other.scope():
        km.mlp()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        assert current_distribution.of_model(model).strategy is strategy


@pytest.mark.slow
def test_a_model_knows_its_strategy_before_compile():
    """Even if other strategies use the same mesh and nobody references the model's strategy."""

    def make():
        with tpudist.MirroredStrategy().scope():
            return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])

    model = make()
    other = tpudist.MirroredStrategy()
    with other.scope():
        keras.layers.Dense(1).build((None, 3))
    gc.collect()
    found = current_distribution.of_model(model)
    assert found is not None
    assert found.strategy is not other
    model.compile("sgd", "mse")
    assert current_distribution.of_model(model) is found
    model.fit(np.ones((13, 3)), np.ones((13, 1)), batch_size=5, verbose=0)
    kernel = model.layers[0].kernel
    assert owner_of(copy.deepcopy(kernel)) is found
    assert copy.deepcopy(kernel).value.shape == (3, 1)


def test_a_scope_set_for_a_notebook_is_used(strategy):
    tpudist.experimental_set_strategy(strategy)
    try:
        assert len(km.mlp().layers[1].kernel.value.sharding.device_set) == 8
    finally:
        tpudist.experimental_set_strategy(None)
    assert keras.distribution.distribution() is None
