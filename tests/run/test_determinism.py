"""Bitwise identical results on every mesh: `deterministic=8` on 8, 2 and 1 devices.

An ordinary strategy with eight replicas runs each program as well. Its results must be equal
except for rounding, because it computes the communication between replicas differently.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import (
    InputOptions,
    MirroredStrategy,
    NumpyDataset,
    ReduceOp,
    TPUStrategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)

MESHES = (8, 2, 1)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 16)).astype(np.float32)
Y = RNG.normal(size=(120, 4)).astype(np.float32)
IMAGES = RNG.normal(size=(32, 8, 8, 3)).astype(np.float32)
W = RNG.normal(size=(16, 4)).astype(np.float32) * 0.3
AXIS = "replica"


def batches(strategy, data=(X, Y), size=40, **options):
    source = NumpyDataset(data).batch(size)
    return strategy.experimental_distribute_dataset(source, InputOptions(**options))


def train_mlp(strategy):
    """Adam, in plain JAX, with a partial batch per replica in none of the steps."""
    optimizer = optax.adamw(1e-2)
    params = {"w": W, "b": np.zeros(4, np.float32)}
    state = optimizer.init(params)

    def step(params, state, batch):
        x, y = batch

        def loss_of(params):
            return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        loss, grads = tpudist.get_replica_context().all_reduce("mean", (loss, grads))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(3):
        for batch in batches(strategy):
            params, state, loss = strategy.run(step, args=(params, state, batch))
            losses.append(loss)
    return losses, params


def train_on_partial_batches(strategy):
    """One of eight replicas has 1 of 36 examples, the others 5: weights, not means of means."""

    def step(w, batch):
        x, y = batch

        def loss_of(w):
            return jnp.sum((x @ w - y) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        count = jnp.float32(1) * x.shape[0]
        loss, grad, count = tpudist.get_replica_context().all_reduce("sum", (loss, grad, count))
        return w - 0.01 * grad / count, loss / count

    w, losses = W, []
    for batch in batches(strategy, size=36):
        w, loss = strategy.run(step, args=(w, batch))
        losses.append(loss)
    return losses, w


class Net(nnx.Module):
    """Convolution, normalization over all replicas, and dropout that differs on each replica."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=AXIS, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(x.mean((1, 2))))


def train_net(strategy):
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model, optimizer, x):
        def loss_of(model):
            return jnp.mean((model(x) - 1.0) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        loss, grads = tpudist.get_replica_context().all_reduce("mean", (loss, grads))
        optimizer.update(model, grads)
        return loss

    losses = []
    for _ in range(3):
        for x in batches(strategy, IMAGES, 16):
            losses.append(strategy.run(step, args=(model, optimizer, x)))
    return losses, jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))


def loop_over_collectives(strategy):
    """Runs collectives in scans, loops and branches, next to equal and different values."""
    (batch,) = batches(strategy, 0.01 * X[:32], 32)

    def step(x):
        def turn(carry, row):
            total, own = carry
            total = total + jax.lax.psum(row * own.sum(), AXIS)
            own = own * 0.5 + row
            return (total, own), (jax.lax.pmax(own.max(), AXIS), own.sum())

        start = jnp.zeros(16), jnp.ones(16)
        (total, own), (highest, sums) = jax.lax.scan(turn, start, x)

        def goes_on(state):
            return (state[0] < 5) & (jax.lax.pmin(state[1].sum(), AXIS) > -1e6)

        def body(state):
            i, value = state
            return i + 1, value + jax.lax.pmean(value * (1 + i), AXIS) + jax.lax.axis_index(AXIS)

        turns, value = jax.lax.while_loop(goes_on, body, (jnp.int32(0), own))
        chosen = jax.lax.cond(
            total.sum() > 0,
            lambda v: jax.lax.psum(v, AXIS) + 1,
            lambda v: jax.lax.psum(2 * v, AXIS) - 1,
            value,
        )
        inner = jax.jit(lambda v: jax.lax.pmean(jnp.sin(0.001 * v), AXIS))(value)
        return total, own, highest, sums, turns, value, chosen, inner

    return strategy.run(step, args=(batch,))


