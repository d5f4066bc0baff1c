import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist import ReduceOp, context
from tpudist.context.strategy_base import VariableHome

N = 8


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture
def default():
    return tpudist.get_strategy()


def where():
    """Returns the results of the four functions in SURFACE section 2."""
    replica = tpudist.get_replica_context()
    return (
        tpudist.has_strategy(),
        tpudist.in_cross_replica_context(),
        replica is not None and replica.strategy,
        tpudist.get_strategy(),
    )


# The current context: each row of the table.


def test_code_outside_all_scopes_is_in_the_default_replica_context(default):
    """A library may therefore call an all-reduce on the context unconditionally."""
    assert where() == (False, False, default, default)
    replica = tpudist.get_replica_context()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)
    assert default.num_replicas_in_sync == 1


def test_a_scope_is_cross_replica_context(mirrored, default):
    with mirrored.scope() as entered:
        assert entered is mirrored
        assert where() == (True, True, False, mirrored)
    assert where() == (False, False, default, default)


def test_a_replica_function_is_in_replica_context(mirrored):
    assert mirrored.run(where) == (True, False, mirrored, mirrored)
    with mirrored.scope():
        assert mirrored.run(where) == (True, False, mirrored, mirrored)


def test_a_merge_call_is_in_cross_replica_context(mirrored):
    def step():
        inside = tpudist.get_replica_context().merge_call(lambda strategy: (strategy, where()))
        return inside, where()

    (given, inside), after = mirrored.run(step)
    assert given is mirrored
    assert inside == (True, True, False, mirrored)
    assert after == (True, False, mirrored, mirrored)


def test_an_update_is_in_cross_replica_context(mirrored):
    with mirrored.scope():
        variable = tpudist.Variable(1.0)
        assert mirrored.extended.update(variable, lambda _: where()) == (
            True,
            True,
            False,
            mirrored,
        )


def test_scope_and_run_of_the_default_strategy_change_nothing(default):
    with default.scope():
        assert where() == (False, False, default, default)
    assert default.run(where) == (False, False, default, default)


def test_a_merge_call_of_the_default_context_is_cross_replica(default):
    seen = tpudist.get_replica_context().merge_call(lambda strategy: (strategy, where()))
    assert seen == (default, (False, True, False, default))


def test_another_thread_is_in_the_default_context(mirrored, default):
    """A scope belongs to the thread that entered it."""
    seen = []
    with mirrored.scope():
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()
    assert seen == [(False, False, default, default)]


def test_the_default_strategy_cannot_be_copied(default):
    assert tpudist.get_strategy() is default
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.copy(default)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(default)


# Scopes.


def test_a_scope_may_be_nested_in_itself_and_reentered(mirrored, default):
    """TensorFlow's scope objects fail the second time, and corrupt the stack."""
    scope = mirrored.scope()
    for _ in range(2):
        with scope, scope, mirrored.scope():
            assert tpudist.get_strategy() is mirrored
        assert tpudist.get_strategy() is default


def test_a_scope_ends_at_an_exception(mirrored, default):
    with pytest.raises(KeyError), mirrored.scope():
        raise KeyError
    assert where() == (False, False, default, default)
    assert jax.sharding.get_abstract_mesh().empty


def test_a_scope_of_a_different_strategy_inside_a_scope_raises_an_error(mirrored, default):
    other = tpudist.OneDeviceStrategy()
    with mirrored.scope():
        with pytest.raises(RuntimeError, match="Mixing different tpudist.Strategy objects: scope"):
            other.scope().__enter__()
        with pytest.raises(RuntimeError, match="Must not nest tpudist.Strategy scopes"):
            default.scope().__enter__()
        assert tpudist.get_strategy() is mirrored


def test_a_scope_raises_an_error_in_a_replica_function_but_not_in_a_merge_call(mirrored):
    def step():
        with mirrored.scope():
            pass

    with pytest.raises(RuntimeError, match="scope was called in a replica function"):
        mirrored.run(step)

    def merge(strategy):
        with strategy.scope():
            return where()

    merged = mirrored.run(lambda: tpudist.get_replica_context().merge_call(merge))
    assert merged == (True, True, False, mirrored)


def test_arrays_created_in_a_scope_work_with_arrays_on_the_mesh(mirrored):
    with mirrored.scope():
        variable = tpudist.Variable(jnp.arange(3.0))
        np.testing.assert_array_equal(jnp.ones(3) + variable.read_value(), [1, 2, 3])


