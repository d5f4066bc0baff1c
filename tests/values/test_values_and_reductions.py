import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist import PerReplica, ReduceOp
from tpudist.options import ValueContext

N = 8


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module", params=["mirrored", "fsdp", "one device"])
def strategy(request):
    return {
        "mirrored": tpudist.MirroredStrategy,
        "fsdp": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
        "one device": tpudist.OneDeviceStrategy,
    }[request.param]()


def distribute(strategy, parts):
    """A PerReplica of one array for each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: parts[c.replica_id_in_sync_group]
    )


def batch(strategy, rows, size, dims=()):
    """A distributed batch of `rows` of `size` rows, numbered from 1, and the host's."""
    full = np.zeros((size, *dims), np.float32)
    partial = np.arange(1.0, rows * int(np.prod(dims)) + 1, dtype=np.float32).reshape(rows, *dims)
    dataset = strategy.experimental_distribute_dataset([full, partial])
    return list(dataset)[1], partial


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


def rare(value):
    """Marks a value of a parameter as exhaustive."""
    return pytest.param(value, marks=pytest.mark.exhaustive)


NUMPY = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


# Reduce.


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("axis", [None, (0, -1), *(rare(x) for x in (0, 1, -1, (0, 1), [0], ()))])
def test_reduce_is_numpys_over_replicas_and_dims(strategy, op, axis):
    n = strategy.num_replicas_in_sync
    stacked = np.random.default_rng(0).integers(-9, 9, (n, 2, 3)).astype(np.float32)
    axes = () if axis is None else tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    expected = NUMPY[op](stacked, (0, *(a % 2 + 1 for a in axes)))
    got = strategy.reduce(op, distribute(strategy, stacked), axis=axis)
    assert isinstance(got, jax.Array)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got.sharding.device_set == set(strategy.mesh.devices.flat)


@pytest.mark.parametrize("op", ReduceOp)
def test_an_op_may_be_named_in_any_case(mirrored, op):
    x = distribute(mirrored, np.arange(8.0, dtype=np.float32))
    for spelling in (op, op.name, op.name.lower(), op.name.title()):
        assert float(mirrored.reduce(spelling, x, axis=None)) == NUMPY[op](np.arange(8.0))


@pytest.mark.parametrize("rows", [5, *map(rare, (1, 8, 15, 16))])
@pytest.mark.parametrize("op", ReduceOp)
def test_padding_counts_nothing_in_a_reduction_over_examples(mirrored, rows, op):
    """SURFACE section 18, trap 3: MEAN divides by the true number, empty replicas included."""
    x, host = batch(mirrored, rows, 16, (3,))
    got = mirrored.reduce(op, x, axis=0)
    np.testing.assert_allclose(got, NUMPY[op](host, 0), rtol=1e-6)
    np.testing.assert_allclose(mirrored.reduce(op, x, axis=(0, 1)), NUMPY[op](host), rtol=1e-6)


@pytest.mark.parametrize(("op", "value"), [("min", np.inf), ("max", -np.inf)])
def test_infinite_values_are_extremes_too(mirrored, op, value):
    """The padding must not count as the largest finite number."""
    x, _ = batch(mirrored, 5, 16)
    values = mirrored.run(lambda x: x + value, (x,))
    assert float(mirrored.reduce(op, values, axis=0)) == value


@pytest.mark.parametrize("rows", [5, *map(rare, (1, 8))])
@pytest.mark.parametrize(("op", "dtype"), [("sum", jnp.int32), ("min", jnp.int32), ("max", bool)])
def test_padding_counts_nothing_in_a_reduction_of_integers(mirrored, rows, op, dtype):
    x, host = batch(mirrored, rows, 16)
    values = mirrored.run(lambda x: (x - 2 if dtype is not bool else x > 2).astype(dtype), (x,))
    assert values.rows == x.rows
    expected = NUMPY[ReduceOp.parse(op)]((host - 2).astype(int) if dtype is not bool else host > 2)
    assert mirrored.reduce(op, values, axis=0) == expected


