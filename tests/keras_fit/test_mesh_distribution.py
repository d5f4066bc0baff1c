"""Placement of variables and split of batches under each strategy."""

import keras
import pytest
from jax.sharding import PartitionSpec

import keras_models as km
import tpudist
from tpudist.keras import current_distribution


@pytest.mark.parametrize(
    ("num_rows", "axes", "parts"),
    [
        (16, ("replica",), 4),
        (4, ("replica",), 4),
        (7, ("replica", "tensor"), 8),  # splitting over some axes triggers wrong XLA gradients
        (6, ("replica", "tensor"), 8),
    ],
)
def test_rows_that_do_not_divide_evenly_are_split_over_all_axes(num_rows, axes, parts):
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2})
    sharding, found = current_distribution.distribution_of(strategy).rows_sharding(num_rows)
    assert (sharding.spec, found) == (PartitionSpec(axes), parts)


def test_axes_that_split_the_rows_of_a_replica_split_batches_too():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    sharding, parts = current_distribution.distribution_of(strategy).rows_sharding(8)
    assert (sharding.spec[0], parts) == (("replica", "fsdp"), 4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (tpudist.experimental.CentralStorageStrategy, "keeps variables on one place"),
        (lambda: tpudist.MirroredStrategy(deterministic=8), r"deterministic=8\).*Omit"),
    ],
)
def test_strategies_that_cannot_train_keras_are_rejected(make, match):
    strategy = make()
    with strategy.scope():  # entering the scope is allowed
        with pytest.raises(ValueError, match=match):
            km.mlp()
    model = keras.Sequential([keras.layers.Dense(1)])  # it has no variables yet
    with strategy.scope(), pytest.raises(ValueError, match=match):
        model.predict(km.IMAGES[:8], verbose=0)


@pytest.mark.slow
def test_one_device_strategy_keeps_all_variables_on_its_device():
    strategy = tpudist.OneDeviceStrategy("cpu:3")
    x, y = km.IMAGES[:8], km.LABELS[:8]
    model = km.make(km.mlp, strategy)
    found = km.train(model, x, y, 8)
    assert {d.id for d in model.layers[1].kernel.value.sharding.device_set} == {3}
    km.assert_same(found, km.train(km.make(km.mlp), x, y, 8))
