"""Per-replica values in NNX containers that `run` returned: each replica sees its own value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles

ROWS = np.arange(12, dtype=np.float32)
ZERO = np.zeros((), np.float32)


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def batches(strategy):
    return list(strategy.experimental_distribute_dataset([ROWS[:4], ROWS[4:8], ROWS[8:]]))


class Layer(nnx.Module):
    def __init__(self):
        self.total = nnx.Variable(jnp.asarray(ZERO))
        self.inner = nnx.List([nnx.Param(jnp.zeros(2))])


class Bare(nnx.Module):
    def __init__(self):
        self.total = jnp.asarray(ZERO)
        self.held = nnx.data({"again": [jnp.zeros(2)]})


def momentum():
    return nnx.Optimizer(Layer(), optax.sgd(0.1, momentum=0.9), wrt=nnx.Variable).opt_state


CONTAINERS = {
    "State": lambda: nnx.State({"total": jnp.asarray(ZERO)}),
    "State of Variables": lambda: nnx.State({"a": {"b": nnx.Param(jnp.zeros(2))}}),
    "Dict": lambda: nnx.Dict({"total": jnp.asarray(ZERO)}),
    "Dict of Variables": lambda: nnx.Dict({"a": nnx.Dict({"b": nnx.Param(jnp.zeros(2))})}),
    "List": lambda: nnx.List([jnp.asarray(ZERO), jnp.zeros(2)]),
    "Sequential": lambda: nnx.Sequential(Layer()),
    "Variable": lambda: nnx.Variable(jnp.asarray(ZERO)),
    "Variable of a pytree": lambda: nnx.Variable({"a": jnp.asarray(ZERO), "b": [jnp.zeros(2)]}),
    "Module": Layer,
    "Module without Variables": Bare,
    "split module": lambda: nnx.split(Layer())[1],
    "optimizer state": momentum,
    "pytree": lambda: {"a": [nnx.Dict({"b": jnp.asarray(ZERO)}), jnp.zeros(2)]},
}


def add(container, batch):
    return jax.tree.map(lambda x: x + batch.sum(), container)


def run_whole(strategy, fn, args):
    return tpudist.function(lambda *args: strategy.run(fn, args=args))(*args)


WAYS = {
    "run": lambda s, fn, args: s.run(fn, args=args),
    "function": run_whole,
}


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tpudist.PerReplica))


@pytest.mark.parametrize("kind", list(CONTAINERS))
@pytest.mark.parametrize(
    "way", ["run", pytest.param("debug", marks=pytest.mark.slow), pytest.param("function")]
)
def test_each_replica_adds_to_its_own_value(strategy, batches, kind, way):
    container = CONTAINERS[kind]()
    for batch in batches:
        if way == "debug":
            with strategy.debug():
                container = strategy.run(add, args=(container, batch))
        else:
            container = WAYS[way](strategy, add, (container, batch))
    for x in leaves_of(container):
        assert strategy.reduce("sum", x, axis=None).ravel()[0] == ROWS.sum(), x


@pytest.mark.parametrize("kind", ["State", "Dict of Variables"])
def test_sums_of_a_partial_batch_stay_separate_for_each_replica(strategy, kind):
    container = CONTAINERS[kind]()
    for batch in strategy.experimental_distribute_dataset([ROWS[:4], ROWS[4:7], ROWS[7:8]]):
        container = strategy.run(add, args=(container, batch))
    for x in leaves_of(container):
        assert strategy.reduce("sum", x, axis=None).ravel()[0] == ROWS[:8].sum()


def test_an_object_changed_in_place_keeps_a_value_per_replica(strategy, batches):
    """The step is compiled once."""
    layer = strategy.run(add, args=(Layer(), batches[0]))

    def grow(layer, batch):
        layer.total[...] += batch.sum()
        layer.inner[0][...] *= 2.0

    compiles = NewCompiles()
    for batch in batches[1:]:
        strategy.run(grow, args=(layer, batch))
    parts = strategy.experimental_local_results(layer.total[...])
    assert [float(x) for x in parts] == [0 + 1 + 4 + 5 + 8 + 9, 2 + 3 + 6 + 7 + 10 + 11]
    parts = strategy.experimental_local_results(layer.inner[0][...])
    assert [x.tolist() for x in parts] == [[4.0, 4.0], [20.0, 20.0]]
    assert len(compiles()) == 1


def test_debug_mode_and_a_function_change_an_object_in_the_same_way(strategy, batches):
    layer = strategy.run(add, args=(Layer(), batches[0]))

    def grow(layer, batch):
        layer.total[...] += batch.sum()

    with strategy.debug():
        strategy.run(grow, args=(layer, batches[1]))
    sums = tpudist.function(
        lambda layer, batch: (
            strategy.run(grow, args=(layer, batch)),
            strategy.reduce("sum", layer.total[...], axis=None),
        )
    )(layer, batches[2])
    assert float(sums[1]) == ROWS.sum()
    assert float(strategy.reduce("sum", layer.total[...], axis=None)) == ROWS.sum()


def test_several_steps_in_one_program_keep_local_values(strategy, batches):
    layer = strategy.run(add, args=(Layer(), batches[0]))

    def grow(layer, batch):
        layer.total[...] += batch.sum()

    strategy.run_steps(grow, iter(batches[1:]), 2, args=(layer,))
    assert float(strategy.reduce("sum", layer.total[...], axis=None)) == ROWS.sum()


@pytest.mark.slow
def test_replicas_with_several_devices_see_their_own_value(batches):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2})
    [batch] = strategy.experimental_distribute_dataset([np.arange(8, dtype=np.float32)])
    layer = strategy.create(Layer)
    for _ in range(2):
        layer = strategy.run(add, args=(layer, batch))
    assert float(strategy.reduce("sum", layer.total[...], axis=None)) == 2 * sum(range(8))


def test_a_variable_goes_back_to_one_value_for_all(strategy, batches):
    layer = strategy.run(add, args=(Layer(), batches[0]))
    total = lambda layer: layer.total[...] + 0  # noqa: E731
    assert isinstance(strategy.run(total, args=(layer,)), tpudist.PerReplica)
    layer.total.set_value(jnp.float32(3))
    assert float(strategy.run(total, args=(layer,))) == 3
    layer.total.set_value(strategy.run(lambda batch: batch.sum(), args=(batches[0],)))
    assert isinstance(strategy.run(total, args=(layer,)), tpudist.PerReplica)


def test_rows_of_a_partial_batch_in_a_container_raise(strategy):
    """A container does not count its rows, so padding would be summed with them."""
    [batch] = strategy.experimental_distribute_dataset([ROWS[:3]])
    state = strategy.run(lambda x: nnx.State({"rows": x * 2}), args=(batch,))
    for use in (nnx.State, nnx.Dict):
        held = use({"rows": nnx.Variable(state["rows"])})
        with pytest.raises(ValueError, match=r"container that holds PerReplica.*pass it by itself"):
            strategy.run(lambda s: s["rows"][...].sum(), args=(held,))
    assert float(strategy.reduce("sum", strategy.run(jnp.sum, (state["rows"],)), axis=None)) == 6


def test_verify_rejects_a_container_of_local_values(strategy, batches):
    layer = strategy.run(add, args=(Layer(), batches[0]))
    for held in (layer, nnx.state(layer)):
        with pytest.raises(ValueError, match="cannot exist on one device"):
            strategy.verify(add, args=(held, batches[0]))


def test_a_container_of_another_strategy_raises(strategy, batches):
    layer = strategy.run(add, args=(Layer(), batches[0]))
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(ValueError, match="but runs on 3 replica.*under another strategy"):
        other.run(lambda layer: layer.total[...], args=(layer,))
    with pytest.raises(ValueError, match="but runs on 3 replica.*under another strategy"):
        other.run(jax.tree.leaves, args=(nnx.state(layer),))