def test_six_examples_on_two_replicas_of_four_have_a_mean_over_six():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    x, host = batch(strategy, 6, 8)
    assert x.rows == (3, 3)
    assert float(strategy.reduce("mean", x, axis=0)) == host.mean() == 3.5


@pytest.mark.parametrize("op", ReduceOp)
def test_unequal_parts_have_no_sum_without_their_rows(mirrored, op):
    x, _ = batch(mirrored, 5, 16)
    with pytest.raises(
        ValueError, match=r"Replicas hold \(1, 1, 1, 1, 1, 0, .*Also reduce over that dim"
    ):
        mirrored.reduce(op, x, axis=None)


def test_full_parts_of_a_batch_reduce_without_their_rows(mirrored):
    x, host = batch(mirrored, 16, 16)
    np.testing.assert_array_equal(mirrored.reduce("sum", x, axis=None), host.reshape(8, 2).sum(0))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.bool_])
def test_integers_stay_integers_in_a_sum_and_become_floats_in_a_mean(mirrored, dtype):
    """TensorFlow's mean of integers is float64; JAX's is float32."""
    x = distribute(mirrored, np.ones((8, 2), dtype))
    total, mean = (mirrored.reduce(op, x, axis=None) for op in ("sum", "mean"))
    assert total.tolist() == [8, 8]
    assert total.dtype == (jnp.int32 if dtype is np.bool_ else dtype)
    assert (mean.tolist(), mean.dtype) == ([1, 1], jnp.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize(
    "make", [jnp.asarray, rare(np.asarray), rare(float)], ids=["jax", "numpy", "python"]
)
def test_a_plain_value_is_equal_on_every_replica(strategy, op, make):
    """The sum is n times the value, in reduce and in all_reduce (DESIGN D3)."""
    n = strategy.num_replicas_in_sync if op is ReduceOp.SUM else 1
    assert float(strategy.reduce(op, make(3.0), axis=None)) == 3 * n
    for value in (jnp.arange(3.0), np.arange(3.0)):
        got = strategy.reduce(op, value, axis=0)
        assert float(got) == NUMPY[op](np.arange(3.0)) * n


@pytest.mark.parametrize(("dtype", "value"), [(np.int8, 100), (np.uint8, 200), (np.int32, 2**30)])
def test_a_mean_of_integers_is_right_where_their_sum_does_not_fit(mirrored, dtype, value):
    """The sum over the replicas was one of the integers' dtype: a mean of 100 was -28."""

    def step(x):
        return tpudist.get_replica_context().all_reduce("mean", x)

    assert float(mirrored.run(step, (jnp.asarray(value, dtype),))) == value


def test_a_plain_integer_stays_an_integer(mirrored):
    assert mirrored.reduce("sum", jnp.int8(3), axis=None).dtype == jnp.int8
    assert int(mirrored.reduce("sum", 3, axis=None)) == 24
    assert int(mirrored.reduce("sum", True, axis=None)) == 8


def test_nests_reduce_leaf_by_leaf(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = tpudist.Variable(2.0)
    value = {
        "split": distribute(strategy, np.ones((n, 2), np.float32)),
        "plain": (jnp.ones(2), 1.0),
        "variable": variable,
        "none": None,
    }
    got = strategy.reduce("sum", value, axis=None)
    assert got["split"].tolist() == got["plain"][0].tolist() == [n, n]
    assert float(got["plain"][1]) == n
    assert float(got["variable"]) == 2 * n
    assert got["none"] is None


@pytest.mark.parametrize(
    ("op", "axis", "error", "message"),
    [
        ("median", None, ValueError, "'median' is not a valid ReduceOp. Use one of SUM, MEAN"),
        (
            None,
            None,
            TypeError,
            "received a value of type NoneType as its op. It must be a tpudist.Red",
        ),
        (tpudist.VariableAggregation.SUM, None, TypeError, "of type VariableAggregation"),
        ("sum", 2, ValueError, r"`axis` = 2 out of range for `value` with rank 2.*holds \[2, 3\]"),
        ("mean", -3, ValueError, "`axis` = -3 out of range for `value` with rank 2"),
        ("sum", "0", TypeError, "reduce\\(axis='0'\\): axis must be an int"),
        ("sum", 0.0, TypeError, "axis=0.0"),
        ("sum", True, TypeError, "axis=True"),
        ("sum", (0, None), TypeError, r"axis=\(0, None\)"),
    ],
)
@pytest.mark.parametrize("kind", ["split", "plain"])
def test_a_reduction_that_makes_no_sense_is_refused(mirrored, op, axis, error, message, kind):
    """TensorFlow answers some of these with an AssertionError."""
    x = np.ones((8, 2, 3), np.float32)
    x = distribute(mirrored, x) if kind == "split" else x[0]
    with pytest.raises(error, match=message):
        mirrored.reduce(op, x, axis=axis)


def test_an_assigned_value_brings_its_numbers_of_rows(mirrored):
    x, y = distribute(mirrored, np.ones((8, 2), np.float32)), distribute(mirrored, np.ones((8, 2)))
    y = tpudist.PerReplica(y.array, (2, 1) * 4)
    x[...] = y
    assert (x.rows, x.dim, x.other_rows) == ((2, 1) * 4, 0, ())
    assert float(mirrored.reduce("sum", x, axis=0)) == 12


def test_a_scalar_has_no_examples(mirrored):
    for x in (distribute(mirrored, np.arange(8.0)), 3.0):
        with pytest.raises(ValueError, match="`axis` = 0 out of range for `value` with rank 0"):
            mirrored.reduce("mean", x, axis=0)


def test_the_axis_must_be_given(mirrored):
    """TensorFlow requires it too, so that nobody averages averages by accident."""
    with pytest.raises(TypeError, match="axis"):
        mirrored.reduce("sum", 1.0)


def test_reductions_work_in_a_scope_and_out_of_it(strategy):
    x = distribute(strategy, np.ones((strategy.num_replicas_in_sync, 2), np.float32))
    outside = strategy.reduce("sum", x, axis=0)
    with strategy.scope():
        inside = strategy.reduce("sum", x, axis=0)
        gathered = strategy.gather(x, axis=0)
        parts = local(strategy, x)
    assert float(inside) == float(outside) == 2 * strategy.num_replicas_in_sync
    assert gathered.tolist() == [1, 1] * strategy.num_replicas_in_sync
    assert parts == [[1, 1]] * strategy.num_replicas_in_sync


# strategy.extended.


def test_reduce_to_reduces_wherever_it_was_wanted(mirrored):
    x = distribute(mirrored, np.arange(8.0, dtype=np.float32))
    with mirrored.scope():
        variable = tpudist.Variable(1.0)
    for destinations in (x, variable, "cpu:0"):
        assert float(mirrored.extended.reduce_to("mean", x, destinations)) == 3.5
    pairs = [(x, x), (1.0, variable)]
    batch = mirrored.extended.batch_reduce_to(ReduceOp.SUM, pairs)
    assert [float(v) for v in batch] == [28, 8]
    assert mirrored.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize("pair", [(1, 2, 3), [1, 2], 1])
def test_batch_reduce_rejects_objects_that_are_not_pairs(mirrored, pair):
    with pytest.raises(ValueError, match="takes pairs"):
        mirrored.extended.batch_reduce_to("sum", [pair])


def test_a_broadcast_value_is_on_every_device(mirrored):
    value = mirrored.extended.broadcast_to(jnp.arange(3), distribute(mirrored, np.arange(8)))
    assert value.sharding.is_fully_replicated
    assert value.sharding.device_set == set(mirrored.mesh.devices.flat)
    assert mirrored.extended.worker_devices == mirrored.extended.parameter_devices
    assert mirrored.extended.worker_devices == tuple(jax.devices())
    assert mirrored.extended.experimental_require_static_shapes
    assert mirrored.extended.should_checkpoint


# Gather.


@pytest.mark.parametrize("axis", [0, -1, *map(rare, (1, -2))])
def test_gather_concatenates_in_replica_order(strategy, axis):
    n = strategy.num_replicas_in_sync
    stacked = np.arange(n * 6.0, dtype=np.float32).reshape(n, 2, 3)
    got = strategy.gather({"x": distribute(strategy, stacked)}, axis=axis)["x"]
    np.testing.assert_array_equal(got, np.concatenate(stacked, axis))
    assert got.sharding.is_fully_replicated


@pytest.mark.parametrize("rows", [5, *map(rare, (1, 9, 16))])
def test_gather_leaves_out_the_padding(mirrored, rows):
    x, host = batch(mirrored, rows, 16, (3,))
    np.testing.assert_array_equal(mirrored.gather(x, axis=0), host)
    np.testing.assert_array_equal(mirrored.gather(x, axis=-2), host)


def test_gathering_unequal_parts_along_another_dim_is_refused(mirrored):
    x, _ = batch(mirrored, 5, 16, (3,))
    with pytest.raises(ValueError, match="gather along axis 1 needs parts of equal shape"):
        mirrored.gather(x, axis=1)


def test_equal_parts_of_a_partial_batch_gather_along_another_dim(mirrored):
    x, host = batch(mirrored, 8, 8, (3,))
    x = PerReplica(jnp.pad(x.array, ((0, 0), (0, 1), (0, 0))), (1,) * 8)
    got = mirrored.gather(x, axis=1)
    np.testing.assert_array_equal(got, host.reshape(1, 24))


@pytest.mark.parametrize("value", [jnp.arange(3), np.arange(3), 2])
def test_a_plain_value_is_gathered_as_it_is(mirrored, value):
    """Not repeated, as in TensorFlow."""
    got = mirrored.gather(value, axis=0)
    assert isinstance(got, jax.Array)
    assert got.tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        (1, ValueError, r"gather\(axis=1\): each replica holds \[2\], which has 1 dim"),
        (-2, ValueError, r"gather\(axis=-2"),
        (None, TypeError, r"gather\(axis=None"),
        ((0,), TypeError, r"gather\(axis=\(0,\)"),
        (True, TypeError, r"gather\(axis=True"),
    ],
)
def test_gathering_along_an_invalid_dim_is_rejected(mirrored, axis, error, message):
    with pytest.raises(error, match=message):
        mirrored.gather(distribute(mirrored, np.ones((8, 2))), axis=axis)


