"""Plans of `fit` and related methods of Keras models, with and without a strategy."""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from keras import layers

import tpudist
from tpudist import planner

X = jax.ShapeDtypeStruct((64, 16), np.float32)
Y = jax.ShapeDtypeStruct((64,), np.int32)
PRODUCTS = 2 * 64 * (16 * 32 + 32 * 8)  # of a forward pass


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(**options):
    model = keras.Sequential([layers.Dense(32), layers.BatchNormalization(), layers.Dense(8)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, **options)
    return model


def bytes_of(variables):
    return sum(4 * int(np.prod(v.shape)) for v in variables)


def test_a_step_of_fit_is_planned_for_the_shapes_of_a_batch():
    model, mesh = make(), jax.make_mesh((8,), ("batch",))
    plan = planner.plan(model.fit, X, Y, mesh=mesh, in_shardings=P("batch"))
    assert plan.name == f"fit of {model.name}"
    assert plan.model_flops == 3 * PRODUCTS - 2 * 64 * 16 * 32  # no gradient of the inputs
    assert {x.kind for x in plan.collectives} == {"all-reduce"}
    memory = plan.memory
    assert memory.categories["batch"] == (64 * 16 * 4 + 64 * 4) // 8
    assert memory.categories["parameters"] == bytes_of(model.trainable_variables)
    assert memory.categories["optimizer state"] == bytes_of(model.optimizer.variables)
    assert memory.donated_bytes >= bytes_of([*model.variables, *model.optimizer.variables])
    whole = {"x": np.zeros((999, 16)), "y": np.zeros(999, np.int64), "batch_size": 64}
    again = planner.plan(model.fit, kwargs=whole, in_shardings=None)
    assert (again.num_devices, again.model_flops) == (1, plan.model_flops)


def test_evaluate_and_predict_are_planned_too():
    model, mesh = make(), jax.make_mesh((8,), ("batch",))
    shards = {"mesh": mesh, "in_shardings": (P("batch"),)}
    assert planner.plan(model.predict, X, **shards).model_flops == PRODUCTS
    with pytest.raises(ValueError, match="in_shardings is not a prefix of the arguments"):
        planner.plan(model.predict, X, mesh=mesh, in_shardings=(P("batch"), P("batch")))
    plan = planner.plan(model.evaluate, X, Y, mesh=mesh, in_shardings=P("batch"))
    assert plan.model_flops == PRODUCTS
    assert "optimizer state" not in plan.memory.categories


def test_a_strategy_splits_the_batch():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    with strategy.scope():
        model = make()
    plan = strategy.plan(model.fit, (X, Y))
    assert plan.mesh == {"replica": 4, "fsdp": 2}
    assert plan.memory.categories["batch"] == (64 * 16 * 4 + 64 * 4) // 8
    same = planner.plan(model.fit, X, Y)
    assert (same.memory, same.collectives) == (plan.memory, plan.collectives)
    rows = jax.ShapeDtypeStruct((60, 16), np.float32)
    uneven = strategy.plan(model.predict, (rows,))
    assert uneven.memory.categories["batch"] == 64 * 16 * 4 // 8  # padded
    with pytest.raises(ValueError, match="cannot plan fit of .*was not made in its scope"):
        tpudist.MirroredStrategy().plan(model.fit, (X, Y))
    with pytest.raises(ValueError, match="in_shardings was passed with fit.*Omit in_shardings"):
        planner.plan(model.fit, X, Y, in_shardings=P("replica"))
    with pytest.raises(ValueError, match="with fit of .*strategy has a mesh of its own. Omit mesh"):
        planner.plan(model.fit, X, Y, mesh=strategy.mesh)
    with pytest.raises(ValueError, match="donate_argnums=0 with fit of .*a method of Keras"):
        planner.plan(model.fit, X, Y, donate_argnums=0)


def test_a_distribution_of_keras_splits_the_batch():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        plan = planner.plan(make(), X, Y)  # a model stands for its `fit`
    finally:
        keras.distribution.set_distribution(None)
    assert plan.mesh == {"batch": 8}
    assert plan.memory.categories["batch"] == (64 * 16 * 4 + 64 * 4) // 8


@pytest.mark.libtpu
def test_fit_is_moved_to_a_slice():
    with tpudist.MirroredStrategy().scope():
        model = make()
    plan = planner.plan(model.fit, X, Y, topology="v5e-4")
    assert (plan.topology, plan.mesh, plan.fits) == ("v5e-4", {"replica": 4}, True)
    own = planner.plan(make(), X, Y, topology="v5e-4", mesh={"b": 4}, in_shardings=P("b"))
    assert own.model_flops == plan.model_flops
    assert own.memory.peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.01)
    assert sum(x.num_bytes for x in own.collectives) == sum(x.num_bytes for x in plan.collectives)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: (keras.Sequential([layers.Dense(3)]).fit, X), ValueError, "call model.compile"),
        (lambda: (make(run_eagerly=True).fit, X, Y), ValueError, "run_eagerly.*Omit the option"),
        (lambda: (make().fit, iter([])), TypeError, "received a list_iterator.*shapes of one"),
    ],
)
def test_what_cannot_be_planned_is_explained(call, error, message):
    with pytest.raises(error, match=message):
        planner.plan(*call())
    with pytest.raises(ValueError, match="knows no class_weight.*Pass sample_weight"):
        planner.plan(make().fit, X, Y, kwargs={"class_weight": {0: 1.0}})
