"""strategy.extended: SURFACE section 4, and IndexedSlices where sections 4, 5 and 7 name them."""

import contextlib
import functools
import gc

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import tpudist
from compiles import NewCompiles
from tpudist import IndexedSlices, ReduceOp, VariableAggregation, VariableSynchronization
from tpudist.xla.hlo import collective_ops

NONE, SUM, MEAN, FIRST = VariableAggregation
ON_READ = VariableSynchronization.ON_READ

STRATEGIES = {
    "mirrored 8": tpudist.MirroredStrategy,
    "mirrored 2": lambda: tpudist.MirroredStrategy(["cpu:2", "cpu:5"]),
    "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "one device": tpudist.OneDeviceStrategy,
    "default": tpudist.get_strategy,
}


# Replicas of one device, and no scope at all: the others are variations of the first.
PARAMS = [
    name if name in ("mirrored 8", "default") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in STRATEGIES
]


@pytest.fixture(scope="module", params=PARAMS)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


def in_cross_replica(strategy):
    """Whether an update is in cross-replica context; the default strategy's is where it was."""
    return tpudist.in_cross_replica_context() or strategy is tpudist.context.default_mode().strategy


def make(strategy, value=(1.0, 2.0), **kwargs):
    with strategy.scope():
        return tpudist.Variable(np.asarray(value, kwargs.pop("dtype", np.float32)), **kwargs)


def my_number():
    """1, 2, ... as `[2]` floats: what differs between replicas."""
    return jnp.full(2, tpudist.get_replica_context().replica_id_in_sync_group + 1.0)


def in_merge_call(strategy, merge, *args):
    return strategy.run(lambda *x: tpudist.get_replica_context().merge_call(merge, x), args)


# The pattern of optimizers, as the pages of tf.distribute write it out.


class Momentum:
    """An optimizer as users of tf.distribute write one: merge_call, reduce, update, update."""

    def __init__(self, rate):
        self.rate, self.slots = rate, {}

    def build(self, variables):
        for v in variables:
            with tpudist.get_strategy().extended.colocate_vars_with(v):
                self.slots[v] = tpudist.Variable(jnp.zeros_like(v), trainable=False)
        self.steps = tpudist.Variable(0, trainable=False)

    def apply_gradients(self, gradients_and_variables):
        pairs = list(gradients_and_variables)
        replica = tpudist.get_replica_context()
        return replica.merge_call(self._merge, args=([g for g, _ in pairs], [v for _, v in pairs]))

    def _merge(self, strategy, gradients, variables):
        extended = strategy.extended
        pairs = list(zip(gradients, variables, strict=True))
        reduced = extended.batch_reduce_to(ReduceOp.MEAN, pairs)
        for v, g in zip(variables, reduced, strict=True):
            extended.update(v, self._change, args=(g,), kwargs={"slot": self.slots[v]})
        return extended.update_non_slot(extended.non_slot_devices(variables), self._count)

    def _change(self, v, g, slot):
        assert tpudist.in_cross_replica_context()
        velocity = slot.assign(0.5 * slot + g)
        return v.assign_sub(self.rate * velocity)

    def _count(self):
        return self.steps.assign_add(1)


def test_a_user_writes_an_optimizer_out_of_merge_call_reduce_and_update(strategy):
    n = strategy.num_replicas_in_sync
    scope = contextlib.nullcontext() if strategy is tpudist.get_strategy() else strategy.scope()
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    with scope:
        variables = [tpudist.Variable(x) for x in start]
        optimizer = Momentum(0.1)
        optimizer.build(variables)

    def step(x):
        scale = tpudist.get_replica_context().replica_id_in_sync_group + 1.0

        def loss(w, b):
            return scale * jnp.square(x @ w + b).sum()

        gradients = jax.grad(loss, argnums=(0, 1))(*(v.read_value() for v in variables))
        return optimizer.apply_gradients(zip(gradients, variables, strict=True))

    expected = [x.copy() for x in start]
    velocity = [np.zeros_like(x) for x in start]
    for i in range(3):
        x = rng.normal(size=4).astype(np.float32)
        assert int(strategy.run(step, (x,))) == i + 1
        error = 2 * (x @ expected[0] + expected[1]) * (n + 1) / 2
        for k, g in enumerate((np.outer(x, error), error)):
            velocity[k] = 0.5 * velocity[k] + g
            expected[k] -= 0.1 * velocity[k]
    for v, e in zip(variables, expected, strict=True):
        np.testing.assert_allclose(v, e, rtol=1e-4)
    assert int(optimizer.steps) == 3