def test_scalars_cannot_be_gathered(mirrored):
    with pytest.raises(ValueError, match=r"A scalar has no dim to concatenate along.*x\[None\]"):
        mirrored.gather(distribute(mirrored, np.arange(8.0)), axis=0)


# Local results.


def test_local_results_are_the_parts_in_replica_order(strategy):
    n = strategy.num_replicas_in_sync
    stacked = np.arange(n * 4.0, dtype=np.float32).reshape(n, 4)
    x = distribute(strategy, stacked)
    parts = strategy.experimental_local_results(x)
    assert isinstance(parts, tuple)
    assert [np.asarray(p).tolist() for p in parts] == stacked.tolist()
    if n > 1:
        own = strategy.mesh.devices.reshape(n, -1)
        assert [p.sharding.device_set for p in x.values] == [set(devices) for devices in own]
        # They can be computed with: all are where the first one is.
        assert {p.sharding for p in parts} == {parts[0].sharding}
        assert parts[0].sharding.device_set == set(own[0])
        np.testing.assert_array_equal(sum(parts), stacked.sum(0))
        np.testing.assert_array_equal(jnp.stack(parts), stacked)


@pytest.mark.parametrize("rows", [5, *map(rare, (1, 9, 16))])
def test_local_results_leave_out_the_padding(mirrored, rows):
    x, host = batch(mirrored, rows, 16, (3,))
    each = -(-rows // 8)
    expected = [host[each * i : each * (i + 1)].tolist() for i in range(8)]
    assert local(mirrored, x) == expected


def test_local_results_of_a_nest_are_nests_with_plain_leaves_repeated(mirrored):
    x = distribute(mirrored, np.arange(8.0, dtype=np.float32))
    shared = jnp.ones(2)
    nests = mirrored.experimental_local_results({"x": x, "rest": (shared, None, "text")})
    assert len(nests) == N
    assert [float(nest["x"]) for nest in nests] == list(range(8))
    assert all(nest["rest"][0] is shared and nest["rest"][1:] == (None, "text") for nest in nests)
    assert mirrored.experimental_local_results([1, 2]) == ([1, 2],) * N


def test_local_results_of_a_nest_read_its_variables(mirrored):
    with mirrored.scope():
        shared = tpudist.Variable(2.0)
        own = tpudist.Variable(1.0, synchronization=tpudist.VariableSynchronization.ON_READ)
    mirrored.run(lambda: own.assign(1.0 * tpudist.get_replica_context().replica_id_in_sync_group))
    nests = mirrored.experimental_local_results({"shared": shared, "own": own})
    assert [(float(x["shared"]), float(x["own"])) for x in nests] == [(2, i) for i in range(N)]


@pytest.mark.parametrize("value", [None, "text", 3, 2.5])
def test_local_results_of_anything_else_are_it_alone(strategy, value):
    assert strategy.experimental_local_results(value) == (value,)
    array = jnp.ones(2)
    assert strategy.experimental_local_results(array)[0] is array


def test_with_one_replica_local_results_are_the_value_alone():
    strategy = tpudist.OneDeviceStrategy()
    value = {"x": jnp.ones(2), "y": [1, None]}
    assert strategy.experimental_local_results(value)[0] is value


def test_local_results_can_be_used_in_a_scope_and_out_of_it(mirrored):
    x = distribute(mirrored, np.arange(8.0, dtype=np.float32))
    with mirrored.scope():
        inside = mirrored.experimental_local_results(x)
    assert [float(p * 2) for p in inside] == [2.0 * i for i in range(8)]


# Values from a function.


def test_values_from_a_function_know_their_replica(strategy):
    n = strategy.num_replicas_in_sync

    def value(context):
        assert context.num_replicas_in_sync == n
        return {"id": np.int32(context.replica_id_in_sync_group), "list": [np.ones(2)]}

    got = strategy.experimental_distribute_values_from_function(value)
    assert local(strategy, got["id"]) == list(range(n))
    assert isinstance(got["list"][0], PerReplica) == (n > 1)


def test_values_may_differ_in_their_number_of_rows(mirrored):
    got = mirrored.experimental_distribute_values_from_function(
        lambda c: np.arange(c.replica_id_in_sync_group % 3)
    )
    assert got.rows == (0, 1, 2, 0, 1, 2, 0, 1)
    assert local(mirrored, got) == [list(range(i % 3)) for i in range(8)]
    assert int(mirrored.reduce("sum", got, axis=0)) == 2
    assert mirrored.gather(got, axis=0).tolist() == [0, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda i: np.ones((1 + i, i)), r"replica 0: \[1, 0\]; replica 1: \[2, 1\]"),
        (lambda i: np.ones(()) if i else np.ones(2), "may differ only in the size of one dim"),
        (lambda i: {"a": 1} if i else [1], "returned different structures for different replicas"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(mirrored, value, message):
    with pytest.raises(ValueError, match=message):
        mirrored.experimental_distribute_values_from_function(
            lambda c: value(c.replica_id_in_sync_group)
        )


def test_a_value_context_counts_one_replica_by_itself():
    context = ValueContext()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)


# PerReplica itself.


def test_a_per_replica_passes_through_jax(mirrored):
    """A pytree node around one array: jit, tree and grad know it."""
    x = PerReplica(
        distribute(mirrored, np.ones((8, 2), np.float32)).array, (2, 2, 2, 2, 2, 2, 1, 0)
    )
    doubled = jax.jit(lambda v: jax.tree.map(lambda a: a * 2, v))({"x": x})["x"]
    assert isinstance(doubled, PerReplica)
    assert doubled.rows == x.rows
    assert local(mirrored, doubled) == [[2, 2]] * 6 + [[2], []]
    assert doubled.array.sharding.is_equivalent_to(x.array.sharding, 2)
    (leaf,) = jax.tree.leaves(x)
    assert leaf is x.array
    other = PerReplica(x.array, None)
    assert jax.tree.structure(x) != jax.tree.structure(other)
    gradient = jax.grad(lambda v: (v.array**2).sum())(x)
    assert isinstance(gradient, PerReplica)


def test_a_per_replica_tells_its_shape(mirrored):
    x = distribute(mirrored, np.ones((8, 2, 3), np.float32))
    assert (x.shape, x.dtype) == ((2, 3), jnp.float32)
    assert isinstance(x, tpudist.DistributedValues)
    assert repr(x) == "PerReplica(float32[2,3] on each of 8 replicas)"
    assert repr(PerReplica(x.array, (2,) * 8)).endswith("replicas, rows=(2, 2, 2, 2, 2, 2, 2, 2))")
    assert repr(PerReplica(object(), None)).startswith("PerReplica(<object")


@pytest.mark.parametrize(
    "use",
    [
        float,
        int,
        bool,
        len,
        list,
        abs,
        np.asarray,
        jnp.asarray,
        lambda x: x[0],
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x * x,
        lambda x: 2 / x,
        lambda x: x @ x,
        lambda x: x**2,
        lambda x: x // 2,
        lambda x: x % 2,
        lambda x: -x,
        lambda x: x < 1,
        lambda x: jnp.ones(2) + x,
        lambda x: np.ones(2) + x,
    ],
)
def test_a_per_replica_cannot_be_used_as_an_array(mirrored, use):
    """You decide how the parts combine."""
    x = distribute(mirrored, np.ones((8, 2), np.float32))
    with pytest.raises(TypeError, match="was used as one array, but every replica has its own"):
        use(x)


def test_state_of_each_replica_names_the_option_that_makes_one_array_of_it(mirrored):
    x = distribute(mirrored, np.arange(8, dtype=np.float32))

    def step(x):
        return {"ema": x.mean()}

    for use in (float, lambda ema: ema + 1, lambda ema: ema.astype(int)):
        with pytest.raises((TypeError, AttributeError)) as caught:
            use(mirrored.run(step, (x,))["ema"])
        assert "tpudist.RunOptions(aggregation={'ema': 'mean'})" in str(caught.value)
    with pytest.raises(TypeError) as caught:
        jnp.sum(mirrored.run(lambda x: x.mean(), (x,)))
    assert "aggregation" not in str(caught.value)
    options = tpudist.RunOptions(aggregation={"ema": "mean"})
    assert float(mirrored.run(step, (x,), options=options)["ema"]) == 3.5


# Results that carry the rows of their batch.


def test_a_result_with_the_batchs_rows_keeps_their_count(mirrored):
    x, host = batch(mirrored, 5, 16, (2,))

    def step(x):
        return {
            "per_example": x.sum(1),
            "other": jnp.arange(2.0) + tpudist.get_replica_context().replica_id_in_sync_group,
            "total": x.sum(),
        }

    result = mirrored.run(step, (x,))
    assert result["per_example"].rows == x.rows
    assert (result["other"].rows, result["total"].rows) == (None, None)
    np.testing.assert_array_equal(mirrored.gather(result["per_example"], axis=0), host.sum(1))


def test_as_many_rows_as_examples_by_chance_are_not_taken_for_examples(mirrored):
    """Ten classes and ten examples on each replica: the counts of the classes are all real."""
    x, _ = batch(mirrored, 5, 16)

    def step(x):
        return jnp.zeros(2) + x.sum(), x * 2

    classes, examples = mirrored.run(step, (x,))
    assert classes.rows is None
    assert examples.rows == x.rows


def test_all_partial_batches_share_one_more_program(mirrored):
    full, _ = batch(mirrored, 16, 16)
    partial, other = batch(mirrored, 3, 16)[0], batch(mirrored, 2, 16)[0]

    def step(x):
        mask = tpudist.get_replica_context().example_mask(x)
        return tpudist.get_replica_context().all_reduce("sum", jnp.where(mask, x, 0).sum())

    step.__name__ = "a step of this test alone"
    totals = [float(mirrored.run(step, (x,))) for x in (full, partial, full, other)]
    assert totals == [136, 6, 136, 3]
    assert [r.function for r in tpudist.compile_log()].count(step.__name__) == 2


def test_the_mask_and_the_count_match_the_batch(mirrored):
    x, _ = batch(mirrored, 5, 16, (3,))

    def step(x):
        replica = tpudist.get_replica_context()
        return replica.example_mask(x), replica.num_examples(x)

    mask, count = mirrored.run(step, (x,))
    assert int(count) == 5
    masks = mirrored.experimental_local_results(mask)
    assert [m.tolist() for m in masks] == [[True]] * 5 + [[]] * 3


def test_two_batches_of_one_shape_have_their_own_rows(mirrored):
    x, _ = batch(mirrored, 5, 16)
    y, _ = batch(mirrored, 9, 16)

    def step(x, y):
        reduce = tpudist.get_replica_context().all_reduce
        return reduce("sum", x.sum() + 100 * y.sum()), x * 2, y * 2

    total, two_x, two_y = mirrored.run(step, (x, y))
    assert float(total) == 15 + 100 * 45
    assert (two_x.rows, two_y.rows) == (x.rows, y.rows)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("rows", [11, *map(rare, (16, 1))])
def test_a_reduction_in_merge_call_counts_real_rows_only(op, rows):
    """Written out by hand, the mean over a partial batch is that over its examples too."""
    strategy = tpudist.MirroredStrategy()
    values = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    batches = [np.zeros((16, 3), np.float32), values]
    *_, batch = strategy.experimental_distribute_dataset(batches)

    def combine(strategy, x):
        return strategy.reduce(op, x, axis=0)

    def fn(x):
        return tpudist.get_replica_context().merge_call(combine, args=(x,))

    expected = getattr(np, op)(values, axis=0)
    np.testing.assert_allclose(strategy.run(fn, args=(batch,)), expected, rtol=1e-5)


def test_rows_are_gathered_in_merge_call_without_padding():
    strategy = tpudist.MirroredStrategy()
    data = np.arange(33, dtype=np.float32).reshape(11, 3)
    _, batch = strategy.experimental_distribute_dataset([np.zeros((16, 3), np.float32), data])

    def fn(x):
        replica = tpudist.get_replica_context()
        return replica.merge_call(lambda s, x: s.gather(x, axis=0), args=(x,))

    assert strategy.run(fn, args=(batch,)).tolist() == data.tolist()


def test_parts_of_a_metric_can_be_merged(strategy):
    """Metrics of clu and nnx have sums that differ and counts that do not."""
    n = strategy.num_replicas_in_sync
    ids = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group)
    )
    metric = strategy.run(lambda x: {"total": 2 * x, "count": jnp.int32(2)}, args=(ids,))
    parts = strategy.experimental_local_results(metric)
    merged = jax.tree.map(lambda *xs: sum(xs), *parts)
    assert float(merged["total"] / merged["count"]) == (n - 1) / 2


def test_an_array_that_is_split_over_replicas_stays_whole_in_local_results():
    """A part of it would be taken for the value that all of them have."""
    strategy = tpudist.MirroredStrategy()
    split = jax.device_put(jnp.arange(8.0), strategy.replica_mesh.stacked)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    for part in strategy.experimental_local_results({"own": own, "split": split}):
        np.testing.assert_array_equal(part["split"], np.arange(8.0))
