import contextlib
import copy
import gc
import itertools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from tpudist import PerReplica, VariableAggregation, VariableSynchronization

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ = VariableSynchronization.ON_READ
START = [1.0, 2.0]

STRATEGIES = {
    "mirrored": tpudist.MirroredStrategy,
    "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "one device": tpudist.OneDeviceStrategy,
    "default": tpudist.get_strategy,
}


# Replicas of one device, and no scope at all: the others are variations of the first.
PARAMS = [
    name if name in ("mirrored", "default") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in STRATEGIES
]


@pytest.fixture(scope="module", params=PARAMS)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


def in_cross_replica(strategy):
    """Whether an update is in cross-replica context; not so under the default strategy."""
    return tpudist.in_cross_replica_context() or strategy is tpudist.context.default_mode().strategy


def make(strategy, aggregation=NONE, value=START, **kwargs):
    with strategy.scope():
        return tpudist.Variable(jnp.asarray(value), aggregation=aggregation, **kwargs)


def on_read(strategy, aggregation, value=START, **kwargs):
    return make(strategy, aggregation, value, synchronization=ON_READ, **kwargs)


def my_number():
    """Returns 1, 2, ... as `[2]` floats, which differ between replicas."""
    return jnp.full(2, tpudist.get_replica_context().replica_id_in_sync_group + 1.0)