# reduce_to, batch_reduce_to, broadcast_to.


@pytest.mark.parametrize("op", ["sum", "MEAN", ReduceOp.SUM, ReduceOp.MEAN])
def test_reduce_to_combines_wherever_the_result_is_wanted(strategy, op):
    n = strategy.num_replicas_in_sync
    x = strategy.run(my_number)
    v = make(strategy)
    expected = [n * (n + 1) / 2 if ReduceOp.parse(op) is ReduceOp.SUM else (n + 1) / 2] * 2
    everywhere = (v, x, v.values[0], jnp.ones(3), np.ones(3))
    for destinations in everywhere:
        assert strategy.extended.reduce_to(op, x, destinations).tolist() == expected
    for device in ("cpu:3", jax.devices()[3], "/job:localhost/device:CPU:3"):
        result = strategy.extended.reduce_to(op, x, device)
        assert result.tolist() == expected
        assert result.devices() == {jax.devices()[3]}


def test_reduce_to_of_a_plain_value_counts_it_once_for_each_replica(strategy):
    n = strategy.num_replicas_in_sync
    assert strategy.extended.reduce_to("mean", jnp.ones(2), "cpu:0").tolist() == [1, 1]
    assert strategy.extended.reduce_to("sum", jnp.ones(2), "cpu:0").tolist() == [n, n]


@pytest.mark.parametrize("destinations", [None, [], ["cpu:0"], ("cpu:0", "cpu:1"), {}, 3.0])
def test_destinations_that_are_neither_a_value_nor_a_device_are_refused(mirrored, destinations):
    x, extended = mirrored.run(my_number), mirrored.extended
    for call in (
        lambda: extended.reduce_to("sum", x, destinations),
        lambda: extended.batch_reduce_to("sum", [(x, x), (x, destinations)]),
        lambda: extended.broadcast_to(1.0, destinations),
    ):
        with pytest.raises(ValueError, match=r"received destinations=.*must be one value .*or one"):
            call()


def test_a_destination_that_does_not_exist_is_refused(mirrored):
    """TensorFlow takes any name, and puts the result on a device that is there."""
    with pytest.raises(ValueError, match="Device 'cpu:99' does not exist"):
        mirrored.extended.reduce_to("sum", mirrored.run(my_number), "cpu:99")


def test_variable_aggregations_are_rejected_as_reductions(mirrored):
    x = mirrored.run(my_number)
    for call in (
        lambda: mirrored.extended.reduce_to(SUM, x, x),
        lambda: mirrored.extended.batch_reduce_to(SUM, [(x, x)]),
    ):
        with pytest.raises(TypeError, match="must be a tpudist.ReduceOp"):
            call()


def test_batch_reduce_to_gives_a_list_in_order(strategy):
    n = strategy.num_replicas_in_sync
    x, v = strategy.run(my_number), make(strategy)
    y = strategy.run(lambda: 10 * my_number()[0])
    got = strategy.extended.batch_reduce_to("mean", [(x, v), (y, y), (jnp.ones(2), "cpu:1")])
    mean = (n + 1) / 2
    assert [z.tolist() for z in got] == [[mean, mean], 10 * mean, [1, 1]]
    assert got[2].devices() == {jax.devices()[1]}
    assert strategy.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize("pair", [[1, 2], 3, (1,), (1, 2, 3)])
def test_batch_reduce_to_rejects_values_without_destinations(mirrored, pair):
    with pytest.raises(ValueError, match=r"takes pairs \(value, destinations\)"):
        mirrored.extended.batch_reduce_to("sum", [pair])