def talk(strategy):
    """Calls every collective with values that are equal on all replicas and values that differ."""
    (batch,) = batches(strategy, X[:32], 32)

    def step(x):
        me = jax.lax.axis_index(AXIS)
        own, same = x * (1 + me), jnp.arange(8.0)
        ring = [(i, (i + 3) % 8) for i in range(8)]
        line = [(i, i + 1) for i in range(7)]  # the first one gets nothing
        groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
        context = tpudist.get_replica_context()
        return {
            "sum": jax.lax.psum(own, AXIS),
            "sum of equal": jax.lax.psum(same, AXIS),
            "sum of integers": jax.lax.psum((own * 100).astype(jnp.int32), AXIS),
            "sum of complex": context.all_reduce("sum", own + 1j * x),
            "sum of 16 bits": context.all_reduce("sum", own.astype(jnp.bfloat16)),
            "mean": jax.lax.pmean({"a": own, "b": me}, AXIS),
            "extremes": (jax.lax.pmax(own, AXIS), jax.lax.pmin(same, AXIS)),
            "gathered": jax.lax.all_gather(own, AXIS),
            "gathered, tiled": jax.lax.all_gather(own, AXIS, axis=1, tiled=True),
            "gathered equal": jax.lax.all_gather(same, AXIS, axis=1),
            "scattered": jax.lax.psum_scatter(jnp.outer(same, own[0]), AXIS),
            "permuted": jax.lax.ppermute(own, AXIS, ring),
            "shifted": jax.lax.ppermute({"a": own, "b": same.astype(int)}, AXIS, line),
            "to all": jax.lax.all_to_all(jnp.outer(same, own[0]), AXIS, 0, 1),
            "of groups": jax.lax.psum(own, AXIS, axis_index_groups=groups),
            "broadcast": jax.lax.psum(jnp.where(me == 5, own, 0), AXIS),
            "me": me,
            "gradient": jax.grad(lambda v: (jax.lax.psum(v, AXIS) ** 2).sum())(own),
            "of gathered": context.all_gather(own, axis=0),
        }

    return strategy.run(step, args=(batch,))


def use_variables(strategy):
    with strategy.scope():
        w = Variable(W)
        seen = Variable(
            jnp.zeros(()),
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        last = Variable(
            jnp.zeros(16),
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN,
        )

    def step(batch):
        x, y = batch

        def loss_of(values):
            last.assign(x.mean(0))
            return jnp.mean((x @ values - y) ** 2)

        grad = jax.grad(loss_of)(w.value())
        w.assign(w - 0.1 * tpudist.get_replica_context().all_reduce("mean", grad))
        seen.assign_add(jnp.sum(x))
        return grad.sum()

    results = [strategy.run(step, args=(batch,)) for batch in batches(strategy)]
    reduced = [strategy.reduce(op, results[0], axis=None) for op in ("sum", "mean")]
    gathered = strategy.gather(
        strategy.run(lambda b: b[0] * 2, args=(next(iter(batches(strategy))),)), 0
    )
    return results, w.value(), seen.value(), last.value(), reduced, gathered


def run_whole_functions(strategy):
    """Runs many steps in one program, and compiled cross-replica code."""
    with strategy.scope():
        w = Variable(W)

    def step(batch):
        x, y = batch
        grad = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w.value())
        grad = tpudist.get_replica_context().all_reduce("mean", grad)
        w.assign(w - 0.1 * grad)
        return jnp.sum(x)

    iterator = iter(batches(strategy))
    many = strategy.run_steps(step, iterator, 3)

    @tpudist.function
    def whole(batch):
        total = strategy.reduce(ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)
        return total * 2, w.value().sum()

    return many, [whole(batch) for batch in batches(strategy)], w.value()


PROGRAMS = [
    train_mlp,
    train_on_partial_batches,
    train_net,
    loop_over_collectives,
    talk,
    use_variables,
    run_whole_functions,
]


def numbers(strategy, results):
    """Returns the results of a program, with the values of each replica."""
    flat = jax.tree.leaves(results, is_leaf=lambda x: isinstance(x, tpudist.DistributedValues))
    found = []
    for x in flat:
        found += map(np.asarray, strategy.experimental_local_results(x))
    return found