def components(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


def reduced(aggregation, n):
    """Returns the aggregate of the replicas' numbers 1 to n."""
    return {SUM: n * (n + 1) / 2, MEAN: (n + 1) / 2, FIRST: 1.0}[aggregation]


# Mirrored variables: SURFACE section 7, row by row.


@pytest.mark.parametrize("aggregation", VariableAggregation)
@pytest.mark.parametrize("in_scope", [True, False])
def test_a_mirrored_variable_reads_as_one_array_in_cross_replica_context(
    strategy, aggregation, in_scope
):
    v = make(strategy, aggregation)
    if in_scope:
        with strategy.scope():
            assert v.read_value().tolist() == START
    assert v.numpy().tolist() == v.value().tolist() == START
    assert v.read_value().sharding.device_set == set(strategy.mesh.devices.flat)


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_a_cross_replica_assignment_is_the_value_of_every_copy(strategy, aggregation):
    v = make(strategy, aggregation)
    assert v.assign([5.0, 6.0]).tolist() == [5, 6]
    assert v.assign_add(jnp.ones(2)).tolist() == [6, 7]
    with strategy.scope():
        assert v.assign_sub(np.full(2, 2.0, np.float32)).tolist() == [4, 5]
    assert v.assign(jnp.zeros(2), read_value=False) is None
    assert v.numpy().tolist() == [0, 0]
    assert strategy.run(lambda: v + 0).tolist() == [0, 0]


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_a_mirrored_variable_reads_as_the_local_copy_in_a_replica_function(strategy, aggregation):
    v = make(strategy, aggregation)
    result = strategy.run(lambda: v.read_value() * 2)
    assert isinstance(result, jax.Array)
    assert result.tolist() == [2, 4]


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_what_replicas_assign_is_aggregated_and_applied_to_all(strategy, aggregation):
    n = strategy.num_replicas_in_sync
    expected = reduced(aggregation, n)
    v = make(strategy, aggregation)

    def step():
        first = v.assign(my_number())
        second = v.assign_add(my_number())
        third = v.assign_sub(my_number() * 3)
        assert v.assign_add(my_number(), read_value=False) is None
        return first, second, third, v.read_value()

    results = strategy.run(step)
    assert [x.tolist()[0] for x in results] == [k * expected for k in (1, 2, -1, 0)]
    assert v.numpy().tolist() == [0, 0]


def test_replicas_cannot_make_a_variable_without_aggregation_differ(strategy):
    """TensorFlow lets the copies diverge silently."""
    v = make(strategy, NONE, name="weights")
    for method in ("assign", "assign_add", "assign_sub"):

        def step(method=method):
            getattr(v, method)(my_number())

        if strategy.num_replicas_in_sync == 1:
            strategy.run(step)
            continue
        with pytest.raises(ValueError, match=r"Variable 'weights' would differ .* the replica id"):
            strategy.run(step)
        assert v.numpy().tolist() == START


def test_a_value_that_is_equal_everywhere_needs_no_aggregation(strategy):
    v = make(strategy, NONE)

    def step(x):
        total = tpudist.get_replica_context().all_reduce("sum", my_number())
        v.assign(total)
        return v.assign_add(x)

    n = strategy.num_replicas_in_sync
    result = strategy.run(step, (jnp.ones(2),))
    assert result.tolist() == v.numpy().tolist() == [n * (n + 1) / 2 + 1] * 2


@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
def test_a_number_assigned_in_a_replica_function_is_the_value(strategy, aggregation):
    v = make(strategy, aggregation, 1.0)

    def step():
        v.assign(5.0)
        v.assign_add(1)

    strategy.run(step)
    assert float(v) == 6


def test_a_number_assigned_to_a_variable_that_sums_is_refused(strategy):
    """The number would count n times, which is rarely intended."""
    v = make(strategy, SUM, 1.0, name="total")
    for step in (lambda: v.assign(5.0), lambda: v.assign_add(1), lambda: v.assign_sub(1)):
        if strategy.num_replicas_in_sync == 1:
            strategy.run(step)
        else:
            with pytest.raises(ValueError, match="assigned to variable 'total', which sums"):
                strategy.run(step)


def test_a_step_counter_adds_one_on_all_replicas_together(strategy):
    step_counter = make(strategy, FIRST, 0)
    for _ in range(3):
        strategy.run(lambda: step_counter.assign_add(1))
    assert (int(step_counter), step_counter.dtype) == (3, jnp.int32)


def test_a_merge_call_assigns_a_mirrored_variable_for_all(strategy):
    v = make(strategy, SUM)

    def merge(s, x):
        v.assign(s.reduce("mean", x, axis=None))
        v.assign_add(jnp.ones(2))
        return v.read_value()

    def step():
        return tpudist.get_replica_context().merge_call(merge, (my_number(),))

    expected = [reduced(MEAN, strategy.num_replicas_in_sync) + 1] * 2
    assert strategy.run(step).tolist() == v.numpy().tolist() == expected


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_a_variable_keeps_assigned_values_from_step_to_step(strategy, synchronization):
    """A read sees the writes of the last step, and earlier writes in the same step."""
    v = make(strategy, MEAN, synchronization=VariableSynchronization[synchronization])

    def step(x):
        before = v + 0
        v.assign(v * 2)
        return before, v.assign_add(x) - v

    values = []
    for _ in range(3):
        _, zero = strategy.run(step, (jnp.ones(2),))
        assert components(strategy, zero)[0] == [0, 0]
        values.append(v.numpy().tolist())
    assert values == [[3, 5], [7, 11], [15, 23]]


# ON_READ variables.


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
@pytest.mark.parametrize("in_scope", [True, False])
def test_an_on_read_variable_is_aggregated_when_read(strategy, aggregation, in_scope):
    """Each component starts with the initial value, so a sum counts it n times."""
    v = on_read(strategy, aggregation)
    times = strategy.num_replicas_in_sync if aggregation is SUM else 1
    if in_scope:
        with strategy.scope():
            assert v.numpy().tolist() == [times * x for x in START]
    assert v.read_value().tolist() == [times * x for x in START]
    assert (v + 1).tolist() == [times * x + 1 for x in START]


def test_an_on_read_variable_without_aggregation_has_no_one_value(strategy):
    v = on_read(strategy, NONE)
    n = strategy.num_replicas_in_sync
    if not strategy.variables_have_components:
        # It is an ordinary variable, as in TensorFlow.
        with strategy.scope():
            assert v.numpy().tolist() == START
        return
    with strategy.scope(), pytest.raises(ValueError, match="aggregation is NONE, so its comp"):
        v.read_value()
    assert v.assign(jnp.zeros(2)) is None
    assert v.assign_add(jnp.ones(2)) is None
    assert components(strategy, v) == [[1, 1]] * n


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_replicas_change_their_own_component_of_an_on_read_variable(strategy, aggregation):
    v = on_read(strategy, aggregation)
    n = strategy.num_replicas_in_sync

    def step():
        read = v.read_value()
        v.assign(my_number())
        v.assign_add(my_number() * 2)
        return read, v.assign_sub(my_number() / 2)

    read, new = strategy.run(step)
    assert components(strategy, read) == [START] * n
    expected = [[2.5 * (i + 1)] * 2 for i in range(n)]
    assert components(strategy, new) == components(strategy, v) == expected
    if aggregation is not NONE:
        assert v.numpy().tolist() == [2.5 * reduced(aggregation, n)] * 2


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_a_cross_replica_assignment_of_an_on_read_variable_reads_as_assigned(strategy, aggregation):
    """A sum gives each component its share."""
    v = on_read(strategy, aggregation)
    n = strategy.num_replicas_in_sync
    share = 8 / n if aggregation is SUM else 8
    assert v.assign(jnp.full(2, 8.0)).tolist() == [8, 8]
    assert components(strategy, v) == [[share] * 2] * n
    assert v.assign(jnp.full(2, 16.0), read_value=False) is None
    assert v.numpy().tolist() == [16, 16]


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_a_cross_replica_change_of_an_on_read_variable_changes_each_component(
    strategy, aggregation
):
    v = on_read(strategy, aggregation)
    assert v.assign_add(jnp.ones(2)).tolist() == [2, 3]
    assert v.assign_sub(jnp.ones(2)).tolist() == START
    assert components(strategy, v) == [START] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_a_cross_replica_change_of_an_on_read_sum_is_refused(method, in_scope):
    """It is not clear which component would change."""
    for make_strategy in (STRATEGIES["mirrored"], STRATEGIES["fsdp"]):
        strategy = make_strategy()
        v = on_read(strategy, SUM)
        where = strategy.scope() if in_scope else contextlib.nullcontext()
        with where, pytest.raises(ValueError, match=f"{method} of ON_READ variable .* not supp"):
            getattr(v, method)(jnp.ones(2))
        assert components(strategy, v)[0] == START


def test_an_integer_sum_loses_nothing_when_assigned(strategy):
    """TensorFlow stores int(7 / 2) on two replicas and reads 6."""
    v = on_read(strategy, SUM, [7, 9])
    for total in ([7, 16], [-3, 1], [8, 0]):
        assert v.assign(jnp.asarray(total)).tolist() == total
        parts = np.asarray(components(strategy, v))
        assert parts.sum(0).tolist() == total
        assert (np.ptp(parts, 0) <= 1).all()

    def step():
        return tpudist.get_replica_context().merge_call(lambda s: v.assign(jnp.array([7, -5])))

    assert strategy.run(step).tolist() == v.numpy().tolist() == [7, -5]


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_a_merge_call_is_cross_replica_for_an_on_read_variable(strategy, aggregation):
    """SURFACE section 18, trap 5."""
    v = on_read(strategy, aggregation)

    def merge(s):
        read = v.read_value()
        v.assign(jnp.full(2, 16.0))
        return read, v.read_value()

    def step():
        v.assign(my_number())
        return tpudist.get_replica_context().merge_call(merge), v.read_value()

    n = strategy.num_replicas_in_sync
    (read, inside), local = strategy.run(step)
    assert read.tolist() == [reduced(aggregation, n)] * 2
    assert inside.tolist() == v.numpy().tolist() == [16, 16]
    share = 16 / n if aggregation is SUM else 16
    assert {tuple(x) for x in components(strategy, local)} == {(share, share)}
    assert components(strategy, v) == [[share] * 2] * n


@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
def test_a_merge_call_changes_each_component_of_an_on_read_variable(strategy, aggregation):
    v = on_read(strategy, aggregation)

    def step():
        v.assign(my_number())
        add = lambda s: v.assign_add(jnp.ones(2))  # noqa: E731
        return tpudist.get_replica_context().merge_call(add)

    n = strategy.num_replicas_in_sync
    result = strategy.run(step)
    assert components(strategy, v) == [[i + 2.0] * 2 for i in range(n)]
    if aggregation is NONE and strategy.variables_have_components:
        assert result is None
    elif aggregation is NONE:
        assert result.tolist() == [2, 2]
    else:
        assert result.tolist() == v.numpy().tolist() == [reduced(aggregation, n) + 1] * 2


def test_a_merge_call_refuses_what_cross_replica_context_refuses(mirrored):
    total, none = on_read(mirrored, SUM), on_read(mirrored, NONE)
    for use, message in [
        (lambda s: total.assign_add(jnp.ones(2)), "not supported"),
        (lambda s: none.read_value(), "aggregation is NONE"),
    ]:
        with pytest.raises(ValueError, match=message):
            mirrored.run(lambda use=use: tpudist.get_replica_context().merge_call(use))


# Updates.


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_an_update_changes_all_copies_of_a_mirrored_variable(strategy, aggregation):
    v, other = make(strategy, aggregation), make(strategy, aggregation)
    update = strategy.extended.update
    assert update(v, lambda c, x: c.assign_add(x), (jnp.ones(2),)).tolist() == [2, 3]
    assert update(v, lambda c, x: c.assign(x * 1), (other,)).tolist() == START
    apart = update(v, lambda c, *, x: c.assign_sub(x), kwargs={"x": jnp.ones(2)}, group=False)
    assert [x.tolist() for x in apart] == [[0, 1]] * strategy.num_replicas_in_sync
    assert v.numpy().tolist() == [0, 1]
    nest = update(v, lambda c: {"read": c.read_value(), "rest": (None, 3)}, group=False)
    assert [x.tolist() for x in nest["read"]] == [[0, 1]] * strategy.num_replicas_in_sync
    assert nest["rest"] == ((None,), (3,))


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_an_update_sees_the_components_of_an_on_read_variable(strategy, aggregation):
    v = on_read(strategy, aggregation)
    n = strategy.num_replicas_in_sync
    strategy.run(lambda: v.assign(my_number()))

    def change(c, x):
        assert in_cross_replica(strategy)
        c.assign_add(x)
        return c.read_value()

    result = strategy.extended.update(v, change, (jnp.ones(2),))
    expected = [[i + 2.0] * 2 for i in range(n)]
    assert components(strategy, result) == components(strategy, v) == expected
    parts = strategy.extended.update(v, lambda c: c.read_value(), group=False)
    assert [x.tolist() for x in parts] == expected


def test_an_update_in_a_merge_call_sees_the_components(strategy):
    mirrored, local = make(strategy, SUM), on_read(strategy, SUM)

    def change(v, x):
        return v.assign_add(x)

    def merge(s, x):
        x = s.extended.reduce_to("mean", x, mirrored)
        s.extended.update(local, change, (x,))
        return s.extended.update(mirrored, change, (x,))

    def step():
        return tpudist.get_replica_context().merge_call(merge, (my_number() * 0 + 2,))

    n = strategy.num_replicas_in_sync
    assert strategy.run(step).tolist() == mirrored.numpy().tolist() == [3, 4]
    assert components(strategy, local) == [[3, 4]] * n


def test_an_update_with_values_that_differ_is_refused(mirrored):
    v = make(mirrored, name="weights")
    x = mirrored.run(my_number)
    with pytest.raises(ValueError, match="update of variable 'weights' received PerReplica"):
        mirrored.extended.update(v, lambda c, x: c.assign(x), (x,))


@pytest.mark.parametrize("what", ["array", "variable of another strategy"])
def test_an_update_of_something_else_than_the_strategys_variable_is_rejected(mirrored, what):
    target = jnp.ones(2) if what == "array" else make(tpudist.OneDeviceStrategy())
    with pytest.raises(ValueError, match="update\\(.* must be a Variable of Mirrored"):
        mirrored.extended.update(target, lambda c: None)


# Arrays that were read.


def test_an_array_read_before_a_step_stays_valid(strategy):
    """The step overwrites the variable's array in place; an array that was read must stay valid."""
    v = make(strategy, MEAN)
    step = lambda x: v.assign_add(x.sum() * jnp.ones(2), read_value=False)  # noqa: E731
    reads = []
    for i in range(4):
        reads.append(v.read_value())
        # The size changes, so that calls that hit the cache and calls that miss it alternate.
        strategy.run(step, (jnp.ones(1 + i // 2),))
    assert [x.tolist() for x in reads] == [[1, 2], [2, 3], [3, 4], [5, 6]]
    assert v.numpy().tolist() == [7, 8]


def test_local_results_read_before_a_step_stay_valid(strategy):
    mirrored, local = make(strategy, MEAN), on_read(strategy, SUM)

    def step():
        mirrored.assign_add(jnp.ones(2))
        local.assign_add(jnp.ones(2))

    for _ in range(2):
        old = [strategy.experimental_local_results(v)[0] for v in (mirrored, local)]
        old = [component.read_value() for component in old]
        expected = [x.tolist() for x in old]
        strategy.run(step)
        assert [x.tolist() for x in old] == expected


def test_a_variable_that_nobody_reads_is_overwritten_in_place(strategy):
    v = make(strategy, MEAN, np.zeros(1024, np.float32))

    def step():
        v.assign_add(jnp.ones(1024))

    strategy.run(step)
    before = v._value
    strategy.run(step)
    assert before.is_deleted()
    program = strategy.lower(step).compile()
    assert program.memory_analysis().alias_size_in_bytes == v._value.addressable_data(0).nbytes


def test_the_array_that_a_variable_was_made_of_is_nobody_elses(strategy):
    """Donating the variable's array deleted it, or crashed XLA when two variables shared it."""
    x = jnp.arange(16.0)
    v, w = make(strategy, MEAN, x), make(strategy, MEAN, x)
    w.assign(v)
    u = make(strategy, MEAN, v)
    assigned = jnp.ones(16)
    u.assign(assigned)

    def step():
        for variable in (u, v, w):
            variable.assign_add(jnp.ones(16))

    for _ in range(3):
        strategy.run(step)
    assert x.tolist() == np.arange(16).tolist()
    assert v.numpy().tolist() == w.numpy().tolist() == (np.arange(16) + 3).tolist()
    assert (assigned.tolist(), u.numpy().tolist()) == ([1] * 16, [4] * 16)


def test_a_numpy_array_is_copied(strategy):
    values = np.arange(64, dtype=np.float32)
    v = make(strategy, MEAN, values)
    values[:] = 7
    assert v.numpy().tolist() == list(range(64))
    strategy.run(lambda: v.assign_add(jnp.ones(64)))
    assert values.tolist() == [7] * 64


# Making them.


def test_an_initial_function_is_called_once(mirrored):
    calls = itertools.count()
    v = make(mirrored, MEAN, 0.0)
    with mirrored.scope():
        v = tpudist.Variable(lambda: jnp.full(2, next(calls)), dtype=jnp.bfloat16)
    assert (next(calls), v.dtype, v.shape, v.ndim, v.size) == (1, jnp.bfloat16, (2,), 1, 2)


def test_attributes_equal_the_arguments(strategy):
    v = make(strategy, SUM, name="v")
    assert (v.name, v.aggregation, v.trainable, v.on_read) == ("v", SUM, True, False)
    resolved = "ON_WRITE" if strategy.variables_have_components else "AUTO"
    assert v.synchronization is VariableSynchronization[resolved]
    assert v.strategy is v.distribute_strategy is strategy
    assert v.get_shape() == v.shape == (2,)
    assert v.device is strategy.mesh.devices.flat[0]
    assert v.constraint is None
    assert make(strategy, constraint=jnp.abs).constraint is jnp.abs
    with pytest.raises(RuntimeError, match="initial value of variable 'v' is not kept"):
        _ = v.initial_value
    assert strategy.extended.variable_created_in_scope(v)
    assert strategy.extended.value_container(v) is v
    assert strategy.extended.read_var(v).tolist() == START
    assert not on_read(strategy, SUM).trainable
    assert make(strategy, synchronization=ON_READ, trainable=True).trainable
    assert not make(strategy, trainable=False).trainable
    first, second = make(strategy).name, make(strategy).name
    assert first != second
    assert repr(v) == (
        f"<tpudist.Variable 'v' float32[2] (aggregation SUM) of {strategy!r}, value=[1., 2.]>"
    )
    if strategy.variables_have_components:
        assert "ON_READ, aggregation MEAN" in repr(on_read(strategy, MEAN))


def test_a_variable_outside_of_all_scopes_is_the_default_strategys():
    v = tpudist.Variable(1.0)
    assert v.strategy is tpudist.get_strategy()
    assert float(v.assign_add(1)) == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"synchronization": VariableSynchronization.NONE}, "NONE, which is not supported"),
        ({"synchronization": "ON_READ"}, "was made with synchronization='ON_READ'. Use one of"),
        (
            {"aggregation": "SUM"},
            "was made with aggregation='SUM'. Use one of VariableAggregation.NO",
        ),
        ({"aggregation": tpudist.ReduceOp.SUM}, "Use one of VariableAggregation"),
        ({"aggregation": MEAN, "dtype": jnp.int32}, "int32 and aggregation MEAN"),
        ({"constraint": 3}, "was made with constraint=3. Pass a function"),
        ({"shape": (1,)}, r"made with shape=\(1,\) and an initial value of shape \(\)"),
        ({"initial_value": None}, "was made without an initial value"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(mirrored, kwargs, message):
    with mirrored.scope(), pytest.raises(ValueError, match=message):
        tpudist.Variable(**{"initial_value": 1, **kwargs})


def test_a_large_variable_is_split_over_the_devices_of_a_replica():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    v = make(strategy, MEAN, np.arange(4096.0).reshape(64, 64))
    for _ in range(2):
        assert v._value.sharding.spec == jax.sharding.PartitionSpec("fsdp", None) or (
            v._value.addressable_data(0).shape == (16, 64)
        )
        strategy.run(lambda: v.assign_add(jnp.ones((64, 64))))
    assert v.numpy().tolist() == (np.arange(4096.0).reshape(64, 64) + 2).tolist()
    v.assign(jnp.zeros((64, 64)))
    assert v._value.addressable_data(0).shape == (16, 64)


# Wrong values and wrong places.


@pytest.mark.parametrize(
    "value",
    [jnp.ones(3), 1.0, jnp.ones((1, 2)), jnp.ones(2, jnp.complex64), np.ones(2, np.complex64)],
    ids=["other size", "scalar", "more dims", "complex", "complex numpy"],
)
def test_a_value_of_another_shape_or_kind_is_refused(mirrored, value):
    v = make(mirrored, MEAN, name="weights")
    message = r"Variable 'weights' holds float32\[2\], but was assigned"
    for method in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match=message):
            method(value)
        with pytest.raises(ValueError, match=message):
            mirrored.run(lambda x, method=method: method(x), (value,))
    assert v.numpy().tolist() == START


def test_a_value_of_another_precision_is_refused_but_a_python_number_converts(mirrored):
    half = make(mirrored, MEAN, jnp.ones((), jnp.bfloat16))
    assert half.assign(2.5).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"holds bfloat16\[\], but was assigned float32\[\]"):
        half.assign(jnp.float32(1))
    whole = make(mirrored, SUM, 3)
    for value in (2.5, [2.5], np.float32(2)):
        with pytest.raises(ValueError, match=r"holds int32\[\], but was assigned float32"):
            whole.assign(value)


@pytest.mark.parametrize(
    "value",
    [[1, 2], (1, 2.0), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]],
    ids=["list", "tuple", "integers", "bytes", "numpy in a list"],
)
def test_numbers_that_no_dtype_was_chosen_for_convert_as_in_tensorflow(mirrored, value):
    v = make(mirrored, MEAN)
    assert v.assign(value).tolist() == [1, 2]
    assert v.assign_add(value).tolist() == [2, 4]
    half = make(mirrored, MEAN, jnp.ones((), jnp.bfloat16))
    assert half.assign(np.int64(3)).dtype == jnp.bfloat16


