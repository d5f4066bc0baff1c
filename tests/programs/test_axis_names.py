"""`axis_name=`: a second name of the replica axis, as in programs for `jax.pmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import tpudist

STRATEGIES = {
    "mirrored": lambda: tpudist.MirroredStrategy(axis_name="batch"),
    "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2}, axis_name="batch"),
    "one": lambda: tpudist.OneDeviceStrategy(axis_name="batch"),
    "central": lambda: tpudist.experimental.CentralStorageStrategy(axis_name="batch"),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def numbers(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )


def by_both_names(x, axis):
    def body(carry, y):
        return carry + jax.lax.pmean(y, axis), jax.lax.axis_index(axis)

    total, ids = jax.lax.scan(body, x, jnp.stack([x, x]))
    gathered = jax.jit(lambda v: jax.lax.all_gather(v, axis))(total)
    looked_up = jax.lax.cond(
        jax.lax.pmax(x, axis) > 0, lambda: jax.lax.psum(x, axis), lambda: jnp.float32(0)
    )
    gradient = jax.grad(lambda v: jax.lax.pmean(v * v, axis))(x)
    mapped = jax.vmap(lambda v: jax.lax.pmin(v, axis))(jnp.stack([x, -x]))
    return total, ids, gathered.sum(), looked_up, gradient, mapped, jax.lax.axis_size(axis)


def test_collectives_over_both_names_are_equal(strategy):
    x = numbers(strategy)
    named = strategy.run(lambda x: by_both_names(x, "batch"), args=(x,))
    plain = strategy.run(lambda x: by_both_names(x, "replica"), args=(x,))
    jax.tree.map(np.testing.assert_array_equal, named, plain)


def test_a_value_reduced_over_the_second_name_is_proven_equal(strategy):
    mean = strategy.run(lambda x: jax.lax.pmean(x, "batch"), args=(numbers(strategy),))
    assert isinstance(mean, jax.Array)
    n = strategy.num_replicas_in_sync
    np.testing.assert_allclose(mean, (n + 1) / 2)


def test_the_compiled_program_is_the_same(strategy):
    x = numbers(strategy)

    def lowered(axis):
        def step(x):
            return jax.lax.psum(x, axis)

        return strategy.lower(step, args=(x,)).as_text()

    assert lowered("batch") == lowered("replica")


def test_partial_batches_and_nested_runs_accept_the_name():
    strategy = STRATEGIES["mirrored"]()
    x = np.arange(10, dtype=np.float32)
    data = strategy.experimental_make_numpy_dataset(x).batch(16)
    for batch in strategy.experimental_distribute_dataset(data):
        assert strategy.run(lambda b: jax.lax.psum(b.sum(), "batch"), args=(batch,)) == x.sum()

    @tpudist.function
    def whole(x):
        return strategy.run(lambda x: jax.lax.psum(x, "batch"), args=(x,))

    assert whole(numbers(strategy)) == 36


def test_a_strategy_on_other_devices_keeps_the_name():
    strategy = STRATEGIES["mirrored"]()
    twin = strategy.on(jax.devices()[:4])
    assert twin.run(lambda: jax.lax.axis_size("batch")) == 4


@pytest.mark.slow
def test_batch_norm_over_replicas_matches_the_whole_batch():
    class Model(nn.Module):
        axis: str | None = None

        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x)

    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    variables = Model().init(jax.random.key(0), x)
    expected, statistics = Model().apply(variables, x, mutable=["batch_stats"])
    strategy = STRATEGIES["mirrored"]()
    data = strategy.experimental_make_numpy_dataset(x).batch(32)
    [batch] = strategy.experimental_distribute_dataset(data)
    got, updated = strategy.run(
        lambda v, b: Model("batch").apply(v, b, mutable=["batch_stats"]), args=(variables, batch)
    )
    np.testing.assert_allclose(strategy.gather(got, 0), expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), updated, statistics)


def test_initializers_that_communicate_work_in_create(strategy):
    n = strategy.num_replicas_in_sync

    def init():
        scale = jax.lax.pmean(jnp.ones(3), "batch") + jax.lax.psum(1.0, "replica")
        return {"scale": scale}

    made = strategy.create(init)
    np.testing.assert_array_equal(made["scale"], np.full(3, 1.0 + n))
    assert strategy.create_abstract(init)["scale"].shape == (3,)


def test_state_that_differs_cannot_be_created():
    strategy = STRATEGIES["mirrored"]()
    with pytest.raises(ValueError, match=r"depends on jax.lax.axis_index\('replica'\)"):
        strategy.create(lambda: jax.lax.axis_index("replica") * 1.0)


@pytest.mark.parametrize("name", ["", 3, "fsdp"])
def test_an_invalid_axis_name_raises(name):
    with pytest.raises(ValueError, match="a second name of the axis of replicas"):
        tpudist.TPUStrategy(replica_axes={"fsdp": 2}, axis_name=name)


def test_axis_name_may_be_the_name_of_the_axis_itself():
    strategy = tpudist.MirroredStrategy(axis_name="replica")
    assert strategy.replica_mesh.axis_name is None
    assert strategy.run(lambda: jax.lax.axis_size("replica")) == 8


def test_an_unknown_axis_name_raises_the_error_of_jax():
    with pytest.raises(NameError, match="batch"):
        tpudist.MirroredStrategy().run(lambda x: jax.lax.psum(x, "batch"), args=(jnp.ones(2),))