QUICK = (train_mlp, loop_over_collectives)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.exhaustive, id=x.__name__)
        for x in PROGRAMS
    ],
)
def test_a_program_is_bitwise_identical_on_every_mesh(program):
    devices = jax.devices()
    ordinary = MirroredStrategy(devices[:8])
    expected = numbers(ordinary, program(ordinary))
    first = None
    for count in MESHES:
        strategy = MirroredStrategy(devices[:count], deterministic=8)
        assert strategy.num_replicas_in_sync == 8
        found = numbers(strategy, program(strategy))
        first = first or found
        assert len(first) == len(found)
        for i, (x, y) in enumerate(zip(first, found, strict=True)):
            assert x.dtype == y.dtype, i
            assert x.tobytes() == y.tobytes(), (count, i, x, y)
    assert len(expected) == len(first)
    for x, y in zip(expected, first, strict=True):
        rtol = 2e-2 if x.dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(
            x.astype(np.complex64), y.astype(np.complex64), rtol=rtol, atol=1e-5
        )


@pytest.mark.parametrize(
    ("devices", "deterministic", "found"),
    [
        (2, 6, "a power of two, because sums are added in pairs, and pairs of those. Use 4 or 8"),
        (2, 0, "It must be a number of replicas"),
        (2, True, "It must be a number of replicas"),
        (2, 2.0, "It must be a number of replicas"),
        (8, 4, "on 8 device(s), which cannot all have the same number"),
        (3, 8, "on 3 device(s), which cannot all have the same number"),
    ],
)
def test_a_number_of_replicas_that_does_not_fit_raises(devices, deterministic, found):
    with pytest.raises(ValueError, match=re.escape(found)):
        MirroredStrategy(jax.devices()[:devices], deterministic=deterministic)


def test_replicas_that_span_devices_raise():
    with pytest.raises(ValueError, match="with replicas that span devices"):
        TPUStrategy(replica_axes={"fsdp": 2}, deterministic=4)


def by_branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda v: jax.lax.psum(v, AXIS), lambda v: v, x)


def by_turns(x):
    return jax.lax.while_loop(lambda v: v[0, 0] < 3, lambda v: jax.lax.pmean(v, AXIS) + x + 9, x)


@pytest.mark.parametrize("function", [by_branch, by_turns])
def test_a_collective_that_some_replicas_do_not_reach_raises_with_its_line(function):
    """Replicas on separate devices would wait forever, or add unrelated values."""
    strategy = MirroredStrategy(jax.devices()[:2], deterministic=4)
    (batch,) = batches(strategy, X[:32], 32)
    with pytest.raises(ValueError, match="in a branch or loop") as caught:
        strategy.run(lambda x: function(x), args=(batch,))
    assert "test_determinism.py" in str(caught.value)


class BySum(tpudist.CrossDeviceOps):
    """Adds in the order that the compiler chooses."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return jax.lax.psum(per_replica_value.array, AXIS)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [jax.lax.psum(x.array, AXIS) for x, _ in value_destination_pairs]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(tpudist.ReductionToOneDevice, marks=pytest.mark.slow),
        pytest.param(tpudist.HierarchicalCopyAllReduce, marks=pytest.mark.slow),
        BySum,
    ],
)
def test_cross_device_ops_are_bitwise_identical_on_every_mesh(make):
    parts = RNG.normal(size=(8, 1000)).astype(np.float32)
    found = set()
    for count in MESHES:
        ops = make()
        strategy = MirroredStrategy(jax.devices()[:count], ops, deterministic=8)
        value = strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        with strategy.scope():
            equal = ops.reduce(ReduceOp.SUM, strategy.replicate(np.ones(3, np.float32)), value)
            assert np.asarray(equal).tolist() == [8.0] * 3  # the number of replicas, not of devices
            results = [
                strategy.reduce("sum", value, axis=None),
                strategy.extended.reduce_to("sum", value, value),
                ops.reduce(ReduceOp.SUM, value, value),
            ]
        found.add(tuple(np.asarray(x).tobytes() for x in results))
    assert len(found) == 1