@pytest.mark.parametrize("value", [2**40, [2**40], np.int64(2**40), np.array([2**40])])
def test_integers_do_not_wrap(mirrored, value):
    """The lowest 32 bits of the integers are 0."""
    shape = np.shape(value)
    whole = make(mirrored, SUM, jnp.zeros(shape, jnp.int32))
    with pytest.raises(
        ValueError, match=r"has dtype int32, .* but received integers from 1099511627"
    ):
        whole.assign(value)
    assert np.all(make(mirrored, MEAN, jnp.zeros(shape)).assign(value) == 2.0**40)


def test_assigning_values_that_differ_in_cross_replica_context_is_refused(mirrored):
    """TensorFlow silently assigns each component its own value."""
    v = make(mirrored, MEAN, name="weights")
    with pytest.raises(ValueError, match="A PerReplica was assigned to variable 'weights'"):
        v.assign(mirrored.run(my_number))


def test_a_part_given_as_an_argument_is_assigned_as_the_replicas_own(mirrored):
    v = make(mirrored, MEAN)
    parts = mirrored.run(my_number)
    mirrored.run(lambda x: v.assign(x), (parts,))
    assert v.numpy().tolist() == [4.5, 4.5]


def test_a_variable_of_another_strategy_is_refused(mirrored):
    other = tpudist.OneDeviceStrategy()
    v = make(other, MEAN, name="others")
    for step in (lambda: v.read_value(), lambda: v.assign(jnp.ones(2))):
        with pytest.raises(RuntimeError, match="'others' was made under OneDevice.* but is used"):
            mirrored.run(step)
    for variable in (v, on_read(other, MEAN, name="others")):
        for change in (variable.assign, variable.assign_add):
            with mirrored.scope(), pytest.raises(RuntimeError, match="'others' .* is assigned in"):
                change(jnp.ones(2))
        assert variable.assign(jnp.ones(2)).tolist() == [1, 1]