# experimental_set_strategy.


def test_experimental_set_strategy_lasts_until_the_next_call(mirrored, default):
    """Notebooks need this, because a with block cannot span cells."""
    other = tpudist.OneDeviceStrategy()
    try:
        tpudist.experimental_set_strategy(mirrored)
        assert where() == (True, True, False, mirrored)
        with mirrored.scope():
            assert where() == (True, True, False, mirrored)
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.scope().__enter__()
        tpudist.experimental_set_strategy(other)
        assert tpudist.get_strategy() is other
    finally:
        tpudist.experimental_set_strategy(None)
    assert where() == (False, False, default, default)
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize("before", [False, True], ids=["nothing set", "after a set strategy"])
def test_setting_a_strategy_in_a_scope_raises_an_error_and_changes_nothing(mirrored, before):
    """TensorFlow leaves the old scope before it detects the error."""
    try:
        if before:
            tpudist.experimental_set_strategy(mirrored)
        with mirrored.scope():
            for strategy in (mirrored, None):
                with pytest.raises(RuntimeError, match="must not be called inside a `tpudist.Str"):
                    tpudist.experimental_set_strategy(strategy)
            assert tpudist.get_strategy() is mirrored
        assert tpudist.has_strategy() == before
    finally:
        tpudist.experimental_set_strategy(None)


# Methods that require cross-replica context.

CROSS_REPLICA_METHODS = {
    "run": lambda s: s.run(lambda: None),
    "lower": lambda s: s.lower(lambda: None),
    "reduce": lambda s: s.reduce("sum", jnp.ones(2), axis=None),
    "gather": lambda s: s.gather(jnp.ones(2), axis=0),
    "create": lambda s: s.create(lambda: jnp.ones(2)),
    "scope": lambda s: s.scope().__enter__(),
    "experimental_distribute_dataset": lambda s: s.experimental_distribute_dataset([np.ones(8)]),
    "distribute_datasets_from_function": lambda s: s.distribute_datasets_from_function(
        lambda _: [np.ones(8)]
    ),
    "experimental_make_numpy_dataset": lambda s: s.experimental_make_numpy_dataset(np.ones(8)),
    "experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(lambda _: np.ones(2))
    ),
}


@pytest.mark.parametrize("name", CROSS_REPLICA_METHODS)
def test_a_cross_replica_method_in_a_replica_function_raises_an_error(mirrored, name):
    """The result would be part of the trace of one replica."""
    instead = "all_gather" if name == "gather" else "merge_call"
    with pytest.raises(RuntimeError, match=rf"^{name} was called in a replica fun[^$]*{instead}"):
        mirrored.run(lambda: CROSS_REPLICA_METHODS[name](mirrored))


@pytest.mark.parametrize("name", CROSS_REPLICA_METHODS)
def test_a_cross_replica_method_in_the_scope_of_another_strategy_raises_an_error(mirrored, name):
    with tpudist.OneDeviceStrategy().scope():
        with pytest.raises(RuntimeError, match=rf"Mixing different .*: {name} of Mirrored"):
            CROSS_REPLICA_METHODS[name](mirrored)


def test_the_default_strategy_does_not_run_in_another_scope(mirrored, default):
    with mirrored.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        default.run(lambda: None)


# The replica context.


def test_replicas_are_numbered_in_the_order_of_the_mesh(mirrored):
    ids = mirrored.run(lambda: tpudist.get_replica_context().replica_id_in_sync_group)
    assert ids.dtype == jnp.int32
    assert [int(i) for i in mirrored.experimental_local_results(ids)] == list(range(N))
    assert mirrored.run(lambda: tpudist.get_replica_context().num_replicas_in_sync) == N


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [28, 8]),
        ("MEAN", [3.5, 1]),
        (ReduceOp.MIN, [0, 1]),
        (ReduceOp.MAX, [7, 1]),
    ],
)
def test_an_all_reduce_returns_the_same_value_on_every_replica(mirrored, op, expected):
    """A value that is equal on n replicas counts n times; TensorFlow misses this in some places."""

    def step():
        replica = tpudist.get_replica_context()
        mine = replica.replica_id_in_sync_group.astype(jnp.float32)
        return replica.all_reduce(op, {"mine": mine, "shared": 1.0, "none": None})

    reduced = mirrored.run(step)
    assert [float(reduced["mine"]), float(reduced["shared"])] == expected
    assert reduced["none"] is None


