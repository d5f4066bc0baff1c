"""Metrics in classes derived from NNX's: they are summed only if they are certainly sums."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


class Ema(nnx.metrics.Average):
    def update(self, *, values):
        self.total[...] = 0.9 * self.total[...] + 0.1 * values.mean()


class Top(nnx.metrics.Average):
    def update(self, *, values):
        self.total[...] = jnp.maximum(self.total[...], values.max())


class Squares(nnx.metrics.Average):
    def update(self, *, values):
        super().update(values=jnp.square(values))


class Steps(nnx.metrics.Average):
    def update(self, *, values):
        self.count[...] += 1


class Root(nnx.metrics.Average):
    def compute(self):
        return jnp.sqrt(super().compute())


def declared(base, **rules):
    class Declared(base):
        def __init__(self):
            super().__init__()
            for name, rule in rules.items():
                value = getattr(self, name)[...]
                setattr(self, name, nnx.metrics.MetricState(value, aggregation=rule))

    return Declared


def update(metric, values):
    metric.update(values=values)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "debug"])
@pytest.mark.parametrize("metric", [Ema, Top, Squares])
def test_what_an_update_of_its_own_does_is_not_taken_for_a_sum(mirrored, metric, eager):
    """Earlier, every metric was summed over the replicas: 8 times the average of an `Ema`."""
    metric = mirrored.create(metric)
    [batch] = mirrored.experimental_distribute_dataset([np.arange(16, dtype=np.float32)])
    with mirrored.debug() if eager else contextlib.nullcontext():
        with pytest.raises(ValueError, match=r"MetricState 'total' would.*aggregation='sum'\)"):
            mirrored.run(update, args=(metric, batch))


RIGHT = {
    "equal on all replicas": Steps,
    "sums, as declared": declared(Squares, total="sum", count="sum"),
    "the largest, as declared": declared(Top, total="max"),
    "only compute() is its own": Root,
    "of NNX": nnx.metrics.Average,
}


@pytest.mark.parametrize("kind", list(RIGHT))
def test_a_metric_of_a_user_equals_its_value_on_one_device(mirrored, kind):
    rows = np.arange(1, 17, dtype=np.float32)
    metric, alone = mirrored.create(RIGHT[kind]), RIGHT[kind]()
    [batch] = mirrored.experimental_distribute_dataset([rows])
    for _ in range(2):
        mirrored.run(update, args=(metric, batch))
        alone.update(values=rows)
    assert float(metric.total[...]) == float(alone.total[...])
    assert int(metric.count[...]) == int(alone.count[...])
    np.testing.assert_allclose(metric.compute(), alone.compute(), rtol=1e-6)


def assigned(metric, values):
    metric.total[...] = values.mean()


def decayed(metric, values):
    metric.total[...] = 0.9 * metric.total[...] + 0.1 * values.mean()


def counted(metric, values):
    metric.count[...] = 3


def begun_again(metric, values):
    metric.reset()
    metric.update(values=values)


def where(metric, values):
    metric.total[...] = jnp.where(values.size > 0, metric.total[...] + values.sum(), 0.0)


def in_a_function(strategy, step, args):
    return tpudist.function(lambda *args: strategy.run(step, args=args))(*args)


def eagerly(strategy, step, args):
    with strategy.debug():
        return strategy.run(step, args=args)


ways = pytest.mark.parametrize("run", [tpudist.Strategy.run, in_a_function, eagerly])


@ways
@pytest.mark.parametrize("step", [assigned, decayed])
def test_an_average_of_nnx_is_not_summed_if_a_step_does_something_else(mirrored, step, run):
    metric = mirrored.create(nnx.metrics.Average)
    [batch] = mirrored.experimental_distribute_dataset([np.arange(16, dtype=np.float32)])
    with pytest.raises(ValueError, match="MetricState 'total' would differ"):
        with mirrored.scope():
            run(mirrored, step, args=(metric, batch))


@ways
@pytest.mark.parametrize("step", [counted, begun_again, where])
def test_an_average_of_nnx_is_changed_by_a_step_as_on_one_device(mirrored, step, run):
    rows = np.arange(16, dtype=np.float32)
    metric, alone = mirrored.create(nnx.metrics.Average), nnx.metrics.Average()
    [batch] = mirrored.experimental_distribute_dataset([rows])
    for _ in range(2):
        with mirrored.scope():
            run(mirrored, step, args=(metric, batch))
        step(alone, rows)
    assert float(metric.total[...]) == float(alone.total[...])
    assert int(metric.count[...]) == int(alone.count[...])