@pytest.mark.parametrize("name", ["mirrored 8", "fsdp"])
def test_batch_reduce_to_is_one_collective(name):
    """One latency for all gradients, and not one for each."""
    strategy = STRATEGIES[name]()

    def step(x):
        mine = tpudist.get_replica_context().replica_id_in_sync_group
        parts = (x * mine, (x + mine)[None], x[0] * mine)
        merge = lambda s, *parts: s.extended.batch_reduce_to("sum", [(p, p) for p in parts])  # noqa: E731
        return tpudist.get_replica_context().merge_call(merge, parts)

    text = strategy.lower(step, (jnp.ones(3),)).compile().as_text()
    found = [(c.kind, c.num_bytes) for c in collective_ops.collectives(text)]
    assert found == [("all-reduce", 4 * (3 + 3 + 1))]


def test_broadcast_to_puts_a_value_on_all_devices_or_one(strategy):
    value = strategy.extended.broadcast_to(np.arange(3), make(strategy))
    assert value.sharding.device_set == set(strategy.mesh.devices.flat)
    one = strategy.extended.broadcast_to(jnp.arange(3), "cpu:4")
    assert one.devices() == {jax.devices()[4]}
    assert value.tolist() == one.tolist() == [0, 1, 2]
    assert strategy.extended.broadcast_to(3.5, "cpu:4") == 3.5
    merge = lambda s: s.extended.broadcast_to(jnp.ones(2), "cpu:0")  # noqa: E731
    assert in_merge_call(strategy, merge).tolist() == [1, 1]


def test_broadcast_to_refuses_values_that_differ(mirrored):
    x = mirrored.run(my_number)
    with pytest.raises(ValueError, match="values already differ between replicas. Reduce it"):
        mirrored.extended.broadcast_to(x, x)


# update, update_non_slot.


def test_an_update_in_a_replica_function_is_one_for_all_replicas(strategy):
    v = make(strategy, aggregation=SUM)
    local = make(strategy, synchronization=ON_READ, aggregation=SUM)

    def change(c, x):
        assert in_cross_replica(strategy)
        return c.assign_add(x)

    def step():
        replica, extended = tpudist.get_replica_context(), strategy.extended
        total = replica.all_reduce("sum", my_number())
        mine = extended.update(local, change, args=(my_number(),))
        return extended.update(v, change, args=(total,)), mine

    n = strategy.num_replicas_in_sync
    total = n * (n + 1) / 2
    new, mine = strategy.run(step)
    assert new.tolist() == v.tolist() == [total + 1, total + 2]
    expected = [[i + 2.0, i + 3.0] for i in range(n)]
    assert [np.asarray(x).tolist() for x in strategy.experimental_local_results(mine)] == expected
    if strategy.variables_have_components:
        assert [x.tolist() for x in local.values] == expected


def test_an_update_in_a_replica_function_with_values_that_differ_is_refused(mirrored):
    """TensorFlow writes them into the copies, in silence."""
    v = make(mirrored, name="weights")
    change = lambda c, x: c.assign(x)  # noqa: E731
    merge = lambda s, x: s.extended.update(v, change, args=(x,))  # noqa: E731
    for step in (
        lambda: mirrored.extended.update(v, change, args=(my_number(),)),
        lambda: tpudist.get_replica_context().merge_call(merge, (my_number(),)),
    ):
        with pytest.raises(ValueError, match="'weights' would differ between replicas"):
            mirrored.run(step)


def test_an_update_in_a_trace_gives_tuples_too(strategy):
    v = make(strategy)
    local = make(strategy, synchronization=ON_READ, aggregation=SUM)
    n = strategy.num_replicas_in_sync
    found = []

    def merge(s, x):
        update = functools.partial(s.extended.update, group=False)
        shared = update(v, lambda c: (c.assign_add(jnp.ones(2)), None))
        own = update(local, lambda c: c.assign(jnp.full(2, 3.0)))
        found.append((len(shared[0]), shared[1], len(own)))
        return sum(shared[0]), sum(own)

    shared, own = in_merge_call(strategy, merge, jnp.ones(2))
    assert set(found) == {(n, (None,), n)}
    assert shared.tolist() == [2.0 * n, 3.0 * n]
    assert own.tolist() == [3.0 * n, 3.0 * n]


def test_what_replicas_hold_after_an_update_is_on_their_devices(strategy):
    v = make(strategy)
    parts = strategy.extended.update(v, lambda c: c.assign_add(jnp.ones(2)), group=False)
    n, mesh = strategy.num_replicas_in_sync, strategy.replica_mesh
    assert [x.sharding.device_set for x in parts] == [set(mesh.devices_of(i)) for i in range(n)]
    assert [x.tolist() for x in parts] == [[2, 3]] * n


