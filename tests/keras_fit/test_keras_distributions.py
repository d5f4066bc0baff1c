"""Repeats the tests that Keras has for its distributions in the scope of a strategy.

Adapted from the tests of `keras.distribution` and of its JAX backend in Keras 3.15 (both are called
distribution_lib_test). Tests of the classes DeviceMesh, TensorLayout and LayoutMap do not apply.
"""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers

import tpudist
from tpudist.keras import current_distribution

LAYOUT = {".*dense.*/kernel": (None, "model"), ".*dense.*/bias": ("model",)}


@pytest.fixture
def split():
    strategy = tpudist.TPUStrategy(replica_axes={"model": 4})
    tpudist.keras.set_layout_map(strategy, LAYOUT)
    return strategy


def network(*more):
    inputs = layers.Input(shape=[8, 8, 1])
    y = layers.Flatten()(inputs)
    y = layers.Dense(units=16, use_bias=False, activation="relu")(y)
    for layer in more:
        y = layer(y)
    y = layers.Dropout(0.4)(y)
    return keras.Model(inputs, layers.Dense(units=8, activation="softmax")(y))


def specs(model):
    return {w.path.split("/")[-1]: w.value.sharding.spec for w in model.weights}


def train(strategy, model, rows=64, batch_size=8):
    x = np.random.default_rng(0).normal(size=(rows, 8, 8, 1))
    with strategy.scope():
        model.compile(loss="mse")
        model.fit(x, np.ones((rows, 8)), batch_size=batch_size, verbose=0)


@pytest.mark.slow
def test_a_data_parallel_model_is_replicated_on_every_device_and_trains():
    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        model = network()
    assert all(w.value.sharding.is_fully_replicated for w in model.weights)
    train(strategy, model)
    assert all(w.value.sharding.is_fully_replicated for w in model.weights)


@pytest.mark.slow
def test_a_model_parallel_model_keeps_the_split_of_its_layout_map(split):
    with split.scope():
        model = network()
    wanted = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")}
    assert specs(model) == wanted
    train(split, model)
    assert specs(model) == wanted


def test_assignment_outside_the_scope_keeps_the_split_of_a_variable(split):
    with split.scope():
        layer = layers.Dense(8)
        layer.build((16, 16))
    layer.kernel.assign(np.ones((16, 8)))
    layer.bias.assign(np.ones(8))
    assert layer.kernel.value.sharding.spec == PartitionSpec(None, "model")
    assert layer.bias.value.sharding.spec == PartitionSpec("model")


def test_an_explicit_layout_of_a_variable_is_kept(split):
    layout = NamedSharding(split.mesh, PartitionSpec("model", None))
    with split.scope():
        variable = keras.Variable(np.ones((8, 8)), layout=layout, name="kernel")
    assert variable.value.sharding == layout


def test_layer_outputs_have_no_tensor_layout(split):
    found = current_distribution.distribution_of(split)
    assert found.get_tensor_layout("dense/output") is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 60])
def test_activations_are_split_over_the_devices(rows):
    """Covers batches that divide evenly and batches that do not."""
    captured = []

    class Capture(layers.Layer):
        def call(self, inputs):
            if isinstance(inputs, jax.core.Tracer):
                jax.debug.inspect_array_sharding(inputs, callback=captured.append)
            return inputs

    strategy = tpudist.MirroredStrategy()
    with strategy.scope():
        model = network(Capture())
        model.compile(loss="mse")
        model.train_on_batch(np.ones((rows, 8, 8, 1)), np.ones((rows, 8)))
    each = -(-rows // 8)
    assert captured
    assert {x.shard_shape((64, 16)) for x in captured} == {(each, 16)}
