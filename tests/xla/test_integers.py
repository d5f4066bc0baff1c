"""64-bit integers that JAX would truncate to 32 bits raise an error that names value and place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.xla import integers

LARGE = np.array([0, 2**40])


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module")
def variable(strategy):
    with strategy.scope():
        return tpudist.Variable(jnp.zeros((4, 2)), aggregation=tpudist.VariableAggregation.SUM)


def _batches(strategy, dataset):
    return list(strategy.experimental_distribute_dataset(dataset))


def _rows(numbers):
    return np.repeat(np.asarray(numbers), 8)


def _replica():
    return tpudist.get_replica_context()


def _run_eagerly(strategy, function):
    with strategy.debug():
        strategy.run(function)


def _scatter(variable, indices):
    variable.scatter_add(tpudist.IndexedSlices(jnp.ones((1, 2)), indices))


_DOORS = {
    "a dataset of arrays": (
        lambda s, v: _batches(
            s, s.experimental_make_numpy_dataset({"ids": _rows(LARGE)}).batch(16)
        ),
        r"batch of the dataset at \['ids'\] holds the integer 1099511627776 as int64",
    ),
    "a dataset of batches": (lambda s, v: _batches(s, [_rows(LARGE)]), "A batch of the dataset"),
    "uint64": (
        lambda s, v: _batches(s, [_rows(LARGE).astype(np.uint64)]),
        "JAX converts it to uint32",
    ),
    "a negative one": (lambda s, v: _batches(s, [-_rows(LARGE)]), "the integer -1099511627776"),
    "an argument of run": (
        lambda s, v: s.run(lambda x, y: x.sum() + y, (LARGE, 1)),
        "Argument 'x' of '<lambda>' holds the integer 1099511627776",
    ),
    "a NumPy number": (
        lambda s, v: s.run(lambda x: x, kwargs={"x": np.int64(2**40)}),
        "Argument 'x' of '<lambda>'",
    ),
    "a leaf of an argument": (
        lambda s, v: s.run(lambda x: x["a"][0] + 1, ({"a": [LARGE]},)),
        r"Argument 'x\['a'\]\[0\]' of",
    ),
    "run in a function": (
        lambda s, v: tpudist.function(lambda: s.run(lambda x: x.sum(), (LARGE,)))(),
        "An argument of '<lambda>'",
    ),
    "an array of a state": (
        lambda s, v: s.run(lambda x: x["a"], (nnx.State({"a": LARGE}),)),
        "An argument of '<lambda>'",
    ),
    "all_reduce of a captured array": (
        lambda s, v: s.run(lambda: _replica().all_reduce("sum", {"a": [LARGE]})),
        "A value given to all_reduce holds the integer 1099511627776",
    ),
    "all_reduce of a number": (
        lambda s, v: s.run(lambda: _replica().all_reduce("mean", 2**40)),
        "A value given to all_reduce",
    ),
    "all_reduce without replicas": (
        lambda s, v: tpudist.OneDeviceStrategy().run(lambda: _replica().all_reduce("max", LARGE)),
        "A value given to all_reduce",
    ),
    "all_reduce of slices": (
        lambda s, v: s.run(
            lambda: _replica().all_reduce("sum", tpudist.IndexedSlices(jnp.ones(2), LARGE))
        ),
        "A value given to all_reduce",
    ),
    "all_reduce where replicas run eagerly": (
        lambda s, v: _run_eagerly(s, lambda: _replica().all_reduce("sum", LARGE)),
        "A value given to all_reduce",
    ),
    "all_gather of a captured array": (
        lambda s, v: s.run(lambda: _replica().all_gather(LARGE, axis=0)),
        "A value given to all_gather",
    ),
    "reduce in a merge call": (
        lambda s, v: s.run(
            lambda: _replica().merge_call(lambda s: s.reduce("sum", LARGE, axis=None))
        ),
        "to be reduced or gathered",
    ),
    "broadcast_to": (lambda s, v: s.extended.broadcast_to(LARGE, "cpu:0"), "to broadcast_to holds"),
    "a result of create": (lambda s, v: s.create(lambda: {"a": LARGE}), "create, returns, holds"),
    "an argument of create": (lambda s, v: s.create(lambda x: x, {"a": LARGE}), "create, holds"),
    "indices that are read": (lambda s, v: v.sparse_read(LARGE), "sparse_read of 'Variable_"),
    "reduce": (lambda s, v: s.reduce("sum", LARGE, axis=None), "to be reduced or gathered"),
    "gather": (lambda s, v: s.gather(LARGE, axis=0), "to be reduced or gathered"),
    "replicate": (lambda s, v: s.replicate(LARGE), "A value to be replicated"),
    "values of replicas": (
        lambda s, v: s.experimental_distribute_values_from_function(lambda _: LARGE),
        "A value for each replica",
    ),
    "an initial value": (lambda s, v: tpudist.Variable(LARGE), "received integers from 0 to 10995"),
    "a list": (lambda s, v: tpudist.Variable([0, 2**40]), "received integers from 0 to 10995"),
    "a number": (lambda s, v: tpudist.Variable(2**40), "received integers from 1099511627776"),
    "a number that no dtype holds": (lambda s, v: tpudist.Variable(10**30), "no dtype can hold"),
    "an initial value of a dtype": (
        lambda s, v: tpudist.Variable(np.array(300), dtype=jnp.int8),
        "has dtype int8, .*received integers from 300 to 300",
    ),
    "indices": (lambda s, v: _scatter(v, LARGE[1:]), "Rows 1099511627776 to 1099511627776"),
    "indices that no dtype holds": (lambda s, v: _scatter(v, [10**30]), "Rows 1000000000000000"),
}


@pytest.mark.parametrize("door", _DOORS)
def test_an_integer_that_does_not_fit_is_rejected(strategy, variable, door):
    """Regression: it became a different number, so row 2**40 of a variable was row 0."""
    enter, message = _DOORS[door]
    with pytest.raises(ValueError, match=message):
        enter(strategy, variable)


def test_later_calls_are_checked_too(strategy):
    def step(x):
        return x["a"] + 1

    assert strategy.run(step, ({"a": jnp.int32(2)},)) == 3
    assert strategy.run(step, ({"a": np.int64(2)},)) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Argument 'x\['a'\]' of 'step' holds"):
            strategy.run(step, ({"a": np.int64(2**31)},))
    assert strategy.run(step, ({"a": np.int64(2**31 - 1)},)) == -(2**31)


@pytest.mark.parametrize(
    "value",
    [
        np.array([2**31 - 1, -(2**31)]),
        np.array([2**32 - 1], np.uint64),
        np.array([], np.int64),
        np.array([2.0**40]),
        np.uint32(2**32 - 1),
        True,
        3,
        2.0**40,
        "x",
        None,
        jnp.int32(3),
        np.array([1, 2], ">i8"),
    ],
)
def test_integers_that_fit_and_other_values_are_accepted(value):
    integers.check_fit(value, "x")


def test_large_integers_fit_with_x64_enabled(strategy):
    with jax.enable_x64(True):
        integers.check_fit(LARGE, "x")
        assert tpudist.Variable(LARGE).numpy().tolist() == LARGE.tolist()


_MASKED = np.ma.masked_array(np.ones((8, 2), np.float32), mask=True)
_DOORS_OF_MASKS = {
    "a dataset of batches": lambda s, v, x: _batches(s, [x]),
    "a leaf of a dataset": lambda s, v, x: _batches(s, [{"a": [x]}]),
    "a dataset of arrays": lambda s, v, x: s.experimental_make_numpy_dataset(x),
    "datasets from a function": lambda s, v, x: list(
        s.distribute_datasets_from_function(lambda _: [x])
    ),
    "values of replicas": lambda s, v, x: s.experimental_distribute_values_from_function(
        lambda _: x
    ),
    "an argument of run": lambda s, v, x: s.run(lambda o: 1, ({"a": x},)),
    "all_reduce": lambda s, v, x: s.run(lambda: _replica().all_reduce("sum", x)),
    "reduce": lambda s, v, x: s.reduce("sum", x, axis=None),
    "replicate": lambda s, v, x: s.replicate(x),
    "create": lambda s, v, x: s.create(lambda: {"a": jnp.ones(2), "b": x}),
    "an initial value": lambda s, v, x: tpudist.Variable(x),
    "a value that is assigned": lambda s, v, x: v.assign(x),
}


@pytest.mark.parametrize("door", _DOORS_OF_MASKS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_MASKED, r"is a masked numpy array of shape \[8, 2\].*x.filled\(0\)"),
        (bytearray(b"12345678"), "is a bytearray, a buffer.*numpy.frombuffer"),
        (memoryview(np.ones((8, 2), np.float32)), "is a memoryview, a buffer"),
    ],
)
def test_masked_arrays_and_buffers_are_rejected(strategy, variable, door, value, message):
    """Regression: masked elements counted as data, and bytes were read as uint8 numbers."""
    if door == "create" and not isinstance(value, np.ndarray):
        return  # `create` returns other values unchanged
    with pytest.raises(TypeError, match=message):
        _DOORS_OF_MASKS[door](strategy, variable, value)


def test_the_remedies_in_the_errors_work(strategy):
    masked = np.ma.masked_array(np.ones(8, np.float32), mask=[True] + [False] * 7)
    batch = {"x": masked.filled(0), "mask": ~np.ma.getmaskarray(masked)}
    (rows,) = _batches(strategy, [batch])
    total = strategy.run(lambda b: (b["x"] * b["mask"]).sum(), (rows,))
    assert float(strategy.reduce("sum", total, axis=None)) == 7
    assert int(strategy.run(jnp.max, (np.frombuffer(bytearray(b"ab"), np.uint8),))) == 98