def test_an_update_does_not_aggregate(strategy):
    """Not even what the replicas of a SUM or MEAN variable would."""
    for aggregation in VariableAggregation:
        v = make(strategy, aggregation=aggregation)
        assert strategy.extended.update(v, lambda c: c.assign_add(1.0 + c)).tolist() == [3, 5]


def test_an_on_read_variable_cannot_be_read_in_the_update_of_another(mirrored):
    v = make(mirrored)
    local = make(mirrored, synchronization=ON_READ, aggregation=MEAN, name="seen")
    with pytest.raises(RuntimeError, match="'seen' was read in the update of another variable"):
        mirrored.extended.update(v, lambda c, x: c.assign(x), args=(local,))
    mirrored.extended.update(v, lambda c: local.assign_add(jnp.ones(2)))
    assert [x.tolist() for x in local.values] == [[2, 3]] * 8


def test_an_update_of_an_on_read_variable_is_compiled_once(mirrored):
    v = make(mirrored, synchronization=ON_READ, aggregation=SUM)

    def change(c, x):
        c.assign_add(x)

    mirrored.extended.update(v, change, args=(jnp.ones(2),))
    new_compiles = NewCompiles()
    for _ in range(3):
        mirrored.extended.update(v, change, args=(jnp.ones(2),))
    assert new_compiles() == []
    assert v.tolist() == [40, 48]
    del change
    gc.collect()
    assert len(mirrored.extended._updates) == 0


def test_an_update_of_a_component_is_refused(mirrored):
    with pytest.raises(ValueError, match="update\\(<component .*not one component"):
        mirrored.extended.update(make(mirrored).values[1], lambda c: None)


def test_an_update_under_another_strategy_is_refused(mirrored):
    other = tpudist.OneDeviceStrategy()
    v = make(mirrored)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        mirrored.extended.update(v, lambda c: c.read_value())
    with pytest.raises(RuntimeError, match="Mixing different"):
        other.run(lambda: mirrored.extended.update(v, lambda c: c.read_value()))


def test_a_scope_may_be_entered_in_an_update(mirrored):
    def change(c):
        with mirrored.scope():
            return c.assign_add(jnp.ones(2))

    assert mirrored.extended.update(make(mirrored), change).tolist() == [2, 3]


def test_update_non_slot_runs_once_for_all_devices(strategy):
    v, calls = make(strategy), []
    devices = strategy.extended.non_slot_devices([v])
    assert devices == tuple(strategy.mesh.devices.flat)

    def change(x, *, y):
        assert in_cross_replica(strategy)
        calls.append(x)
        return v.assign_add(x + y), "text"

    new, text = strategy.extended.update_non_slot(devices, change, (jnp.ones(2),), {"y": 1.0})
    assert (new.tolist(), text, len(calls)) == ([3, 4], "text", 1)
    apart = strategy.extended.update_non_slot(v, lambda: jnp.ones(2), group=False)
    assert [x.tolist() for x in apart] == [[1, 1]] * strategy.num_replicas_in_sync
    merge = lambda s: s.extended.update_non_slot(devices, lambda: v.assign_add(jnp.ones(2)))  # noqa: E731
    assert in_merge_call(strategy, merge).tolist() == v.tolist() == [4, 5]


@pytest.mark.parametrize("colocate_with", [None, (), 3, jnp.ones(2), (None,)])
def test_update_non_slot_rejects_objects_that_are_not_devices(mirrored, colocate_with):
    with pytest.raises(ValueError, match=r"strategy\.extended\.non_slot_devices\(variables\)"):
        mirrored.extended.update_non_slot(colocate_with, lambda: None)


# Variables and their components.


def test_components_lead_back_to_their_variable(strategy):
    """The law of value_container: value in local_results(value_container(value))."""
    extended, local_results = strategy.extended, strategy.experimental_local_results
    plain, per_replica = jnp.ones(2), strategy.run(my_number)
    for v in (make(strategy), make(strategy, synchronization=ON_READ, aggregation=SUM)):
        parts = local_results(v)
        assert len(parts) == strategy.num_replicas_in_sync
        assert all(x is y for x, y in zip(parts, v.values, strict=True))
        for part in parts:
            assert extended.value_container(part) is v
            assert part in local_results(extended.value_container(part))
            assert extended.variable_created_in_scope(part)
        assert extended.value_container(v) is v
        if not strategy.variables_have_components:
            assert parts == (v,)
    for value in (plain, per_replica, 3, None):
        assert extended.value_container(value) is value


