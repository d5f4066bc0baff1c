"""NNX state that is local to each replica, and rules that combine the values of replicas."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles

ROWS = np.arange(4, dtype=np.float32)
KEEP = tpudist.RunOptions(aggregation="none")


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def batch(strategy):
    return next(iter(strategy.experimental_distribute_dataset([ROWS])))


class Counter(nnx.Module):
    def __init__(self, **rule):
        self.total = nnx.Variable(jnp.zeros(()), **rule)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))


def count(counter, batch):
    counter.total[...] += batch.sum()
    counter.steps[...] += 1


def top(counter, batch):
    counter.total[...] = jnp.maximum(counter.total[...], batch.max())


def bottom(counter, batch):
    counter.total[...] = jnp.minimum(counter.total[...], -batch.max())


def run(strategy, mode, fn, args, options=None):
    if mode == "function":
        tpudist.function(lambda *args: strategy.run(fn, args=args, options=options))(*args)
        return
    with strategy.debug() if mode == "debug" else contextlib.nullcontext():
        strategy.run(fn, args=args, options=options)


WAYS = {
    "a rule of the Variable": ({"aggregation": "none"}, None),
    "of all state": ({}, KEEP),
    "of a type": ({}, tpudist.RunOptions(aggregation={"Variable": "none"})),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("mode", ["run", "debug", "function"])
def test_an_accumulator_may_be_local_to_a_replica(strategy, batch, way, mode):
    rule, options = WAYS[way]
    counter = strategy.create(lambda: Counter(**rule))
    for _ in range(2):
        run(strategy, mode, count, (counter, batch), options)
    parts = strategy.experimental_local_results(counter.total[...])
    assert [float(x) for x in parts] == [2.0, 10.0]
    assert float(strategy.reduce("sum", counter.total[...], axis=None)) == 12
    assert int(counter.steps[...]) == 2, "it is equal on all replicas"


def test_local_state_is_compiled_once_and_may_be_set_to_zero(strategy, batch):
    counter = strategy.create(Counter)
    own = lambda counter, batch: count(counter, batch)  # noqa: E731
    compiles = NewCompiles()
    for value in (3.0, 0.0, None):
        counter.total[...] = counter.total[...] if value is None else value
        strategy.run(own, args=(counter, batch), options=KEEP)
    parts = strategy.experimental_local_results(counter.total[...])
    assert [float(x) for x in parts] == [2.0, 10.0]
    assert len(compiles()) == 1
    with pytest.raises(
        TypeError, match=r"does not support assignment at 0\. Outside of replica functions"
    ):
        counter.total[0] = 1.0


def test_a_local_average_counts_earlier_rows_once(strategy, batch):
    metric = strategy.create(nnx.metrics.Average)
    update = lambda metric, batch: metric.update(values=batch)  # noqa: E731
    strategy.run(update, args=(metric, batch))
    strategy.run(update, args=(metric, batch), options=KEEP)
    assert isinstance(metric.total[...], tpudist.PerReplica)
    assert float(strategy.reduce("sum", metric.total[...], axis=None)) == 2 * ROWS.sum()
    assert int(strategy.reduce("sum", metric.count[...], axis=None)) == 2 * len(ROWS)
    metric.reset()
    strategy.run(update, args=(metric, batch), options=KEEP)
    means = strategy.run(lambda metric: metric.compute(), args=(metric,))
    assert [float(x) for x in strategy.experimental_local_results(means)] == [0.5, 2.5]


@pytest.mark.parametrize("mode", ["run", "debug", "function"])
@pytest.mark.parametrize(("fn", "rule", "expected"), [(top, "max", 3), (bottom, "min", -3)])
def test_an_accumulator_may_be_the_minimum_or_maximum_of_all_replicas(
    strategy, batch, mode, fn, rule, expected
):
    counter = strategy.create(lambda: Counter(aggregation=rule))
    run(strategy, mode, fn, (counter, batch))
    assert float(counter.total[...]) == expected
    by_option = strategy.create(Counter)
    options = tpudist.RunOptions(aggregation={"Variable": rule})
    run(strategy, mode, fn, (by_option, batch), options)
    assert float(by_option.total[...]) == expected


def test_a_collection_in_a_pytree_may_be_a_minimum_or_maximum(strategy, batch):
    step = lambda state, batch: {"seen": jnp.maximum(state["seen"], batch.max())}  # noqa: E731
    options = tpudist.RunOptions(aggregation={"seen": "max"})
    state = strategy.run(step, args=({"seen": jnp.zeros(())}, batch), options=options)
    assert float(state["seen"]) == 3


def test_a_local_parameter_keeps_its_sharding(strategy):
    """A replica with several devices stores its copy in parts."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2}, devices=None)
    [batch] = strategy.experimental_distribute_dataset([np.arange(8, dtype=np.float32)])
    init = nnx.with_partitioning(nnx.initializers.zeros, (None, "fsdp"))
    model = strategy.create(lambda: nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0)))

    def step(model, batch):
        model.kernel[...] += batch.sum()

    for _ in range(2):
        strategy.run(step, args=(model, batch), options=KEEP)
    stacked = model.kernel[...].array
    assert "fsdp" in str(stacked.sharding.spec)
    assert np.asarray(stacked)[:, 0, 0].tolist() == [2.0, 10.0, 18.0, 26.0]
