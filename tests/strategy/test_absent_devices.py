"""A strategy on descriptions of devices creates shapes, and explains what else it cannot do."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist import planner

pytestmark = pytest.mark.libtpu
BATCHES = tpudist.NumpyDataset(np.zeros(16)).batch(8)


def make():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_models_are_created_as_shapes_and_planned():
    strategy = tpudist.MirroredStrategy(devices=planner.devices("v5e-8"))  # of two hosts
    model = strategy.create_abstract(make)
    batch = planner.GlobalBatch(jnp.zeros((16, 4)))
    plan = strategy.plan(lambda model, x: model(x).sum(), (model, batch))
    assert (plan.topology, plan.mesh) == ("v5e:2x4", {"replica": 8})


@pytest.mark.parametrize(
    "compute",
    [
        make,
        lambda: tpudist.Variable(np.zeros(3)),
        lambda: tpudist.get_strategy().create(make),
        lambda: tpudist.get_strategy().run(jnp.sin, (np.zeros(3),)),
        lambda: tpudist.get_strategy().experimental_distribute_values_from_function(
            lambda _: np.zeros(3)
        ),
        lambda: tpudist.get_strategy().distribute_batch(np.zeros((4, 2)), has_device_dim=True),
        lambda: next(iter(tpudist.get_strategy().experimental_distribute_dataset(BATCHES))),
    ],
)
def test_values_in_the_scope_raise_the_remedy(compute):
    strategy = tpudist.MirroredStrategy(devices=planner.devices("v5e-8"))
    with pytest.raises(RuntimeError, match=r"are descriptions.*create_abstract.*topology="):
        with strategy.scope():
            compute()


def test_other_errors_in_the_scope_stay_as_they_are():
    strategy = tpudist.MirroredStrategy(devices=planner.devices("v5e-8"))
    with pytest.raises(AttributeError, match="no attribute 'sine'"):
        with strategy.scope():
            jnp.sine(0)
    with pytest.raises(RuntimeError, match="are descriptions"):
        strategy.run(jnp.sin, (np.zeros(3),))
