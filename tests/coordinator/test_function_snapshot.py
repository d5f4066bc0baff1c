"""FunctionSnapshot: functions are serialized again only if a captured value may have changed."""

import enum
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpudist
from tpudist.coordinator.function_snapshot import take
from tpudist.coordinator.function_store import MAX_FUNCTIONS, FunctionStore

STATE = {"rate": 1.0}


def equal(one, other):
    a, b = take(one), take(other)
    assert a is not None
    assert b is not None
    return a.equals(b)


def make(captured, default=None):
    def function(x, default=default):
        return [captured, jnp.sin(x), default, math.pi, np.float32(1)]

    return function


@pytest.fixture(scope="module")
def handles():
    strategy = tpudist.ParameterServerStrategy(num_workers=1, num_servers=1)
    with strategy.scope():
        table = tpudist.ps.Table(2, tpudist.ps.rowwise_adagrad(0.1))
        yield strategy, tpudist.Variable(1.0), tpudist.Optimizer(optax.sgd(0.1)), table
    strategy.shutdown()


PLAIN = [
    None,
    3,
    0.5,
    "a",
    b"b",
    (1, ("a", 2.0)),
    [1, [2]],
    {"a": 1, "b": [2]},
    np.float32(2),
    np.dtype("int8"),
    jnp.arange(3),
    make(4),
    functools.partial(make, 3, default=(1, 2)),
    jax.jit(make(5)),
    optax.adam(0.1),
    types,
    tpudist.ReduceOp.SUM,
]


@pytest.mark.parametrize("captured", PLAIN, ids=lambda x: type(x).__name__)
def test_functions_with_equal_captures_have_equal_snapshots(captured):
    assert equal(make(captured), make(captured))
    assert equal(make(1, default=captured), make(1, default=captured))
    assert not equal(make(captured), make("another one"))


def test_equal_objects_of_different_types_differ():
    assert not equal(make(0.0), make(-0.0))
    assert equal(make(float("nan")), make(float("nan")))
    assert not equal(make(1), make(True))
    local = enum.Enum("local", "a")
    assert take(make(local.a)) is None


def test_no_captured_value_equals_a_reference_or_a_missing_name(monkeypatch):
    """A wrong "equal" would run the earlier function."""
    shared = [1]
    assert not any(equal(make(shared, shared), make(shared, order)) for order in range(20))

    def read():
        return STATE_THAT_IS_DEFINED_LATER  # noqa: F821

    before = take(read)
    for text in ("\0 none", "no global"):
        monkeypatch.setitem(globals(), "STATE_THAT_IS_DEFINED_LATER", text)
        assert not before.equals(take(read))


def test_handles_compare_by_identity(handles):
    for handle in handles:
        assert equal(make(handle), make(handle))
    for handle in handles[1:]:
        assert not equal(make(handle), make(handles[0]))


def change_list(x):
    x["list"].append(1)


def change_inner(x):
    x["dict"]["inner"]["a"] = 2


def change_array(x):
    x["array"][1] = 7


def change_view(x):
    x["array"] = x["array"].reshape(3, 1)


def change_function(x):
    x["function"].__defaults__ = (9,)


def change_attribute(x):
    x["function"].more = 1


CHANGES = [
    change_list,
    change_inner,
    change_array,
    change_view,
    change_function,
    change_attribute,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_inside_of_captured_objects_are_found(change):
    captured = {
        "list": [],
        "dict": {"inner": {"a": 1}},
        "array": np.arange(3),
        "function": make(1),
    }
    function = make(captured)
    before = take(function)
    assert before.equals(take(function))
    change(captured)
    assert not before.equals(take(function))


def test_inner_functions_capture_globals(monkeypatch):
    names = {"__name__": "__main__", "rate": 1.0}
    exec("def step():\n  return lambda: rate", names)
    before = take(names["step"])
    assert before.equals(take(names["step"]))
    names["rate"] = 2.0
    assert not before.equals(take(names["step"]))


def test_objects_of_modules_are_compared_by_name():
    assert equal(change_list, change_list)
    assert not equal(change_list, change_inner)
    assert take(change_list, by_value=[__name__]).equals(take(change_list, by_value=[__name__]))
    function = types.FunctionType(change_list.__code__, {"x": np.arange(3)}, "change_list")
    assert not equal(function, change_list)


class Model:
    """A class of the user."""

    def __call__(self):
        return 1


@pytest.mark.parametrize(
    "captured",
    [
        Model(),
        Model().__call__,
        {1, 2},
        iter([1]),
        np.zeros(3_000_000),
        np.array([None]),
        [].append,
        jax.nn.relu,
        type("Local", (), {}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_unknown_objects_have_no_snapshot(captured):
    assert take(make(captured)) is None
    assert take(make([captured])) is None


def test_cyclic_containers_have_a_snapshot():
    captured = [1]
    captured.append(captured)
    assert equal(make(captured), make(captured))

    def call_again():
        return call_again

    assert equal(call_again, call_again)


class Serializer:
    """Counts serializations."""

    modules_by_value = ()

    def __init__(self):
        self.count = 0

    def dumps(self, fn):
        self.count += 1
        return repr((fn.__qualname__, [x.cell_contents for x in fn.__closure__ or ()])).encode()

    def loads(self, data):
        return data


def test_only_changed_functions_are_serialized_again():
    serializer, forgotten, keys = Serializer(), [], iter(range(10_000))
    store = FunctionStore(serializer, lambda make, args: next(keys), forgotten.append)
    captured = np.arange(3)
    stored = store.store(make(captured))
    for _ in range(5):
        assert store.store(make(captured)) is stored
    assert serializer.count == 1
    captured[0] = 5
    other = store.store(make(captured))
    assert other.data != stored.data
    captured[0] = 0
    assert store.store(make(captured)) is stored
    assert serializer.count == 2
    for i in range(MAX_FUNCTIONS):
        store.store(make(i))
    assert forgotten[:2] == [other.ref.key, stored.ref.key]
    again = store.store(make(captured))  # workers have forgotten it
    assert again is not stored
    assert again.data == stored.data
    count = serializer.count
    store.store(make(MAX_FUNCTIONS - 1))  # the others of this definition are still known
    assert serializer.count == count
