"""Whatever is given to a public entry point works, or is an error in words of tpudist's.

An IndexError or AttributeError from deep within says nothing to a caller. So each entry point gets
odd values: what it raises must be of a type that a caller expects. Each run tries a few values on
every entry point; the exhaustive test tries all values.
"""

import collections
import decimal
import enum
import fractions
import functools
import math
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpudist
from tpudist import cluster_resolver

# What a caller may expect; of the machine: MemoryError is none of them.
EXPECTED = (ValueError, TypeError, RuntimeError, NotImplementedError, KeyError, OSError)
EXPECTED += (OverflowError, StopIteration)
# Subclasses of expected errors that are bugs all the same.
UNEXPECTED = (RecursionError, UnicodeError)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")

ODD = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "1": 1,
    "2**31": 2**31,
    "2**40": 2**40,
    "10**30": 10**30,
    "0.5": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "1e300": 1e300,
    "1j": 1j,
    "empty text": "",
    "text": "x",
    "sum": "sum",
    "long text": "x" * 300,
    "text with NUL": "a\0b",
    "bytes": b"x",
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "[]": [],
    "[None]": [None],
    "[1, 'x']": [1, "x"],
    "ragged": [[1], [1, 2]],
    "nested": [[[[]]]],
    "()": (),
    "(1,)": (1,),
    "{}": {},
    "{1: 2}": {1: 2},
    "mixed keys": {1: 2, "x": 3},
    "{'x': None}": {"x": None},
    "set()": set(),
    "{1}": {1},
    "frozenset": frozenset("x"),
    "range": range(3),
    "slice": slice(3),
    "...": ...,
    "NotImplemented": NotImplemented,
    "object": object(),
    "class": object,
    "int": int,
    "function": lambda *args, **kwargs: None,
    "identity": lambda x: x,
    "raises": lambda *args: 1 / 0 if args is None else "x",
    "builtin": len,
    "module": math,
    "unhashable": Unhashable(),
    "namespace": types.SimpleNamespace(a=1),
    "enum": Color.RED,
    "enum class": Color,
    "namedtuple": Point(1, 2),
    "Decimal": decimal.Decimal(1),
    "Fraction": fractions.Fraction(1, 2),
    "error": ValueError("x"),
    "deque": collections.deque([1]),
    "defaultdict": collections.defaultdict(list),
    "np.float32": np.float32(1),
    "np.int64": np.int64(2),
    "np.bool": np.bool_(True),
    "np.dtype": np.dtype("float32"),
    "np.array(0)": np.array(0),
    "empty array": np.zeros((0,)),
    "empty rows": np.zeros((0, 3)),
    "ones": np.ones(3),
    "rank 4": np.ones((1, 2, 1, 2)),
    "objects": np.array([object()]),
    "texts": np.array(["x"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "structured": np.zeros(2, [("a", "i4")]),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "complex array": np.ones(2, complex),
    "int64": np.array([2**40]),
    "bool array": np.array([True]),
    "nan array": np.array([math.nan]),
    "jnp": jnp.ones(2),
    "jnp scalar": jnp.int32(3),
    "key": jax.random.key(0),
    "shape": jax.ShapeDtypeStruct((2,), np.float32),
    "optax": optax.sgd(0.1),
    "spec": jax.sharding.PartitionSpec("x"),
}
# One or two values of each sort: nothing, numbers, text, containers, objects, arrays.
FEW = (
    *("None", "-1", "2**40", "nan", "text", "bytes", "[1, 'x']", "ragged", "()", "mixed keys"),
    *("slice", "object", "class", "identity", "unhashable", "enum", "np.int64", "empty rows"),
    *("objects", "texts", "key", "shape", "optax"),
)


def _in_replica(function):
    def enter(x):
        return tpudist.get_strategy().run(lambda: function(tpudist.get_replica_context(), x))

    return enter


def _variable(**options):
    return tpudist.Variable(
        jnp.zeros((4, 2)), aggregation=tpudist.VariableAggregation.SUM, **options
    )


@functools.cache  # it is compiled once
def _ids_of_replicas(strategy):
    return strategy.run(
        lambda: tpudist.get_replica_context().replica_id_in_sync_group * jnp.ones(2)
    )


def _per_replica():
    return _ids_of_replicas(_s())


def _dataset():
    return tpudist.NumpyDataset(np.ones((16, 2), np.float32))


def _s():
    return tpudist.get_strategy()


# Left out, for they do more than look at their argument: `emulate` and the strategies of several
# processes start backends and servers; checkpoints and plans write files to given paths.
ENTRIES = {
    "run": lambda x: _s().run(x),
    "run(args)": lambda x: _s().run(lambda *a: 1.0, x),
    "run(argument)": lambda x: _s().run(lambda a: 1.0, (x,)),
    "run(kwargs)": lambda x: _s().run(lambda **k: 1.0, (), x),
    "run(options)": lambda x: _s().run(lambda: 1.0, (), {}, x),
    "run returns": lambda x: _s().run(lambda: x),
    "run_steps(num_steps)": lambda x: _s().run_steps(lambda y: y, iter([jnp.ones(2)]), x),
    "run_steps(iterator)": lambda x: _s().run_steps(lambda y: y, x, 1),
    "reduce(op)": lambda x: _s().reduce(x, _per_replica(), axis=None),
    "reduce(value)": lambda x: _s().reduce("sum", x, axis=None),
    "reduce(axis)": lambda x: _s().reduce("sum", _per_replica(), axis=x),
    "gather(value)": lambda x: _s().gather(x, axis=0),
    "gather(axis)": lambda x: _s().gather(_per_replica(), axis=x),
    "replicate": lambda x: _s().replicate(x),
    "experimental_local_results": lambda x: _s().experimental_local_results(x),
    "values from function": lambda x: _s().experimental_distribute_values_from_function(x),
    "values": lambda x: _s().experimental_distribute_values_from_function(lambda _: x),
    "make_numpy_dataset": lambda x: _s().experimental_make_numpy_dataset(x),
    "NumpyDataset": tpudist.NumpyDataset,
    "NumpyDataset.batch": lambda x: _dataset().batch(x),
    "NumpyDataset.repeat": lambda x: _dataset().repeat(x),
    "NumpyDataset.shuffle": lambda x: _dataset().shuffle(x),
    "NumpyDataset.shard": lambda x: _dataset().shard(x, 0),
    "MirroredStrategy(cross_device_ops)": lambda x: tpudist.MirroredStrategy(cross_device_ops=x),
    "OneDeviceStrategy": tpudist.OneDeviceStrategy,
    "RunOptions(donate)": lambda x: tpudist.RunOptions(donate_argnums=x),
    "RunOptions(static)": lambda x: tpudist.RunOptions(static_argnums=x),
    "RunOptions(aggregation)": lambda x: tpudist.RunOptions(aggregation=x),
    "RunOptions(xla)": lambda x: tpudist.RunOptions(experimental_xla_options=x),
    "InputOptions(buffer)": lambda x: tpudist.InputOptions(
        True, experimental_per_replica_buffer_size=x
    ),
    "InputOptions(partial)": lambda x: tpudist.InputOptions(partial_batch=x),
    "InputOptions(shard)": lambda x: tpudist.InputOptions(auto_shard_policy=x),
    "InputOptions(mode)": lambda x: tpudist.InputOptions(experimental_replication_mode=x),
    "Variable": tpudist.Variable,
    "Variable(dtype)": lambda x: tpudist.Variable(1.0, dtype=x),
    "Variable(shape)": lambda x: tpudist.Variable(1.0, shape=x),
    "Variable(name)": lambda x: tpudist.Variable(1.0, name=x),
    "Variable(aggregation)": lambda x: tpudist.Variable(1.0, aggregation=x),
    "Variable(synchronization)": lambda x: tpudist.Variable(1.0, synchronization=x),
    "Variable(constraint)": lambda x: tpudist.Variable(1.0, constraint=x),
    "assign": lambda x: _variable().assign(x),
    "assign_add": lambda x: _variable().assign_add(x),
    "scatter_add": lambda x: _variable().scatter_add(x),
    "scatter_add(indices)": lambda x: _variable().scatter_add(
        tpudist.IndexedSlices(jnp.ones((1, 2)), x)
    ),
    "scatter_add(values)": lambda x: _variable().scatter_add(tpudist.IndexedSlices(x, [0])),
    "sparse_read": lambda x: _variable().sparse_read(x),
    "all_reduce(op)": _in_replica(lambda c, x: c.all_reduce(x, jnp.ones(2))),
    "all_reduce(value)": _in_replica(lambda c, x: c.all_reduce("sum", x)),
    "all_gather(value)": _in_replica(lambda c, x: c.all_gather(x, 0)),
    "all_gather(axis)": _in_replica(lambda c, x: c.all_gather(jnp.ones(2), x)),
    "merge_call": _in_replica(lambda c, x: c.merge_call(x)),
    "merge_call(args)": _in_replica(lambda c, x: c.merge_call(lambda s, *a: 1.0, x)),
    "average(loss)": _in_replica(lambda c, x: tpudist.compute_average_loss(x)),
    "average(weight)": _in_replica(
        lambda c, x: tpudist.compute_average_loss(jnp.ones(2), sample_weight=x)
    ),
    "average(batch)": _in_replica(
        lambda c, x: tpudist.compute_average_loss(jnp.ones(2), global_batch_size=x)
    ),
    "scale_regularization_loss": _in_replica(lambda c, x: tpudist.scale_regularization_loss(x)),
    "Optimizer(tx)": tpudist.Optimizer,
    "Optimizer(model)": lambda x: tpudist.Optimizer(optax.sgd(0.1), x),
    "Optimizer(reduce_op)": lambda x: tpudist.Optimizer(optax.sgd(0.1), reduce_op=x),
    "Optimizer(reduce_dtype)": lambda x: tpudist.Optimizer(optax.sgd(0.1), reduce_dtype=x),
    "apply_gradients": lambda x: tpudist.Optimizer(optax.sgd(0.1)).apply_gradients(x),
    "reduce_to(destinations)": lambda x: _s().extended.reduce_to("sum", _per_replica(), x),
    "broadcast_to": lambda x: _s().extended.broadcast_to(x, None),
    "batch_reduce_to": lambda x: _s().extended.batch_reduce_to("sum", x),
    "update(var)": lambda x: _s().extended.update(x, lambda v: v),
    "update(fn)": lambda x: _s().extended.update(_variable(), x),
    "update(args)": lambda x: _s().extended.update(_variable(), lambda v, *a: None, x),
    "function": tpudist.function,
    "function called": lambda x: tpudist.function(lambda y: 1.0)(x),
    "ClusterSpec": cluster_resolver.ClusterSpec,
    "SimpleClusterResolver": cluster_resolver.SimpleClusterResolver,
    "experimental_distribute_dataset": lambda x: list(
        zip(range(2), _s().experimental_distribute_dataset(x), strict=False)
    ),
    "distribute_datasets_from_function": lambda x: next(
        iter(_s().distribute_datasets_from_function(x)), None
    ),
    "an element": lambda x: list(_s().experimental_distribute_dataset([x])),
}


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


def problem_of(entry, value):
    """Returns the unexpected exception of a call, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ENTRIES[entry](value)
    except UNEXPECTED as error:
        return error
    except EXPECTED:
        return None
    except Exception as error:
        return error
    return None


def problems_of(strategy, entry, names):
    with strategy.scope():
        found = {name: problem_of(entry, ODD[name]) for name in names}
    return {name: repr(error)[:200] for name, error in found.items() if error is not None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ENTRIES)
def test_odd_values_work_or_are_errors_that_a_caller_expects(strategy, entry):
    assert problems_of(strategy, entry, FEW) == {}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_all_odd_values_work_or_are_errors_that_a_caller_expects(strategy, entry):
    assert problems_of(strategy, entry, ODD) == {}