def test_a_sum_keeps_integers_and_a_mean_converts_them_to_floats(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        mine = replica.replica_id_in_sync_group
        return replica.all_reduce("sum", mine), replica.all_reduce("mean", mine)

    total, mean = mirrored.run(step)
    assert (total.dtype, int(total)) == (jnp.int32, 28)
    assert (mean.dtype, float(mean)) == (jnp.float32, 3.5)


def test_a_sum_counts_booleans(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        return replica.all_reduce("sum", replica.replica_id_in_sync_group > 2)

    assert int(mirrored.run(step)) == 5


@pytest.mark.parametrize(("op", "expected"), [("sum", 28.0), ("mean", 3.5)])
def test_the_gradient_of_an_all_reduce_is_the_same_all_reduce(mirrored, op, expected):
    """SURFACE section 5: y_i = all_reduce(x) * c_i has dy/dx = the reduction of all c."""

    def step():
        replica = tpudist.get_replica_context()
        c = replica.replica_id_in_sync_group.astype(jnp.float32)
        return jax.grad(lambda x: replica.all_reduce(op, x) * c)(1.0)

    assert float(mirrored.run(step)) == expected


def test_a_reduction_uses_the_value_of_a_variable(mirrored):
    with mirrored.scope():
        variable = tpudist.Variable(2.0)

    def step():
        replica = tpudist.get_replica_context()
        return replica.all_reduce("sum", variable), replica.all_gather(variable[None], 0)

    total, gathered = mirrored.run(step)
    assert float(total) == 2.0 * N
    assert gathered.tolist() == [2.0] * N


@pytest.mark.parametrize("axis", [0, -1])
def test_an_all_gather_concatenates_in_replica_order(mirrored, axis):
    def step():
        replica = tpudist.get_replica_context()
        mine = jnp.full((2, 1), replica.replica_id_in_sync_group)
        return replica.all_gather({"x": mine}, axis)

    x = mirrored.run(step)["x"]
    assert x.shape == ((2 * N, 1) if axis == 0 else (2, N))
    assert x.tolist() == np.concatenate([np.full((2, 1), i) for i in range(N)], axis).tolist()


def test_the_gradient_of_an_all_gather_is_each_replicas_part_of_the_sum(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        weight = jnp.arange(float(N)) * (1 + replica.replica_id_in_sync_group)
        return jax.grad(lambda x: (replica.all_gather(x[None], 0) * weight).sum())(1.0)

    gradients = mirrored.experimental_local_results(mirrored.run(step))
    assert [float(g) for g in gradients] == [i * 36.0 for i in range(N)]


@pytest.mark.parametrize(("value", "axis"), [(1.0, 0), (np.ones(2), 1), (np.ones(2), -2)])
def test_all_gather_rejects_an_axis_out_of_range(mirrored, value, axis):
    with pytest.raises(ValueError, match=rf"all_gather\(axis={axis}\)"):
        mirrored.run(lambda: tpudist.get_replica_context().all_gather(value, axis))


@pytest.mark.parametrize(("op", "error"), [("median", ValueError), (3, TypeError)])
def test_all_reduce_rejects_an_unknown_reduction(mirrored, op, error):
    with pytest.raises(error, match="ReduceOp"):
        mirrored.run(lambda: tpudist.get_replica_context().all_reduce(op, 1.0))


def test_reductions_of_the_default_context_are_identities():
    """Code written for replicas runs without a strategy."""
    replica = tpudist.get_replica_context()
    x = jnp.arange(3.0)
    assert replica.all_reduce("sum", {"x": x})["x"].tolist() == [0, 1, 2]
    assert replica.all_gather(x, 0).tolist() == [0, 1, 2]
    assert replica.example_mask(x).tolist() == [True] * 3
    assert replica.num_examples(x) == 3
    assert replica.random_key(0) == jax.random.fold_in(jax.random.key(0), 0)


@pytest.mark.slow
def test_each_replica_has_its_own_random_key(mirrored):
    def step(key):
        return jax.random.bits(tpudist.get_replica_context().random_key(key))

    shared = jax.random.key(7)
    bits = [int(b) for b in mirrored.experimental_local_results(mirrored.run(step, (shared,)))]
    assert bits == [int(jax.random.bits(jax.random.fold_in(shared, i))) for i in range(N)]
    of_int = mirrored.experimental_local_results(mirrored.run(step, (7,)))
    assert [int(b) for b in of_int] == bits


def test_an_outdated_replica_context_raises_an_error(mirrored, default):
    """It would add a collective to a program that has no replicas."""
    kept = []
    mirrored.run(lambda: kept.append(tpudist.get_replica_context()))
    replica = kept[0]
    uses = {
        "all_reduce": lambda: replica.all_reduce("sum", 1.0),
        "all_gather": lambda: replica.all_gather(jnp.ones(1), 0),
        "merge_call": lambda: replica.merge_call(lambda s: None),
        "replica_id_in_sync_group": lambda: replica.replica_id_in_sync_group,
        "example_mask": lambda: replica.example_mask(jnp.ones(2)),
        "num_examples": lambda: replica.num_examples(jnp.ones(2)),
        "random_key": lambda: replica.random_key(0),
    }
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match=rf"^{name} was called on a Replica.*Default"):
            use()
        with mirrored.scope(), pytest.raises(RuntimeError, match="context is cross-replica"):
            use()
        with pytest.raises(RuntimeError, match="another replica function is running"):
            mirrored.run(lambda use=use: use())
    assert replica.strategy is mirrored


# merge_call.


def test_a_merge_call_reduces_and_returns_to_each_replica_its_part(mirrored):
    def merge(strategy, x, *, shared):
        assert isinstance(x, tpudist.PerReplica)
        total = strategy.reduce("sum", x, axis=None)
        return {
            "total": total,
            "mean": strategy.extended.reduce_to("mean", x, destinations=x),
            "mine": x,
            "shared": shared,
        }

    def step():
        replica = tpudist.get_replica_context()
        return replica.merge_call(merge, (replica.replica_id_in_sync_group,), {"shared": "s"})

    merged = mirrored.run(step)
    assert (int(merged["total"]), float(merged["mean"])) == (28, 3.5)
    assert [int(x) for x in mirrored.experimental_local_results(merged["mine"])] == list(range(N))
    assert merged["shared"] == "s"


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [("sum", 0, 28 * 2 + 8), ("mean", 0, 4.0), ("max", 0, 8), ("min", 0, 0), ("sum", (0,), 64)],
)
def test_a_merge_call_can_reduce_over_dims(mirrored, op, axis, expected):
    def step():
        replica = tpudist.get_replica_context()
        mine = replica.replica_id_in_sync_group + jnp.arange(2)
        return replica.merge_call(lambda s, x: s.reduce(op, x, axis=axis), (mine,))

    assert float(mirrored.run(step)) == expected


def test_a_merge_call_gathers(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        return replica.merge_call(
            lambda s, x: s.gather(x, 0), (replica.replica_id_in_sync_group[None],)
        )

    assert mirrored.run(step).tolist() == list(range(N))


def test_a_merge_call_reduces_a_batch_of_values(mirrored):
    def merge(strategy, x):
        return strategy.extended.batch_reduce_to("sum", [(x, x), (1, x)])

    def step():
        replica = tpudist.get_replica_context()
        return replica.merge_call(merge, (replica.replica_id_in_sync_group,))

    assert [int(x) for x in mirrored.run(step)] == [28, N]


def test_arithmetic_on_per_replica_values_in_a_merge_call_raises_an_error(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        return replica.merge_call(lambda s, x: x + 1, (replica.replica_id_in_sync_group,))

    with pytest.raises(TypeError, match=r"int32\[\] on each replica, being traced.* as one array"):
        mirrored.run(step)


def test_local_results_in_a_merge_call_include_all_replicas(mirrored):
    def step():
        replica = tpudist.get_replica_context()

        def merge(strategy, x):
            parts = strategy.experimental_local_results(x)
            assert len(parts) == N
            return sum(i * part for i, part in enumerate(parts))

        return replica.merge_call(merge, (replica.replica_id_in_sync_group,))

    assert int(mirrored.run(step)) == sum(i * i for i in range(N))


def test_local_results_with_unequal_rows_raise_an_error_in_a_merge_call(mirrored):
    """The program of all replicas requires parts of the same shape."""
    data = mirrored.experimental_make_numpy_dataset(np.arange(11.0)).batch(16)
    [batch] = mirrored.experimental_distribute_dataset(data)

    def step(x):
        merge = lambda s, x: s.experimental_local_results(x)  # noqa: E731
        return tpudist.get_replica_context().merge_call(merge, (x,))

    with pytest.raises(ValueError, match=r"all_gather.*combines values of different shapes"):
        mirrored.run(step, (batch,))


def test_an_exception_in_a_merge_call_is_raised_unchanged_by_run(mirrored, default):
    def merge(strategy):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        mirrored.run(lambda: tpudist.get_replica_context().merge_call(merge))
    assert where() == (False, False, default, default)


def test_a_merge_call_works_in_a_loop_of_the_program(mirrored):
    """TensorFlow rejects it in control flow."""

    def step(x):
        replica = tpudist.get_replica_context()

        def body(total, _):
            return total + replica.merge_call(
                lambda s, y: s.reduce("sum", y, axis=None), (replica.replica_id_in_sync_group,)
            ), None

        return jax.lax.scan(body, x, length=3)[0]

    assert int(mirrored.run(step, (jnp.int32(0),))) == 3 * 28


def test_iterating_a_distributed_dataset_in_a_replica_function_raises_an_error(mirrored):
    dataset = mirrored.experimental_distribute_dataset([np.ones(8)])
    with pytest.raises(ValueError, match="should be called from outside of the replica function"):
        mirrored.run(lambda: next(iter(dataset)))


def test_the_depth_of_the_stack_equals_the_number_of_scopes(mirrored):
    assert context.depth() == 0
    with mirrored.scope(), mirrored.scope():
        assert context.depth() == 2


def test_scopes_exited_out_of_order_restore_the_default(mirrored):
    outer, inner = mirrored.scope(), mirrored.scope()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert tpudist.get_strategy() is mirrored
    inner.__exit__(None, None, None)
    assert not tpudist.has_strategy()
    assert jax.sharding.get_abstract_mesh().empty


# Fields of each context; other combinations cannot be created.


def test_each_kind_of_context_has_its_fields(mirrored):
    Kind, Mode = context.ContextKind, context.Mode
    assert context.current().kind is Kind.DEFAULT
    seen = {}

    def merge(strategy):
        seen["merge"] = context.current().kind
        with strategy.scope():
            seen["scope in merge"] = context.current().kind

    def step(v):
        seen["run"] = context.current().kind
        tpudist.get_replica_context().merge_call(merge)
        strategy = tpudist.get_strategy()

        def update(v):
            seen["update"] = context.current().kind
            with strategy.scope():
                seen["scope in update"] = context.current().kind

        strategy.extended.update(v, update)

    with mirrored.scope():
        assert context.current().kind is Kind.SCOPE
        v = tpudist.Variable(1.0)
        mirrored.extended.update(v, lambda v: seen.update(eager=context.current().kind))

        @tpudist.function
        def whole():
            seen["function"] = context.current().kind
            with mirrored.scope():
                seen["scope in function"] = context.current().kind
            return jnp.ones(())

        whole()
    mirrored.run(step, args=(v,))
    assert seen == {
        "eager": Kind.UPDATE,
        "function": Kind.FUNCTION,
        "scope in function": Kind.FUNCTION,
        "run": Kind.REPLICA,
        "merge": Kind.MERGE,
        "scope in merge": Kind.MERGE,
        "update": Kind.UPDATE,
        "scope in update": Kind.UPDATE,
    }
    replica = context.current().replica_context
    for kind, bad in {
        Kind.SCOPE: {"replica_context": replica},
        Kind.DEFAULT: {},
        Kind.REPLICA: {"replica_context": replica},
        Kind.MERGE: {},
        Kind.FUNCTION: {},
    }.items():
        with pytest.raises(AssertionError):
            Mode(kind, mirrored, **bad)


def test_the_home_of_variables_follows_from_the_hooks(mirrored, default):
    Home = VariableHome
    assert mirrored.variable_home is Home.COMPONENTS
    assert default.variable_home is Home.ORDINARY
    assert tpudist.OneDeviceStrategy("cpu:0").variable_home is Home.ORDINARY
    central = tpudist.experimental.CentralStorageStrategy()
    assert central.variable_home is Home.STORAGE

    class Torn(tpudist.MirroredStrategy):
        storage = central.storage

    with pytest.raises(ValueError, match=r"Torn has a `storage`.* variables_have_components = F"):
        Torn()