def test_variable_created_in_scope_knows_the_strategys_own(strategy):
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.extended.variable_created_in_scope(make(strategy))
    assert not strategy.extended.variable_created_in_scope(make(other))
    assert not other.extended.variable_created_in_scope(make(strategy))
    assert not strategy.extended.variable_created_in_scope(jnp.ones(2))
    default = tpudist.get_strategy()
    assert default.extended.variable_created_in_scope(tpudist.Variable(1.0))


def test_read_var_reads_a_variable_and_returns_all_else(strategy):
    local = make(strategy, synchronization=ON_READ, aggregation=SUM)
    times = strategy.num_replicas_in_sync if strategy.variables_have_components else 1
    read = strategy.extended.read_var
    assert read(make(strategy)).tolist() == read(local.values[0]).tolist() == [1, 2]
    assert read(local).tolist() == [times, 2 * times]
    assert read(3) == 3
    assert strategy.run(lambda: read(local) + 0) is not None


def test_new_variables_are_split_as_the_one_they_are_colocated_with():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    table = make(strategy, np.zeros((64, 64)))
    spec = table.read_value().sharding.spec
    assert "fsdp" in spec
    with strategy.scope(), strategy.extended.colocate_vars_with(table):
        slot = tpudist.Variable(np.zeros((8, 8), np.float32))
        scalar = tpudist.Variable(0.0)
        odd = tpudist.Variable(np.zeros((3, 3), np.float32))
    with strategy.scope():
        alone = tpudist.Variable(np.zeros((8, 8), np.float32))
    for v, shape in ((slot, (2, 8)), (scalar, ()), (odd, (3, 3)), (alone, (8, 8))):
        assert v.read_value().addressable_data(0).shape == shape
        assert v.read_value().sharding.device_set == set(jax.devices())
    assert slot.assign_add(np.ones((8, 8), np.float32)).addressable_data(0).shape == (2, 8)


def test_colocation_needs_a_variable_of_the_strategy_in_its_scope(mirrored):
    v, extended = make(mirrored), mirrored.extended
    message = "colocate_vars_with must be called inside `with strategy.scope"
    with pytest.raises(RuntimeError, match=message):
        extended.colocate_vars_with(v)
    with pytest.raises(RuntimeError, match=message):
        mirrored.run(lambda: extended.colocate_vars_with(v))
    other = tpudist.Variable(1.0)
    with mirrored.scope():
        for wrong in (jnp.ones(2), other, None):
            with pytest.raises(ValueError, match="must only be passed a variable created in this"):
                extended.colocate_vars_with(wrong)
    with tpudist.get_strategy().extended.colocate_vars_with(v):
        assert float(tpudist.Variable(1.0)) == 1


# Devices and flags.


def test_a_strategy_tells_its_devices_and_the_default_one_does_not(strategy):
    extended = strategy.extended
    if strategy is tpudist.get_strategy():
        for ask in ("worker_devices", "parameter_devices"):
            with pytest.raises(
                RuntimeError, match=f"{ask} is not available on the default strategy"
            ):
                getattr(extended, ask)
    else:
        assert extended.worker_devices == tuple(strategy.mesh.devices.flat)
        assert extended.parameter_devices == extended.worker_devices
    flags = extended.experimental_require_static_shapes, extended.experimental_should_init
    assert (*flags, extended.should_checkpoint, extended.should_save_summary) == (True,) * 4
    assert extended.experimental_between_graph is False


def test_call_for_each_replica_is_run(strategy):
    n = strategy.num_replicas_in_sync
    fn = lambda x, *, y: (my_number() + x, y)  # noqa: E731
    mine, y = strategy.extended.call_for_each_replica(fn, [jnp.ones(2)], {"y": 3})
    assert strategy.reduce("sum", mine, axis=None).tolist() == [n * (n + 3) / 2] * 2
    assert y == 3
    assert strategy.extended.call_for_each_replica(lambda: 5) == 5


