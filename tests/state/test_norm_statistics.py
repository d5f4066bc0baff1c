"""Batch norm over all replicas on partial batches: replicas are weighted by their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tpudist
from tpudist.state import norm_statistics

X = np.random.default_rng(0).normal(size=(15, 2, 3)).astype(np.float32) * 2 + 1
AXIS = "batch"


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy([f"cpu:{i}" for i in range(4)], axis_name=AXIS)


def batches(strategy, rows):
    data = strategy.experimental_make_numpy_dataset(X[:rows]).batch(8)
    return strategy.experimental_distribute_dataset(data)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("axis", ["replica", AXIS])
@pytest.mark.parametrize("rows", [9, *(pytest.param(x, marks=pytest.mark.slow) for x in (13, 15))])
def test_a_tail_is_normalized_by_all_its_rows(strategy, rows, axis, fast):
    """Earlier, a replica without rows made the outputs and statistics of all replicas NaN."""
    make = lambda axis: nnx.BatchNorm(  # noqa: E731
        3, axis_name=axis, use_fast_variance=fast, rngs=nnx.Rngs(0)
    )
    norm, alone = strategy.create(lambda: make(axis)), make(None)
    for i, batch in enumerate(batches(strategy, rows)):
        found = strategy.run(lambda norm, x: norm(x), args=(norm, batch))
        expected = alone(X[:rows][8 * i : 8 * i + 8])
        np.testing.assert_allclose(strategy.gather(found, axis=0), expected, atol=1e-5)
    np.testing.assert_allclose(norm.mean[...], alone.mean[...], rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], alone.var[...], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [9, 13])
def test_rows_that_are_masked_do_not_count(strategy, rows):
    mask = jnp.array([True, False])[None, :, None]
    norm = strategy.create(lambda: nnx.BatchNorm(3, axis_name="replica", rngs=nnx.Rngs(0)))
    alone = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    for i, batch in enumerate(batches(strategy, rows)):
        strategy.run(lambda norm, x: norm(x, mask=mask).sum(), args=(norm, batch))
        alone(X[:rows][8 * i : 8 * i + 8], mask=mask)
    np.testing.assert_allclose(norm.mean[...], alone.mean[...], rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], alone.var[...], rtol=1e-5)


@pytest.mark.parametrize("axis", [AXIS, None])
@pytest.mark.parametrize("api", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_a_run_in_a_function_normalizes_a_tail_as_a_run_of_its_own(strategy, api, axis):
    """Earlier, replicas had equal weights, and a replica without rows made the statistics NaN."""

    def normalize(norm, x):
        if api == "nnx":
            return norm(x)
        layer = linen.BatchNorm(use_running_average=False, axis_name=axis)
        return layer.apply(norm, x, mutable=["batch_stats"])

    def make():
        if api == "nnx":
            return strategy.create(lambda: nnx.BatchNorm(3, axis_name=axis, rngs=nnx.Rngs(0)))
        return linen.BatchNorm(use_running_average=False).init(jax.random.key(0), X[:1])

    @tpudist.function
    def run(norm, x):
        return strategy.run(normalize, args=(norm, x))

    tail, results = strategy.distribute_batch(X[:1]), []
    for call in (run, lambda *args: strategy.run(normalize, args=args)):
        norm = make()
        with strategy.scope():
            out = call(norm, tail)
        out, stats = out if api == "linen" else (out, nnx.state(norm, nnx.BatchStat))
        results.append((strategy.gather(out, axis=0), stats))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(results))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, results))


class Net(linen.Module):
    axis_name: str | None = None

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(use_running_average=False, axis_name=self.axis_name)
        return linen.Dense(1)(jnp.tanh(norm(linen.Dense(4)(x))))[:, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [9, 13])
def test_training_with_partial_batches_equals_training_on_one_device(strategy, rows):
    tx = optax.sgd(0.1)

    def step(net, reduce, state, x):
        def loss_fn(params):
            given = {"params": params, "batch_stats": state["batch_stats"]}
            out, updates = net.apply(given, x, mutable=["batch_stats"])
            return tpudist.compute_average_loss(jnp.square(out - 1)), updates["batch_stats"]

        grads, stats = jax.grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(reduce(grads), state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {
            "params": params,
            "batch_stats": stats,
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }

    def train(strategy, axis_name):
        net = Net(axis_name)
        variables = Net().init(jax.random.key(0), X[:1])
        state = {**variables, "opt_state": tx.init(variables["params"]), "step": 0}
        reduce = lambda grads: tpudist.get_replica_context().all_reduce("sum", grads)  # noqa: E731
        one_step = lambda state, x: step(net, reduce, state, x)  # noqa: E731
        for _ in range(2):
            for batch in batches(strategy, rows):
                state = strategy.run(one_step, args=(state, batch))
        return state

    found, expected = train(strategy, AXIS), train(tpudist.OneDeviceStrategy("cpu:0"), None)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected
    )


def test_statistics_over_another_axis_equal_those_of_flax():
    """Only the replicas are known to have rows of one batch; another axis may mean anything."""
    variables = Net().init(jax.random.key(0), X[:1])
    own = lambda x: Net("own").apply(variables, x, mutable=["batch_stats"])[0]  # noqa: E731
    parts = X[:12].reshape(3, 4, 2, 3)
    expected = jax.vmap(own, axis_name="own")(parts)
    with norm_statistics.weigh_by_rows(["replica"]):
        found = jax.vmap(own, axis_name="own")(parts)
    np.testing.assert_array_equal(found, expected)