def test_a_value_from_anywhere_can_be_assigned(strategy):
    """A committed array on one device or on the mesh, a NumPy array, or a Python number."""
    v, w = make(strategy, MEAN), on_read(strategy, MEAN)
    there = jax.device_put(jnp.ones(2), jax.devices()[6])
    of_mesh = tpudist.MirroredStrategy().replicate(jnp.ones(2))
    for value in (
        there,
        of_mesh,
        np.ones(2, np.float32),
        [1.0, 1.0],
        make(strategy, value=[1.0, 1]),
    ):
        for variable in (v, w):
            assert variable.assign(value).tolist() == [1, 1]
            assert variable.assign_add(value).tolist() == [2, 2]


@pytest.mark.parametrize(
    "transform",
    [
        lambda change: jax.grad(lambda x: (change(), x)[1])(1.0),
        lambda change: jax.lax.scan(lambda c, _: (change(), (c, None))[1], 0.0, length=2),
        lambda change: jax.jit(lambda: change() and None)(),
        lambda change: jax.lax.cond(True, lambda: (change(), 1)[1], lambda: 2),
    ],
    ids=["grad", "scan", "jit", "cond"],
)
def test_assigning_in_a_nested_transformation_works(mirrored, transform):
    """See also `tests/run/test_assign_anywhere.py`."""
    v = make(mirrored, MEAN, name="weights")
    mirrored.run(lambda: transform(lambda: v.assign(jnp.ones(2), read_value=False)))
    assert v.numpy().tolist() == [1, 1]