def test_a_numpy_dataset_is_made_by_extended_too(strategy):
    data = strategy.extended.experimental_make_numpy_dataset(np.arange(4))
    assert [int(x) for x in data] == [0, 1, 2, 3]


# Contexts.

CROSS_REPLICA_CALLS = {
    "reduce_to": lambda e, v: e.reduce_to("sum", jnp.ones(2), v),
    "batch_reduce_to": lambda e, v: e.batch_reduce_to("sum", [(jnp.ones(2), v)]),
    "broadcast_to": lambda e, v: e.broadcast_to(jnp.ones(2), v),
    "update_non_slot": lambda e, v: e.update_non_slot(v, lambda: None),
    "call_for_each_replica": lambda e, v: e.call_for_each_replica(lambda: None),
    "experimental_make_numpy_dataset": lambda e, v: e.experimental_make_numpy_dataset(np.ones(2)),
}


@pytest.mark.parametrize("name", CROSS_REPLICA_CALLS)
def test_a_cross_replica_method_is_refused_where_it_makes_no_sense(mirrored, name):
    """SURFACE section 2: allowed outside of all scopes, or in cross-replica context of its own."""
    v, call = make(mirrored), CROSS_REPLICA_CALLS[name]
    use = functools.partial(call, mirrored.extended, v)
    use()
    with mirrored.scope():
        use()
    with pytest.raises(RuntimeError, match=f"{name} was called in a replica function.*merge_call"):
        mirrored.run(lambda: use() and None)
    other = tpudist.OneDeviceStrategy()
    with other.scope(), pytest.raises(RuntimeError, match=f"Mixing different.*{name}"):
        use()


@pytest.mark.parametrize("name", CROSS_REPLICA_CALLS)
def test_outside_of_all_scopes_the_default_strategy_does_it_all(name):
    CROSS_REPLICA_CALLS[name](tpudist.get_strategy().extended, tpudist.Variable([1.0, 2.0]))


# IndexedSlices.


def my_slices(**kwargs):
    """One row for each replica: row i gets i + 1."""
    mine = tpudist.get_replica_context().replica_id_in_sync_group
    return IndexedSlices(jnp.full((1, 2), mine + 1.0), jnp.array([mine]), **kwargs)


@pytest.mark.parametrize("op", [pytest.param("sum", marks=pytest.mark.exhaustive), "mean"])
@pytest.mark.parametrize(
    "how",
    [
        "merge_call",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in ("all_reduce", "reduce", "reduce_to")
        ),
    ],
)
def test_slices_of_all_replicas_are_put_behind_each_other(strategy, op, how):
    n = strategy.num_replicas_in_sync

    def step():
        slices = my_slices(dense_shape=(8, 2))
        if how == "all_reduce":
            nest = {"slices": slices, "dense": jnp.ones(2)}
            got = tpudist.get_replica_context().all_reduce(op, nest)
            assert got["dense"].shape == (2,)
            return got["slices"]
        if how == "merge_call":
            merge = lambda s, x: s.reduce(op, x, axis=None)  # noqa: E731
            return tpudist.get_replica_context().merge_call(merge, (slices,))
        return slices

    got = strategy.run(step)
    if how == "reduce":
        got = strategy.reduce(op, got, axis=None)
    elif how == "reduce_to":
        got = strategy.extended.reduce_to(op, got, make(strategy))
    assert got.indices.tolist() == list(range(n))
    divisor = n if op == "mean" else 1
    assert got.values.tolist() == [[(i + 1) / divisor] * 2 for i in range(n)]
    assert got.dense_shape == (8, 2)
    assert "dense_shape=(8, 2)" in repr(got)
    assert got.dtype == jnp.float32


def test_slices_that_are_equal_everywhere_count_once_for_each_replica(strategy):
    n = strategy.num_replicas_in_sync
    slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([3]))
    for got in (
        strategy.reduce("sum", slices, axis=None),
        strategy.run(lambda: tpudist.get_replica_context().all_reduce("sum", slices)),
    ):
        assert (got.indices.tolist(), got.values.tolist()) == ([3] * n, [[1, 1]] * n)


