"""State that starts to differ between replicas raises an error at the next call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpudist

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def batch(strategy):
    dataset = strategy.experimental_make_numpy_dataset(ROWS).batch(16)
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def loss(w, x):
    return jnp.square(x @ w - 1).sum() / 16


def gradient_step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


def adam_step(state, x):
    w, moments = state
    updates, moments = optax.adam(0.1).update({"w": jax.grad(loss)(w["w"], x)}, moments)
    return (optax.apply_updates(w, updates), moments), loss(w["w"], x)


def test_a_missing_reduction_raises_at_the_second_call(strategy, batch):
    def step(w, x):
        return gradient_step(w, x), loss(w, x)

    w, _ = strategy.run(step, (jnp.ones(3), batch))
    with pytest.raises(ValueError, match=r"received 'w', which differs.*test_drift\.py:\d+"):
        strategy.run(step, (w, batch))


def test_drift_in_nested_state_raises_in_another_function(strategy, batch):
    w = {"w": jnp.ones(3)}
    (w, _), _ = strategy.run(adam_step, ((w, optax.adam(0.1).init(w)), batch))
    with pytest.raises(ValueError, match="which differs between replicas"):
        strategy.run(lambda w, x: loss(w["w"], x), (w, batch))


def test_saving_state_that_drifts_raises(strategy, batch, tmp_path):
    def step(w, x):
        return gradient_step(w, x), loss(w, x)

    w, _ = strategy.run(step, (jnp.ones(3), batch))
    manager = tpudist.checkpoint.CheckpointManager(tpudist.TrainState(w=w), str(tmp_path))
    with pytest.raises(ValueError, match=r"save received '.*w.*', which differs between replicas"):
        manager.save(1)


def test_values_that_depend_only_on_themselves_may_differ(strategy, batch):
    weight = np.ones(1, np.float32)  # as Keras' metrics have

    def step(total, mean, w, x):
        return total + (weight * x).sum(), 0.9 * mean + 0.1 * x.mean(0), loss(w, x)

    total, mean = jnp.zeros(()), jnp.zeros(3)
    for _ in range(3):
        total, mean, _ = strategy.run(step, (total, mean, jnp.ones(3), batch))
    assert isinstance(total, tpudist.PerReplica)


def test_gradients_of_one_call_may_be_passed_to_another(strategy, batch):
    def compute(w, x):
        return {"of_w": jax.grad(loss)(w, x)}

    def apply(w, gradients):
        return w - tpudist.get_replica_context().all_reduce("sum", gradients["of_w"])

    w = jnp.ones(3)
    gradients = strategy.run(compute, (w, batch))
    assert strategy.run(apply, (w, gradients)).shape == (3,)


def test_an_average_with_local_gradients_raises_at_the_second_call(strategy, batch):
    def step(w, average, x):
        gradient = jax.grad(loss)(w, x)
        average = 0.9 * average + 0.1 * (w - gradient)
        return w - tpudist.get_replica_context().all_reduce("sum", gradient), average

    w, average = strategy.run(step, (jnp.ones(3), jnp.ones(3), batch))
    with pytest.raises(ValueError, match="'average', which differs between replicas"):
        strategy.run(step, (w, average, batch))


def test_aggregation_none_lets_state_differ_between_replicas(strategy, batch):
    options = tpudist.RunOptions(aggregation="none")

    def step(w, x):
        return gradient_step(w, x), loss(w, x)

    w = jnp.ones(3)
    for _ in range(2):
        w, _ = strategy.run(step, (w, batch), options=options)
    assert isinstance(w, tpudist.PerReplica)