def test_reading_in_a_nested_transformation_works(mirrored):
    v = make(mirrored, MEAN)

    def step(x):
        gradient = jax.grad(lambda w: (w * v * x).sum())(v.read_value())
        total, _ = jax.lax.scan(lambda c, _: (c + v, None), jnp.zeros(2), length=3)
        return gradient, total, jax.jit(lambda: v + 1)()

    results = mirrored.run(step, (jnp.ones(2),))
    assert [x.tolist() for x in results] == [[1, 2], [3, 6], [2, 3]]


def test_a_variable_in_a_function_of_jit_alone_is_refused(strategy):
    """Otherwise its value would be a constant of the program."""
    for v in make(strategy, MEAN, name="weights"), on_read(strategy, MEAN, name="weights"):
        with pytest.raises(RuntimeError, match="'weights' was read in a function that jax.jit"):
            jax.jit(lambda v=v: v + 1)()
        for change in (v.assign, v.assign_add, v.assign_sub):
            with pytest.raises(RuntimeError, match="'weights' was assigned in a function that"):
                jax.jit(change)(jnp.ones(2))
        assert v.numpy().tolist() == START


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy])
def test_a_variable_cannot_be_pickled(mirrored, duplicate):
    v = make(mirrored)
    for what in (v, v.values[1]):
        with pytest.raises(TypeError, match=r"cannot be pickled.*variable\.numpy\(\)"):
            duplicate(what)


def test_a_deep_copy_is_a_variable_of_its_own(strategy):
    for v in make(strategy, MEAN, name="w"), on_read(strategy, SUM):
        strategy.run(lambda v=v: v.assign_add(jnp.ones(2)))
        components = v.values  # in use while the copy is made
        [new], before = copy.deepcopy([v]), v.numpy().tolist()
        assert new.numpy().tolist() == before
        assert (new.name, new.aggregation, new.strategy) == (v.name, v.aggregation, v.strategy)
        assert [x.tolist() for x in new.values] == [x.tolist() for x in components]
        assert set(map(id, new.values)).isdisjoint(map(id, components))
        strategy.run(lambda new=new: new.assign_add(jnp.ones(2)))
        assert v.numpy().tolist() == before
        assert new.numpy().tolist() != before


# As an array.


OPERATORS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    operator.matmul,
)


@pytest.fixture(scope="module")
def in_replicas(mirrored):
    """Returns the result of each operator in a replica function."""
    v, w = make(mirrored), make(mirrored, value=[3.0, 4.0])
    results = mirrored.run(lambda: [op(v, w) for op in OPERATORS])
    return dict(zip(OPERATORS, results, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPERATORS)
def test_arithmetic_uses_the_value(mirrored, in_replicas, op):
    v, w = make(mirrored), make(mirrored, value=[3.0, 4.0])
    x, y = jnp.asarray(START), jnp.asarray([3.0, 4.0])
    for left, right in ((v, w), (v, y), (x, w)):
        assert op(left, right).tolist() == op(x, y).tolist()
    assert in_replicas[op].tolist() == op(x, y).tolist()
    if op is not operator.matmul:
        assert op(v, 2).tolist() == op(x, 2).tolist()
        assert op(2, v).tolist() == op(2, x).tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "op",
    [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift, divmod],
)
def test_integer_arithmetic_uses_the_value(mirrored, op):
    v, w = make(mirrored, value=[6, 5]), make(mirrored, value=[3, 2])
    x, y = jnp.array([6, 5]), jnp.array([3, 2])
    expected = np.asarray(op(x, y)).tolist()
    for left, right in ((v, w), (v, y), (x, w), (v, [3, 2]), (np.array([6, 5]), w)):
        result = op(left, right)
        assert np.asarray(result).tolist() == expected
        assert isinstance(jax.tree.leaves(result)[0], jax.Array)
    assert np.asarray(op(2, v)).tolist() == np.asarray(op(2, x)).tolist()