def test_slices_can_be_summed_and_averaged_only(mirrored):
    slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([3]))
    replica = tpudist.get_replica_context
    with pytest.raises(ValueError, match="ReduceOp.MAX of IndexedSlices is not supported"):
        mirrored.run(lambda: replica().all_reduce("max", slices))
    with pytest.raises(ValueError, match="ReduceOp.MIN of IndexedSlices is not supported"):
        mirrored.reduce("min", slices, axis=None)
    with pytest.raises(ValueError, match="reduce\\(axis=0\\) of IndexedSlices"):
        mirrored.reduce("sum", slices, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather does not support IndexedSlices"):
        mirrored.run(lambda: replica().all_gather(slices, axis=0))
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        mirrored.gather(slices, axis=0)


# Scatter updates: SURFACE section 7, the results as TensorFlow 2.21 gives them.

TABLE = [2.0, 4.0, 8.0, 16.0]
REFERENCE = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
    "update": lambda table, i, x: table.__setitem__(i, x),
}


def scattered(what, indices, values):
    table = np.asarray(TABLE, np.float32)
    REFERENCE[what](table, np.asarray(indices), np.asarray(values, np.float32))
    return pytest.approx(table.tolist())


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["eager", "update", "merge_call", "replica"])
def test_each_scatter_changes_rows_in_each_context(strategy, where):
    variables = {what: make(strategy, TABLE) for what in REFERENCE}
    slices = IndexedSlices(jnp.array([2.0, 3.0]), jnp.array([0, 3]))

    def scatter_all():
        return {what: getattr(v, f"scatter_{what}")(slices) for what, v in variables.items()}

    if where == "eager":
        new = scatter_all()
    elif where == "update":
        new = {
            what: strategy.extended.update(
                v, lambda c, x, what=what: getattr(c, f"scatter_{what}")(x), args=(slices,)
            )
            for what, v in variables.items()
        }
    elif where == "replica":
        new = strategy.run(scatter_all)
    else:
        new = in_merge_call(strategy, lambda s: scatter_all())
    assert new.keys() == REFERENCE.keys()
    for what, v in variables.items():
        assert new[what].tolist() == v.tolist() == scattered(what, [0, 3], [2, 3]), what


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "add",
        "min",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("sub", "mul", "div", "max")),
    ],
)
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1, 2, 3])), max_size=6))
def test_all_slices_of_a_row_count(mirrored, what, slices):
    v = make(mirrored, TABLE)
    indices, values = np.array([i for i, _ in slices], int), np.array([x for _, x in slices])
    new = getattr(v, f"scatter_{what}")(IndexedSlices(values.astype(np.float32), indices))
    assert new.tolist() == scattered(what, indices, values)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_what_replicas_scatter_is_aggregated(what, aggregation):
    """Replica 0 changes row 0 by 2, replica 1 row 1 by 3."""
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    v = make(strategy, TABLE, aggregation=aggregation)

    def step():
        mine = tpudist.get_replica_context().replica_id_in_sync_group
        slices = IndexedSlices(jnp.array([mine + 2.0]), jnp.array([mine]))
        return getattr(v, f"scatter_{what}")(slices)

    expected = {
        SUM: scattered(what, [0, 1], [2, 3]),
        MEAN: scattered(what, [0, 1], [1, 1.5]),
        FIRST: scattered(what, [0], [2]),
    }[aggregation]
    assert strategy.run(step).tolist() == v.tolist() == expected


@pytest.mark.parametrize("what", ["min", "max", "update"])
def test_an_extreme_is_scattered_by_the_first_replica_or_by_all_alike(mirrored, what):
    for aggregation in (SUM, MEAN):
        v = make(mirrored, TABLE, aggregation=aggregation, name="table")
        for use in (lambda f: f(), mirrored.run):
            with pytest.raises(NotImplementedError, match=f"scatter_{what} of variable 'table' wi"):
                use(lambda v=v: getattr(v, f"scatter_{what}")(my_slices()))
    v = make(mirrored, TABLE, aggregation=FIRST)

    def step():
        mine = tpudist.get_replica_context().replica_id_in_sync_group
        return getattr(v, f"scatter_{what}")(IndexedSlices(jnp.array([mine + 3.0]), mine[None]))

    assert mirrored.run(step).tolist() == v.tolist() == scattered(what, [0], [3])


