"""Keras variables are split over axes inside a replica, selected by their paths."""

import keras
import pytest
from keras import layers

import keras_models as km
import tpudist


@pytest.fixture
def strategy():
    return tpudist.TPUStrategy(replica_axes={"tensor": 2})


def spec(variable):
    return tuple(variable.value.sharding.spec)


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(km.mlp, marks=pytest.mark.exhaustive), km.bag])
def test_a_split_model_trains_as_on_one_device(strategy, build):
    """Partial batches of 7 rows and an embedding: other splits trigger XLA's wrong gradients."""
    tpudist.keras.set_layout_map(
        strategy,
        {r"sequential.*/dense.*/kernel": ("tensor", None), r".*/embeddings": ("vocab", None)}
        if build is km.bag
        else {r".*/dense[_0-9]*/kernel": ("tensor", None)},
    )
    x, y = (km.IMAGES, km.LABELS) if build is km.mlp else (km.TOKENS, km.BITS)
    x, y = x[:67], y[:67]
    model = km.make(build, strategy, steps_per_execution=1)
    found = km.train(model, x, y, 60)
    assert any(spec(v)[:1] == ("tensor",) for v in model.trainable_variables)
    km.assert_same(found, km.train(km.make(build), x, y, 60))


def test_optimizer_state_is_split_like_its_variable(strategy):
    tpudist.keras.set_layout_map(strategy, {r".*/kernel": (None, "mlp")})
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(4)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    kernel, bias = model.trainable_variables
    assert (spec(kernel), spec(bias)) == ((None, "tensor"), ())
    assert [spec(v) for v in model.optimizer.variables if v.shape == (8, 4)] == [spec(kernel)] * 2


def test_a_variable_without_a_pattern_follows_the_strategys_rule():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    with strategy.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dense(32)])
    kernel, bias = model.trainable_variables
    assert (spec(kernel), spec(bias)) == (("fsdp",), ())


def test_set_layout_map_accepts_a_keras_layout_map(strategy):
    layout_map = keras.distribution.LayoutMap(None)
    layout_map[".*/kernel"] = (None, "tensor")
    tpudist.keras.set_layout_map(strategy, layout_map)
    with strategy.scope():
        layer = layers.Dense(4)
        layer.build((None, 8))
    assert spec(layer.kernel) == (None, "tensor")
    # A key may be a path that is not a valid expression.
    tpudist.keras.set_layout_map(strategy, {"dense(1/kernel": (None, None)})
    with strategy.scope():
        layer = layers.Dense(4)
        layer.build((None, 8))
    assert spec(layer.kernel) == ()


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({".*": "tensor"}, "Use a tuple with None or the name of an axis"),
        ({".*": ("model",)}, r"over 'model', but replicas have the axes \['tensor'\]"),
        ({".*": ("replica",)}, "over 'replica', but replicas have the axes"),
    ],
)
def test_set_layout_map_rejects_invalid_layouts_immediately(strategy, layout, match):
    with pytest.raises(ValueError, match=match):
        tpudist.keras.set_layout_map(strategy, layout)


def test_set_layout_map_rejects_a_strategy_with_one_device_per_replica():
    with pytest.raises(ValueError, match="but a replica is one device"):
        tpudist.keras.set_layout_map(tpudist.MirroredStrategy(), {".*": ("tensor",)})


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        (
            {".*kernel": (None, "tensor"), ".*/kernel": (None, None)},
            r"matches 2 patterns of the layout map: \['.\*kernel', '.\*/kernel'\]",
        ),
        ({".*bias": (None, "tensor")}, r"has 2 entries for '.\*bias'.* of shape \[3\]"),
        ({".*kernel": (None, "tensor")}, r"splits dim 1 .* 3 does not divide by 2"),
    ],
)
def test_a_layout_that_does_not_fit_a_variable_is_rejected(strategy, layout, match):
    tpudist.keras.set_layout_map(strategy, layout)
    with strategy.scope(), pytest.raises(ValueError, match=match):
        layers.Dense(3).build((None, 8))


def test_a_pattern_that_matches_no_variable_warns(strategy):
    tpudist.keras.set_layout_map(strategy, {"attention/.*": (None, "tensor")})
    model = km.make(km.mlp, strategy)
    with pytest.warns(UserWarning, match=r"No variable .* matches \['attention/\.\*'\]"):
        model.predict(km.IMAGES[:8], verbose=0)


def test_a_pattern_that_is_neither_an_expression_nor_a_path_raises(strategy):
    tpudist.keras.set_layout_map(strategy, {"*kernel": (None, "tensor")})
    model = km.make(km.mlp, strategy)
    with pytest.raises(ValueError, match=r"key '\*kernel' .* not a valid .*: nothing to repeat"):
        model.predict(km.IMAGES[:8], verbose=0)