def test_other_operators_use_the_value(mirrored):
    v, bools, whole = make(mirrored), make(mirrored, value=[True, False]), make(mirrored, value=7)
    assert [(-v).tolist(), (+v).tolist(), abs(-v).tolist()] == [[-1, -2], START, START]
    assert (~bools).tolist() == (bools ^ True).tolist() == [False, True]
    assert round(make(mirrored, value=[1.26, 2.0]), 1).tolist() == pytest.approx([1.3, 2.0])
    assert (len(v), [float(x) for x in v], 2.0 in v) == (2, START, True)
    assert (list(range(whole))[-1], f"{whole:03d}", f"{v}") == (6, "007", repr(v))
    assert (complex(whole), float(whole), int(whole), bool(whole)) == (7 + 0j, 7.0, 7, True)
    assert (v[1].tolist(), v[None].shape, v[...].tolist(), v.tolist()) == (2, (1, 2), START, START)
    assert v.sparse_read([1, 0, 1]).tolist() == [2, 1, 2]
    with pytest.raises(TypeError):
        iter(whole)


@pytest.mark.parametrize("in_replica_function", [False, True])
def test_numpy_and_what_jax_does_not_compile_take_a_variable(mirrored, in_replica_function):
    v, w = make(mirrored), make(mirrored, value=[3.0, 4.0])

    def compute():
        return jnp.stack([v, w]).sum() + v @ w, jnp.einsum("i,i->i", v, w), np.ones(2) + v

    results = mirrored.run(compute) if in_replica_function else compute()
    assert [x.tolist() for x in results] == [21, [3, 8], [2, 3]]
    assert all(isinstance(x, jax.Array) for x in results)
    if not in_replica_function:
        assert np.add(v, w).tolist() == [4, 6]
        assert np.where(v > 1, v, w).tolist() == [3, 2]


def test_a_variable_is_found_as_the_object_it_is(mirrored):
    """Variables can be keys of dicts and elements of sets, although `==` compares elements."""
    v, w, one = make(mirrored), make(mirrored), make(mirrored, value=1.0)
    assert (v == w).tolist() == [True, True]
    assert ({v: 1, w: 2}[w], len({v, w, v}), v in {w}) == (2, 2, False)
    assert not (v == None)  # noqa: E711
    assert v != "text"
    assert mirrored.run(v.assign_add, (jnp.ones(2),)).tolist() == [2, 3]
    assert mirrored.run(v.assign_add, (jnp.ones(2),)).tolist() == [3, 4]
    assert float(mirrored.run(one.assign, (jnp.float32(3),))) == 3


def test_a_sum_in_place_binds_the_name_to_an_array(mirrored):
    v = w = make(mirrored)
    w += 1
    assert isinstance(w, jax.Array)
    assert v.tolist() == START


def test_a_variable_converts_as_its_value(mirrored):
    v = make(mirrored)
    assert np.asarray(v).tolist() == jnp.asarray(v).tolist() == START
    assert np.asarray(v, np.float64).dtype == np.float64
    assert np.array(v, copy=True).tolist() == START


def test_variables_passed_as_arguments_are_changed_in_place(strategy):
    v = make(strategy, MEAN)
    step = lambda variables: variables["v"].assign_add(jnp.ones(2))  # noqa: E731
    for _ in range(2):
        strategy.run(step, ({"v": v},))
    assert v.numpy().tolist() == [3, 4]