def test_an_ordinary_variable_takes_every_scatter():
    strategy = tpudist.OneDeviceStrategy()
    slices = IndexedSlices(jnp.array([3.0]), jnp.array([0]))
    for aggregation in VariableAggregation:
        v = make(strategy, TABLE, aggregation=aggregation, synchronization=ON_READ)
        assert v.scatter_max(slices).tolist() == [3, 4, 8, 16]
        assert v.scatter_add(slices).tolist() == [6, 4, 8, 16]


def test_scatters_that_would_make_the_copies_differ_are_refused(mirrored):
    v = make(mirrored, TABLE, name="table")

    def step():
        mine = tpudist.get_replica_context().replica_id_in_sync_group
        v.scatter_add(IndexedSlices(jnp.ones(1), mine[None]))

    with pytest.raises(ValueError, match="'table' would differ between replicas"):
        mirrored.run(step)
    slices = mirrored.run(my_slices)
    with pytest.raises(ValueError, match="scatter_add of variable 'table' received slices that"):
        v.scatter_add(slices)


def test_a_scatter_of_an_on_read_variable_is_refused(mirrored):
    v = make(mirrored, TABLE, synchronization=ON_READ, aggregation=SUM, name="seen")
    for what in REFERENCE:
        scatter = functools.partial(getattr(v, f"scatter_{what}"), IndexedSlices(1.0, [0]))
        for use in (lambda f: f(), mirrored.run):
            with pytest.raises(NotImplementedError, match=f"scatter_{what} of ON_READ variable"):
                use(scatter)


@pytest.mark.parametrize(
    ("slices", "error", "message"),
    [
        (jnp.ones(1), TypeError, r"takes tpudist.IndexedSlices\(values, indices\), but received"),
        (IndexedSlices(jnp.ones(2), jnp.array([0])), ValueError, r"Pass values float32\[1\]"),
        (IndexedSlices(jnp.ones(1), jnp.array([0.5])), ValueError, "Pass integers as indices"),
        (IndexedSlices(jnp.ones(1), jnp.array([4])), ValueError, "Rows 4 to 4 .* it has 4 rows"),
        (IndexedSlices(jnp.ones(1), jnp.array([-1])), ValueError, "Rows -1 to -1"),
        (IndexedSlices(jnp.ones(1, int), jnp.array([1])), ValueError, r"by values int32\[1\]"),
    ],
)
def test_slices_that_do_not_fit_are_refused(mirrored, slices, error, message):
    v = make(mirrored, TABLE)
    with pytest.raises(error, match=message):
        v.scatter_add(slices)
    assert v.tolist() == TABLE


def test_a_scalar_has_no_rows_to_scatter_to(mirrored):
    with pytest.raises(ValueError, match="because it is a scalar"):
        make(mirrored, 1.0).scatter_add(IndexedSlices(1.0, [0]))


@pytest.mark.slow
def test_rows_may_be_numbers_lists_and_of_any_rank(mirrored):
    v = make(mirrored, np.zeros((3, 2)))
    assert v.scatter_add(IndexedSlices(1.0, [[0, 2]])).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert v.scatter_update(IndexedSlices([[5.0, 6.0]], [1]))[1].tolist() == [5, 6]
    whole = make(mirrored, [7, -7], dtype=np.int32)
    assert whole.scatter_div(IndexedSlices([2, 2], [0, 1])).tolist() == [3, -3]


def test_a_row_that_is_not_there_is_left_out_where_it_is_computed(mirrored):
    v = make(mirrored, TABLE)
    slices = IndexedSlices(jnp.ones(3), jnp.array([-1, 1, 4]))
    add = lambda i: v.scatter_add(IndexedSlices(jnp.ones(3), i))  # noqa: E731
    assert mirrored.run(add, (slices.indices,)).tolist() == [2, 5, 8, 16]


def test_the_dense_shape_of_slices_is_known_when_they_are_traced(mirrored):
    def step(shape):
        return tpudist.IndexedSlices(jnp.ones((1, 2)), jnp.zeros(1, int), shape).values

    assert mirrored.run(step, ((4, 2),)).tolist() == [[1, 1]]
    with pytest.raises(TypeError, match="dense_shape=.* this array has no known values while"):
        mirrored.run(step, (jnp.array([4, 2]),))