def test_a_variable_captured_first_in_a_later_call_is_found(strategy):
    """A trace finds the captured variables; another trace may find more of them."""
    v, w = make(strategy, MEAN), make(strategy, MEAN)

    def step(x):
        v.assign_add(jnp.ones(2))
        if x.shape[0] > 1:
            w.assign(v * 10)
        return v.read_value()

    seen = [strategy.run(step, (jnp.ones(size),)).tolist() for size in (1, 2, 1, 2, 1)]
    assert seen == [[2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    assert w.numpy().tolist() == [50, 60]


def test_a_variable_made_after_the_step_can_be_used_by_its_next_trace(strategy):
    variables = [make(strategy, MEAN)]

    def step(x):
        for v in variables:
            v.assign_add(jnp.ones(2))

    strategy.run(step, (jnp.ones(1),))
    variables.append(make(strategy, MEAN))
    strategy.run(step, (jnp.ones(2),))
    assert [v.numpy().tolist() for v in variables] == [[3, 4], [2, 3]]


def test_other_variables_come_and_go_without_a_compile(strategy):
    v = make(strategy, MEAN)

    def step():
        v.assign_add(jnp.ones(2))

    strategy.run(step)
    new_compiles = NewCompiles()
    for _ in range(3):
        other = make(strategy, MEAN)
        strategy.run(step)
        del other
        gc.collect()
    assert new_compiles() == []
    assert v.numpy().tolist() == [5, 6]


def test_a_replicas_result_of_an_on_read_variable_is_per_replica(mirrored):
    v = on_read(mirrored, SUM)
    assert isinstance(mirrored.run(lambda: v + 0), PerReplica)
    assert mirrored.reduce("sum", v, axis=None).tolist() == [8, 16]
    assert mirrored.reduce("mean", v, axis=0).tolist() == 1.5
    assert mirrored.gather(v, axis=0).tolist() == START * 8


# Components.


@pytest.mark.slow
def test_a_component_reads_as_what_its_replica_holds(mirrored):
    v, local = make(mirrored, name="w"), on_read(mirrored, SUM, name="seen")
    mirrored.run(lambda: local.assign(my_number()))
    for i, (copied, own) in enumerate(zip(v.values, local.values, strict=True)):
        device = jax.devices()[i]
        suffix = f"/replica_{i}" if i else ""
        assert (copied.name, own.name) == (f"w{suffix}", f"seen{suffix}")
        assert copied.device is own.device is device
        assert copied.read_value().devices() == own.value().devices() == {device}
        assert (copied.tolist(), own.numpy().tolist()) == (START, [i + 1.0] * 2)
        assert (own + 1).tolist() == [i + 2.0] * 2
        assert (own == i + 1).all()
        assert own != v.values[i]
        assert (own.shape, own.dtype, own.ndim, own.size) == ((2,), jnp.float32, 1, 2)
        assert (own.trainable, own.aggregation, own.synchronization) == (False, SUM, ON_READ)
        assert own.distribute_strategy is mirrored
    where = jax.devices()[1]
    assert repr(v.values[1]) == f"<component 'w/replica_1' float32[2] of a Variable on {where}>"


def test_a_component_of_a_split_variable_is_split_over_its_replicas_devices():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    v = make(strategy, MEAN, np.arange(4096.0, dtype=np.float32).reshape(64, 64))
    local = on_read(strategy, SUM)
    for i in range(2):
        value = v.values[i].read_value()
        assert value.sharding.device_set == set(jax.devices()[4 * i : 4 * i + 4])
        assert value.addressable_data(0).shape == (16, 64)
        assert value.tolist() == v.tolist()
    local.values[1].assign([5.0, 6.0])
    assert [x.tolist() for x in local.values] == [START, [5, 6]]
    assert strategy.run(lambda: local.assign_add(jnp.ones(2))) is not None
    assert local.tolist() == [8, 10]


@pytest.mark.parametrize("in_scope", [True, False])
def test_a_component_of_an_on_read_variable_is_assigned_alone(mirrored, in_scope):
    v = on_read(mirrored, SUM)
    component = v.values[3]
    with mirrored.scope() if in_scope else contextlib.nullcontext():
        assert component.assign([5.0, 6.0]).tolist() == [5, 6]
        assert component.assign_add(jnp.ones(2)).tolist() == [6, 7]
        elsewhere = jax.device_put(jnp.ones(2), jax.devices()[1])
        assert component.assign_sub(elsewhere).tolist() == [5, 6]
        assert (component + 1).tolist() == [6, 7]
        assert component.assign(jnp.full(2, 7.0), read_value=False) is None
    expected = [START] * 3 + [[7, 7]] + [START] * 4
    assert [x.tolist() for x in v.values] == expected
    mirrored.run(lambda: v.assign_add(jnp.ones(2)))
    assert component.tolist() == [8, 8]
    assert v.tolist() == [7 * 2.0 + 8, 7 * 3.0 + 8]
    with pytest.raises(ValueError, match=r"but was assigned float32\[3\]"):
        component.assign(jnp.ones(3))


def test_a_copy_of_a_mirrored_variable_cannot_be_assigned_alone(mirrored):
    """TensorFlow silently lets it differ from the other copies."""
    component = make(mirrored, name="w").values[1]
    for method in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(ValueError, match=f"{method} of 'w/replica_1' .*equal copies of a mirr"):
            getattr(component, method)(jnp.ones(2))


def test_a_component_is_not_for_replica_functions(mirrored):
    component = on_read(mirrored, SUM, name="seen").values[2]
    for step, what in (
        (component.read_value, "read"),
        (lambda: component.assign([1, 2]), "assigned"),
    ):
        with pytest.raises(RuntimeError, match=f"'seen/replica_2' was {what} in a replica func"):
            mirrored.run(lambda step=step: step() and None)


def test_a_component_stays_the_same_object_as_long_as_it_is_held(mirrored):
    v = make(mirrored)
    component = v.values[1]
    assert v.values[1] is component
    assert component in v.values
    assert component not in make(mirrored).values
    assert {component: 1}[v.values[1]] == 1
    del v
    gc.collect()
    assert component.tolist() == START, "a component keeps its variable alive"


def test_an_array_read_from_a_component_stays_valid(mirrored):
    v = make(mirrored, MEAN)
    for expected in ([1, 2], [2, 3], [3, 4]):
        read = v.values[2].read_value()
        mirrored.run(lambda: v.assign_add(jnp.ones(2), read_value=False))
        assert read.tolist() == expected


# As tf.Variable.


@pytest.mark.parametrize(
    ("kwargs", "what"),
    [
        ({"validate_shape": False}, r"Variable\(validate_shape=False\) has no effect"),
        ({"caching_device": "cpu:0"}, r"Variable\(caching_device='cpu:0'\) has no effect"),
        ({"variable_def": "proto"}, r"Variable\(variable_def='proto'\) has no effect"),
        ({"import_scope": "scope"}, r"Variable\(import_scope='scope'\) has no effect"),
        ({"experimental_enable_variable_lifting": False}, "lifting=False.* has no effect"),
    ],
)
def test_a_parameter_of_tf_variable_without_a_meaning_is_a_warning(mirrored, kwargs, what):
    with pytest.warns(UserWarning, match=what):
        assert make(mirrored, **kwargs).tolist() == START


class _Wrapper:
    def __init__(self, wrapped):
        self._wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


def test_slices_may_be_any_object_with_values_and_indices(mirrored):
    variable = make(mirrored)
    variable.scatter_add(_Wrapper(tpudist.IndexedSlices(jnp.ones(1), jnp.array([1]))))
    assert variable.value().tolist() == [1.0, 3.0]
    with pytest.raises(TypeError, match=r"takes tpudist.IndexedSlices.*received _Wrapper"):
        variable.scatter_add(_Wrapper(None))  # type: ignore[arg-type]


def test_arguments_for_graph_operations_give_a_warning(mirrored):
    v, local = make(mirrored), on_read(mirrored, SUM)
    slices = tpudist.IndexedSlices([1.0], [0])
    for target, value in ((v, [1.0, 2.0]), (local.values[0], [1.0, 2.0])):
        for method in ("assign", "assign_add", "assign_sub"):
            with pytest.warns(UserWarning, match=rf"{method}\(use_locking=True\) has no effect"):
                getattr(target, method)(value, True)
            with pytest.warns(UserWarning, match=rf"{method}\(name='op'\) has no effect"):
                getattr(target, method)(value, False, "op")
    for what in ("add", "sub", "mul", "div", "min", "max", "update"):
        with pytest.warns(UserWarning, match=rf"scatter_{what}\(name='op'\) has no effect"):
            getattr(v, f"scatter_{what}")(slices, name="op")
    with pytest.warns(UserWarning, match=r"sparse_read\(name='op'\) has no effect"):
        v.sparse_read([0], name="op")


@pytest.mark.parametrize("shape", [(2,), [2], (None,), 2])
def test_a_shape_that_fits_may_be_named(mirrored, shape):
    assert make(mirrored, shape=shape).shape == (2,)


def test_a_variable_is_read_under_its_own_strategy_only(mirrored):
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    for v in (make(mirrored, name="weights"), on_read(mirrored, SUM, name="weights")):
        for use in (v.read_value, v.values[0].read_value, lambda v=v: v + 1):
            with other.scope(), pytest.raises(RuntimeError, match="'weights' .* but is read in"):
                use()
        with mirrored.scope():
            v.read_value()


def test_a_variable_of_no_scope_is_used_in_every_scope(mirrored):
    """It is an ordinary variable of the default strategy."""
    v = tpudist.Variable(START)
    with mirrored.scope():
        assert v.assign_add([1.0, 1.0]).tolist() == v.tolist() == [2, 3]
        assert v.assign(jnp.zeros(2)).tolist() == [0, 0]
        assert v.values == (v,)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.grad])
def test_a_variable_of_no_scope_is_read_again_in_nested_transformations(mirrored, around):
    """JAX's trace of the nested function, which found the variable, must not be reused."""
    v = tpudist.Variable(1.0)
    nested = around(lambda x: x * v.read_value())
    for value in (1.0, 2.0, 3.0):
        v.assign(value)
        found = mirrored.reduce("mean", mirrored.run(lambda: nested(1.0) + v), axis=None)
        assert float(found) == 2 * value


def test_an_ordinary_variable_is_as_without_a_strategy():
    """OneDeviceStrategy and the default strategy of TensorFlow also make plain variables."""
    for strategy in (tpudist.OneDeviceStrategy(), tpudist.get_strategy()):
        v = on_read(strategy, SUM)
        assert v.assign_add(jnp.ones(2)).tolist() == [2, 3]
        assert not v.trainable
        assert make(strategy, MEAN, 1).assign_add(1).tolist() == 2
        none = make(strategy, synchronization=VariableSynchronization.NONE)
        assert none.synchronization is VariableSynchronization.NONE
        assert strategy.run(v.assign_sub, (jnp.ones(2),)).tolist() == START


def test_values_that_differ_are_not_assigned_to_components_in_cross_replica_context(mirrored):
    v, x = on_read(mirrored, MEAN, name="seen"), mirrored.run(my_number)
    merge = lambda s, x: v.assign(x)  # noqa: E731
    step = lambda: tpudist.get_replica_context().merge_call(merge, (my_number(),))  # noqa: E731
    for assign in (lambda: v.assign(x), lambda: v.assign_add(x), lambda: mirrored.run(step)):
        with pytest.raises(ValueError, match="A PerReplica was assigned to variable 'seen' in cro"):
            assign()


# To JAX a variable is the array that it holds.


def test_functions_of_jax_take_variables_as_arrays(mirrored):
    with mirrored.scope():
        v, w = tpudist.Variable(jnp.arange(4.0)), tpudist.Variable(jnp.ones((4, 2)))
    assert float(jnp.sum(v)) == 6
    assert jnp.matmul(v, w).tolist() == [6, 6]
    assert jnp.where(v > 1, v, 0).tolist() == [0, 0, 2, 3]
    assert jax.nn.relu(-v).tolist() == [0, 0, 0, 0]
    assert jax.jit(lambda x: x + 1)(v).tolist() == [1, 2, 3, 4]
    assert jax.grad(lambda x: (x * x).sum())(v).tolist() == [0, 2, 4, 6]
    assert jax.tree.map(lambda x: x.shape, {"v": v, "w": w}) == {"v": (4,), "w": (4, 2)}


def test_functions_of_jax_take_variables_in_a_replica_function(mirrored):
    with mirrored.scope():
        params = {"w": tpudist.Variable(2.0), "b": tpudist.Variable(1.0)}

    def step(params, x):
        grads = jax.grad(lambda p: jnp.square(p["w"] * x + p["b"]))(params)
        for name, variable in params.items():
            variable.assign_sub(0.1 * tpudist.get_replica_context().all_reduce("mean", grads[name]))
        return params, jax.jit(jnp.add)(params["w"], params["b"])

    same, total = mirrored.run(step, (params, jnp.float32(3)))
    assert same["w"] is params["w"]
    assert (float(params["w"]), float(params["b"])) == pytest.approx((2 - 4.2, 1 - 1.4))
    assert float(total) == pytest.approx(-2.6)


def test_a_variable_goes_into_merge_call_and_out_as_itself(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(1.0)

    def step():
        def merge(strategy, variable, tree):
            assert variable is v
            assert tree["v"] is v
            return {"v": variable}

        result = tpudist.get_replica_context().merge_call(merge, (v,), {"tree": {"v": v}})
        assert result["v"] is v
        return result

    assert mirrored.run(step)["v"] is v


def test_components_are_arrays_to_jax(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(jnp.ones(2))
    assert jnp.sum(v.values[3]).tolist() == 2


@pytest.mark.parametrize("name", [3, b"x", ["x"], object()])
def test_a_name_must_be_a_string(name):
    with pytest.raises(TypeError, match="Variable\\(name=.*must be a string"):
        tpudist.Variable(1.0, name=name)


@pytest.mark.parametrize(
    ("make", "is_distributed"),
    [
        (tpudist.get_strategy, False),
        (tpudist.OneDeviceStrategy, False),
        (tpudist.experimental.CentralStorageStrategy, False),
        (lambda: tpudist.MirroredStrategy(["cpu:0"]), False),
        (lambda: tpudist.TPUStrategy(replica_axes={"fsdp": len(jax.devices())}), False),
        (lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2}), True),
        (tpudist.MirroredStrategy, True),
    ],
)
def test_a_variable_with_one_copy_is_not_a_distributed_value(make, is_distributed):
    """In TensorFlow, it is an ordinary variable, too."""
    strategy = make()
    with strategy.scope():
        v = tpudist.Variable(1.0)
    seen = []
    strategy.run(lambda: seen.append(isinstance(v, tpudist.DistributedValues)) or v.read_value())
    assert [*seen, isinstance(v, tpudist.DistributedValues)] == [is_distributed] * 2
    assert isinstance(v, tpudist.Variable)
    n = strategy.num_replicas_in_sync
    assert float(strategy.extended.reduce_to("sum", v, v)) == n
