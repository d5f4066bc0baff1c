import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import re
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist import PerReplica, RunOptions
from tpudist.lowering import placement

N = 8


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module")
def fsdp():
    return tpudist.TPUStrategy(replica_axes={"fsdp": 4})


@pytest.fixture
def compiles():
    """Returns the causes of the compilations since the test began or since the last call."""
    new_compiles = NewCompiles()
    return lambda: [record.cause for record in new_compiles()]


def my_id():
    return tpudist.get_replica_context().replica_id_in_sync_group


def per_replica(strategy, value=lambda i: np.float32(i)):
    return strategy.experimental_distribute_values_from_function(
        lambda c: value(c.replica_id_in_sync_group)
    )


def parts(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metrics:
    loss: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


# Results.


def test_an_equal_result_of_all_replicas_is_a_plain_array(mirrored):
    result = mirrored.run(lambda x: x + 1, (jnp.ones(3),))
    assert isinstance(result, jax.Array)
    assert result.sharding.is_fully_replicated
    assert result.tolist() == [2, 2, 2]


def test_a_result_that_differs_is_a_per_replica(mirrored):
    result = mirrored.run(lambda x: x * 2, (per_replica(mirrored),))
    assert isinstance(result, PerReplica)
    assert (result.shape, result.dtype) == ((), jnp.float32)
    assert parts(mirrored, result) == [2.0 * i for i in range(N)]
    assert result.array.sharding.spec[0] == "replica"


def test_a_reduced_value_is_a_plain_array(mirrored):
    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", x), x

    total, own = mirrored.run(step, (per_replica(mirrored),))
    assert (float(total), isinstance(own, PerReplica)) == (28, True)


def test_the_same_object_is_returned_as_itself(mirrored):
    """SURFACE section 3: merging is by object identity."""
    array, text, thing = jnp.ones(3), "text", object()
    parts_of_all = per_replica(mirrored)

    def step(given, own):
        return given, own, array, text, None, 3, 2.5, thing, parts_of_all

    result = mirrored.run(step, (array, parts_of_all))
    expected = (array, parts_of_all, array, text, None, 3, 2.5, thing, parts_of_all)
    assert [x is y for x, y in zip(result, expected, strict=True)] == [True] * 9


def test_a_captured_numpy_array_is_returned_as_itself(mirrored):
    table = np.arange(3)
    assert mirrored.run(lambda: table) is table


def test_the_structure_of_the_result_is_kept(mirrored):
    def step(x):
        return {
            "pair": Pair(x, None),
            "list": [x * 2, (3, "text")],
            "metrics": Metrics(jnp.float32(4), "loss"),
            "ordered": collections.OrderedDict(b=x, a=1),
        }

    result = mirrored.run(step, (per_replica(mirrored),))
    assert isinstance(result["pair"], Pair)
    assert isinstance(result["pair"].first, PerReplica)
    assert result["pair"].second is None
    assert result["list"][1] == (3, "text")
    assert isinstance(result["metrics"], Metrics)
    assert (float(result["metrics"].loss), result["metrics"].name) == (4, "loss")
    assert list(result["ordered"]) == ["b", "a"]
    assert isinstance(result["ordered"], collections.OrderedDict)


def test_a_result_of_python_values_needs_no_devices(mirrored):
    assert mirrored.run(lambda a, b: {"sum": a + b, "none": None}, (1, 2)) == {
        "sum": 3,
        "none": None,
    }


def test_one_replica_returns_plain_values():
    """Every result is the same object if n = 1 (SURFACE section 3)."""
    strategy = tpudist.OneDeviceStrategy()
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(2))
    result = strategy.run(lambda x: (my_id(), x * 2, [my_id() * x]), (x,))
    assert not any(isinstance(leaf, PerReplica) for leaf in jax.tree.leaves(result))
    assert [type(leaf) for leaf in jax.tree.leaves(result)] == [type(jnp.ones(1))] * 3
    assert (int(result[0]), result[1].tolist()) == (0, [2, 2])


def test_a_replica_that_spans_devices_receives_and_returns_its_part(fsdp):
    result = fsdp.run(lambda x: x + my_id(), (per_replica(fsdp, lambda i: np.full(4, i)),))
    assert parts(fsdp, result) == [[0] * 4, [2] * 4]


def test_a_returned_nnx_object_is_the_object_of_the_caller(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(model):
        model.bias[...] += 1
        return model, model.kernel, {"loss": jnp.float32(1)}

    got, kernel, rest = mirrored.run(step, (model,))
    assert got is model
    assert kernel is model.kernel
    assert float(rest["loss"]) == 1
    assert model.bias[...].tolist() == [1, 1]


def test_returned_nnx_state_stays_a_state(mirrored):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def gradients(model, x):
        return nnx.grad(lambda m: (m(x) ** 2).sum())(model)

    grads = mirrored.run(gradients, (model, per_replica(mirrored, lambda i: np.ones((1, 2)))))
    assert isinstance(grads, nnx.State)
    assert {type(leaf) for leaf in jax.tree.leaves(grads, is_leaf=_is_per_replica)} == {PerReplica}
    assert grads["kernel"].get_raw_value().shape == (2, 2)


def _is_per_replica(x):
    return isinstance(x, PerReplica)


def test_a_returned_variable_is_the_same_object(mirrored):
    with mirrored.scope():
        variable = tpudist.Variable(1.0)
    assert mirrored.run(lambda: variable) is variable
    assert mirrored.run(lambda v: v, (variable,)) is variable


# Arguments.


def test_keyword_arguments_are_passed_to_the_function(mirrored):
    def step(x, *, scale, shift=0.0):
        return x * scale + shift

    x = per_replica(mirrored)
    assert parts(mirrored, mirrored.run(step, (x,), {"scale": 2.0})) == [2.0 * i for i in range(N)]
    shifted = mirrored.run(step, (), {"x": x, "scale": jnp.float32(2), "shift": x})
    assert parts(mirrored, shifted) == [3.0 * i for i in range(N)]


@pytest.mark.parametrize("method", ["run", "run_steps", "lower"])
@pytest.mark.parametrize("args", [{"x": 1}, "ab", 3, jnp.ones(2)])
def test_positional_arguments_that_are_not_a_tuple_raise(mirrored, args, method):
    before = (iter([1]), 1) if method == "run_steps" else ()
    with pytest.raises(ValueError, match="positional args must be a list or tuple, got"):
        getattr(mirrored, method)(lambda *a: None, *before, args)


def test_positional_arguments_may_be_a_list(mirrored):
    assert float(mirrored.run(lambda a, b: a - b, [3.0, jnp.float32(1)])) == 2


def test_python_values_are_part_of_the_program(mirrored, compiles):
    """A function can use them for shapes and branches."""

    def step(x, num, mode):
        return jnp.zeros(num) + x if mode == "zeros" else jnp.ones(num)

    x = jnp.float32(2)
    for _ in range(2):
        assert mirrored.run(step, (x, 3, "zeros")).tolist() == [2, 2, 2]
    assert compiles() == ["first call"]
    assert mirrored.run(step, (x, 2, "zeros")).tolist() == [2, 2]
    assert compiles() == ["num was the value 3, is the value 2"]
    assert mirrored.run(step, (x, 2, "ones")).tolist() == [1, 1]
    assert compiles() == ["mode was the value 'zeros', is the value 'ones'"]
    assert mirrored.run(step, (x, 3, "zeros")).tolist() == [2, 2, 2]
    assert compiles() == []


@pytest.mark.parametrize("values", [(1, True, 1.0), (0.0, -0.0), (float("nan"), float("inf"))])
def test_python_values_that_compare_equal_are_distinguished(mirrored, values):
    """0.0 equals -0.0, and 1 equals True."""
    static = RunOptions(static_argnums=0)
    seen = [mirrored.run(lambda x: (x, repr(x)), (v,), options=static)[1] for v in values]
    assert seen == [repr(v) for v in values]

    def sign(x):
        return jnp.copysign(1.0, x)

    assert [float(mirrored.run(sign, (x,))) for x in (0.0, -0.0, 0.0)] == [1, -1, 1]


def test_a_value_that_is_not_a_number_is_compiled_once(mirrored, compiles):
    """NaN does not equal itself, so each call would compile another program."""

    def step(x):
        return jnp.zeros(2) + x

    for _ in range(3):
        mirrored.run(step, (float("nan"),))
    assert compiles() == ["first call"]


def test_an_unhashable_argument_is_compared_by_identity(mirrored):
    first, second = {1, 2}, {3}
    step = lambda s: sum(s)  # noqa: E731
    assert [mirrored.run(step, (s,)) for s in (first, second, first)] == [3, 3, 3]


def test_numpy_arguments_are_arrays(mirrored, compiles):
    def step(x, y):
        return (x + y).sum()

    for scale in range(3):
        batch = np.full((4, 2), scale, np.float32)
        assert float(mirrored.run(step, (batch, np.float32(1)))) == 8 * scale + 8
    assert compiles() == ["first call"]


def test_an_array_on_one_device_is_moved_to_all(mirrored, compiles):
    def step(x):
        return x + 1

    here = jnp.ones(3)
    there = jax.device_put(jnp.ones(3), jax.devices()[5])
    on_mesh = mirrored.replicate(jnp.ones(3))
    for x in (here, there, on_mesh):
        assert mirrored.run(step, (x,)).tolist() == [2, 2, 2]
    assert compiles() == ["first call"]
    assert there.tolist() == [1, 1, 1]


def test_a_random_key_is_an_argument_like_any_other(mirrored):
    key = jax.random.key(3)
    assert float(mirrored.run(jax.random.uniform, (key,))) == float(jax.random.uniform(key))


def test_a_per_replica_with_another_number_of_parts_raises(mirrored, fsdp):
    x = per_replica(fsdp)
    with pytest.raises(
        ValueError, match=r"received PerReplica.* of 2 repl.*runs on 8 replica\(s\)"
    ):
        mirrored.run(lambda x: x, (x,))


def test_a_large_captured_array_raises(mirrored):
    table = jnp.zeros((512, 1024))
    with pytest.raises(ValueError, match=r"captures an array float32\[512,1024\] of 2\.0 MiB"):
        mirrored.run(lambda: table.sum())
    assert float(mirrored.run(jnp.sum, (table,))) == 0


def test_a_captured_nnx_object_raises(mirrored):
    """The arrays of the object would be constants of the program, and never change again."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="captures an NNX object: its Param"):
        mirrored.run(lambda x: model(x), (jnp.ones((1, 2)),))


# Arguments that change from call to call. `run` passes a position that had a plain pytree to
# `jit` without inspecting it, and must notice if another kind of argument follows.

KINDS = {
    "array": lambda s: jnp.float32(2),
    "numpy": lambda s: np.float32(2),
    "python float": lambda s: 2.0,
    "python int": lambda s: 2,
    "per replica": lambda s: per_replica(s, lambda i: np.float32(2)),
    "dict": lambda s: {"a": jnp.float32(1), "b": jnp.float32(1)},
    "other dict": lambda s: {"a": jnp.float32(1), "c": jnp.float32(1)},
    "dict with a python value": lambda s: {"a": jnp.float32(1), "b": 1.0},
    "dict with a part": lambda s: {"a": per_replica(s, lambda i: np.float32(2)), "b": 0},
    "tuple": lambda s: (jnp.float32(1), jnp.float32(1)),
    "list": lambda s: [jnp.float32(1), jnp.float32(1)],
    "dataclass": lambda s: Metrics(jnp.float32(2), "name"),
    "nnx variable": lambda s: nnx.Param(jnp.float32(2)),
    "nnx module": lambda s: Box(2.0),
    "nnx module in a list": lambda s: [Box(1.0), Box(1.0)],
    "nnx state": lambda s: nnx.state(Box(2.0)),
    "variable": lambda s: tpudist.Variable(2.0),
    "none and an array": lambda s: (None, jnp.float32(2)),
    "vector": lambda s: jnp.full(4, 0.5),
}


class Box(nnx.Module):
    def __init__(self, value):
        self.value = nnx.Param(jnp.float32(value))


def total(x):
    """Returns the sum of all numbers in any value."""
    leaves = jax.tree.leaves(x, is_leaf=lambda y: isinstance(y, tpudist.Variable))
    return sum((jnp.sum(jnp.asarray(leaf)) for leaf in leaves), jnp.float32(0))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["positional", "keyword", "second"])
def test_an_argument_may_have_any_kind_in_any_call(mirrored, where):
    """The fast path learns which arguments are plain pytrees of arrays, and must unlearn it."""

    def step(x, y=None):
        return total(x) + total(y)

    with mirrored.scope():
        values = {name: make(mirrored) for name, make in KINDS.items()}
    calls = {
        "positional": lambda v: mirrored.run(step, (v,)),
        "keyword": lambda v: mirrored.run(step, (), {"x": v}),
        "second": lambda v: mirrored.run(step, (jnp.float32(0), v)),
    }
    order = np.random.default_rng(0).permutation([*values, *values])
    for name in order:
        result = calls[where](values[str(name)])
        if isinstance(result, PerReplica):
            result = mirrored.experimental_local_results(result)[3]
        assert float(result) == 2.0, name


def test_an_argument_may_change_its_kind_between_calls_that_hit_the_cache(mirrored, compiles):
    """The position has a pytree, then a PerReplica, then an NNX object, each used before."""

    def step(x):
        return jax.tree.map(lambda y: y + 1, x)

    plain, split = {"x": jnp.ones(2)}, {"x": per_replica(mirrored)}
    for _ in range(3):
        assert mirrored.run(step, (plain,))["x"].tolist() == [2, 2]
        assert parts(mirrored, mirrored.run(step, (split,))["x"]) == [i + 1.0 for i in range(N)]
    assert compiles() == ["first call", "x['x'] was float32[2], is float32[] per replica"]


def test_an_nnx_object_that_replaces_an_array_is_changed_in_place(mirrored):
    def step(x):
        if isinstance(x, Box):
            x.value[...] += 1
            return None
        return x + 1

    box = Box(1.0)
    for expected in (2.0, 3.0, 4.0):
        assert float(mirrored.run(step, (jnp.float32(1),))) == 2
        assert mirrored.run(step, (box,)) is None
        assert float(box.value[...]) == expected


def test_a_call_that_recompiles_changes_its_state_once(mirrored):
    """After a cache miss the lookup runs a second time, but the step must not run twice."""
    box = Box(0.0)
    with mirrored.scope():
        variable = tpudist.Variable(0.0, aggregation=tpudist.VariableAggregation.MEAN)

    def step(box, x):
        box.value[...] += 1
        variable.assign_add(jnp.float32(1))
        return x

    for i in range(1, 6):
        mirrored.run(step, (box, jnp.ones(i)))
        assert (float(box.value[...]), float(variable)) == (i, i)


def test_the_number_of_positional_arguments_may_change(mirrored):
    step = lambda *xs, **named: total((xs, named))  # noqa: E731
    one = jnp.float32(1)
    split = per_replica(mirrored, lambda i: np.float32(1))
    for args, kwargs in [
        ((one,), {}),
        ((one, one), {}),
        ((one,), {"x": one}),
        ((one, split), {}),
        ((one,), {"x": split}),
        ((one,), {"x": 1.0}),
        ((one, 1.0), {}),
        ((), {"x": one, "y": one}),
        ((), {}),
    ] * 2:
        result = mirrored.run(step, args, kwargs)
        expected = len(args) + len(kwargs)
        if isinstance(result, PerReplica):
            result = mirrored.experimental_local_results(result)[0]
        assert float(result) == expected


def test_an_argument_that_cannot_become_an_array_raises(mirrored):
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        mirrored.run(lambda x: x + 1, (jax.ShapeDtypeStruct((2,), jnp.float32),))
    for array in (np.array(["a"]), np.array([None, 1]), np.array("2026-01-01", np.datetime64)):
        with pytest.raises(
            TypeError, match="received a numpy array of .* which no device can hold"
        ):
            mirrored.run(lambda x: x, (array,))


# The compilation log.


def test_a_compile_names_the_argument_that_changed(mirrored, compiles):
    def step(x, batch):
        return x + batch["image"].sum()

    x, image = jnp.float32(1), jnp.ones((2, 3))
    mirrored.run(step, (x, {"image": image}))
    mirrored.run(step, (x, {"image": image}))
    assert compiles() == ["first call"]
    mirrored.run(step, (x, {"image": jnp.ones((4, 3))}))
    assert compiles() == ["batch['image'] was float32[2,3], is float32[4,3]"]
    mirrored.run(step, (x, {"image": jnp.ones((4, 3), jnp.int32)}))
    assert compiles() == ["batch['image'] was float32[4,3], is int32[4,3]"]
    mirrored.run(step, (x, {"image": image, "label": image}))
    (cause,) = compiles()
    assert "batch['label'] (float32[2,3]) is new" in cause
    mirrored.run(step, (x, {"image": image}))
    assert compiles() == []


def test_a_compile_names_the_keyword_argument_that_changed(mirrored, compiles):
    def step(*, x):
        return x

    mirrored.run(step, (), {"x": jnp.ones(2)})
    mirrored.run(step, (), {"x": jnp.ones(3) + 1})
    assert compiles() == ["first call", "x was float32[2], is float32[3]"]


def test_a_new_function_object_each_call_is_named_as_the_cause(mirrored, compiles):
    """The most common way to compile at every step is a function defined in the loop."""
    for i in range(3):

        def step(x):
            return x + 1

        assert float(mirrored.run(step, (jnp.float32(i),))) == i + 1
    first, second, third = compiles()
    assert first == "first call"
    assert second.startswith("a new function object of the same definition (number 2)")
    assert third.startswith("a new function object of the same definition (number 3)")


def test_the_log_has_the_name_of_the_function_and_the_time(mirrored):
    def the_name(x):
        return x * 3

    mirrored.run(the_name, (jnp.ones(2),))
    record = tpudist.compile_log()[-1]
    assert (record.function, record.cause) == ("the_name", "first call")
    assert 0 < record.seconds < 60


def test_results_that_become_arguments_do_not_recompile(mirrored, compiles):
    """The output of one step is the input of the next."""

    def step(state, x):
        return jax.tree.map(lambda s: s + x.sum(), state)

    state = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    for _ in range(4):
        state = mirrored.run(step, (state, jnp.ones(2)))
    assert compiles() == ["first call"]
    with mirrored.scope():
        mirrored.run(step, (state, jnp.ones(2)))
    assert compiles() == []


# Kinds of functions.


class Doubler:
    def __call__(self, x):
        return x * 2

    def method(self, x):
        return x * 3


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x * 4, 4),
        (Doubler(), 2),
        (Doubler().method, 3),
        (functools.partial(jnp.multiply, 5), 5),
        (jax.jit(lambda x: x * 6), 6),
        (jnp.negative, -1),
    ],
    ids=["lambda", "callable object", "method", "partial", "jitted function", "library function"],
)
def test_any_callable_is_a_replica_function(mirrored, compiles, fn, expected):
    for i in range(1, 3):
        assert float(mirrored.run(fn, (jnp.float32(i),))) == i * expected
    assert compiles() == ["first call"]


def test_a_method_is_one_function_after_repeated_lookups(mirrored, compiles):
    """Each lookup of `trainer.step` creates a new object."""

    class Trainer:
        scale = 3

        def step(self, x):
            return x * self.scale

    first, second = Trainer(), Trainer()
    second.scale = 4
    for _ in range(3):
        assert float(mirrored.run(first.step, (jnp.float32(1),))) == 3
    assert compiles() == ["first call"]
    assert float(mirrored.run(second.step, (jnp.float32(1),))) == 4


def test_an_unhashable_callable_compiles_once(mirrored, compiles):
    @dataclasses.dataclass
    class Scale:
        by: float

        def __call__(self, x):
            return x * self.by

    scale = Scale(2.0)
    for _ in range(3):
        assert float(mirrored.run(scale, (jnp.float32(3),))) == 6
    assert compiles() == ["first call"]


def test_models_and_steps_that_are_no_longer_used_are_freed(mirrored):
    """A notebook creates the model and the step repeatedly, and must not fill the devices."""

    def use():
        with mirrored.scope():
            variable = tpudist.Variable(0.0)
        model = Box(1.0)

        def step(model):
            model.value[...] += 1
            variable.assign_add(jnp.float32(1))
            return variable, model

        mirrored.run(step, (model,))
        mirrored.run(step, (model,))
        return [weakref.ref(x) for x in (variable, model, step)]

    gc.freeze()  # objects that exist already need not be searched
    used = use()
    gc.collect()
    gc.unfreeze()
    assert [ref() for ref in used] == [None, None, None]


# Failures.


class Mine(Exception):
    pass


@pytest.mark.parametrize("error", [Mine("x"), ValueError("x"), TypeError("x"), KeyboardInterrupt()])
def test_run_raises_an_exception_of_the_function_unchanged(mirrored, error):
    default = tpudist.get_strategy()
    calls = []

    def step(x):
        calls.append(x)
        raise error

    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            mirrored.run(step, (jnp.ones(2),))
        assert caught.value is error
        assert tpudist.get_strategy() is default
        assert not tpudist.in_cross_replica_context()
    assert len(calls) == 2
    with mirrored.scope(), pytest.raises(type(error)):
        mirrored.run(step, (jnp.ones(2),))


def test_a_call_that_failed_changes_nothing(mirrored):
    box = Box(1.0)
    with mirrored.scope():
        variable = tpudist.Variable(1.0)

    def step(box, fail):
        box.value[...] += 1
        variable.assign_add(jnp.float32(1))
        if fail:
            raise Mine

    for fail in (True, False, True, False):
        with pytest.raises(Mine) if fail else contextlib.nullcontext():
            mirrored.run(step, (box, fail))
    assert (float(box.value[...]), float(variable)) == (3, 3)


def test_a_function_that_failed_may_succeed_later(mirrored):
    fail = [True]

    def step(x):
        if fail:
            raise Mine
        return x + 1

    with pytest.raises(Mine):
        mirrored.run(step, (jnp.ones(1),))
    fail.clear()
    assert mirrored.run(step, (jnp.ones(1),)).tolist() == [2]


def test_a_collective_that_some_replicas_may_not_reach_raises(mirrored):
    def step():
        replica = tpudist.get_replica_context()
        return jax.lax.cond(
            my_id() > 3, lambda: replica.all_reduce("sum", 1.0), lambda: jnp.float32(0)
        )

    with pytest.raises(ValueError, match=r"has a psum .*test_run\.py:\d+.*wait for each other"):
        mirrored.run(step)
    assert float(tpudist.OneDeviceStrategy().run(step)) == 0


# Options.


def test_donate_argnums_donates_arguments(mirrored):
    state, other = mirrored.replicate({"w": jnp.ones(64)}), mirrored.replicate(jnp.ones(64))
    step = lambda state, other: {"w": state["w"] + other}  # noqa: E731
    options = RunOptions(donate_argnums=(0,))
    new = mirrored.run(step, (state, other), options=options)
    assert (state["w"].is_deleted(), other.is_deleted()) == (True, False)
    new = mirrored.run(step, (new, other), options=options)
    assert new["w"].tolist() == [3.0] * 64
    kept = mirrored.run(step, (new, other))
    assert not new["w"].is_deleted()
    assert kept["w"].tolist() == [4.0] * 64


def test_a_donated_argument_that_is_returned_is_a_new_array(mirrored):
    """The old array is deleted, so `run` cannot return it."""
    x = mirrored.replicate(jnp.ones(4))
    step = lambda x, y: (x, y, x + y)  # noqa: E731
    options = RunOptions(donate_argnums=(0,))
    for _ in range(2):
        y = mirrored.replicate(jnp.ones(4))
        old = x
        x, same, _ = mirrored.run(step, (old, y), options=options)
        assert old.is_deleted()
        assert same is y
        assert x.tolist() == [1] * 4


def test_donated_arguments_alias_the_results(mirrored):
    """Reads the aliases from the executable, as DESIGN D7 requires."""
    step = lambda state, x: (state + x, x.sum())  # noqa: E731
    args = (mirrored.replicate(jnp.ones(64)), mirrored.replicate(jnp.ones(64)))
    sizes = [
        mirrored.lower(step, args, options=RunOptions(donate_argnums=argnums))
        .compile()
        .memory_analysis()
        .alias_size_in_bytes
        for argnums in ((), (0,))
    ]
    assert sizes == [0, 64 * 4]


def test_state_is_donated_unless_the_options_disable_it(mirrored):
    def step(box):
        box.value[...] += 1

    box = mirrored.create(lambda: Box(1.0))
    before = box.value[...]
    mirrored.run(step, (box,), options=RunOptions(donate_state=False))
    assert (float(before), float(box.value[...])) == (1, 2)
    before = box.value[...]
    mirrored.run(step, (box,))
    assert before.is_deleted()
    assert float(box.value[...]) == 3


@pytest.mark.parametrize("argnums", [(2,), (-1,), (0, 7)])
def test_donating_a_missing_argument_raises(mirrored, argnums):
    with pytest.raises(ValueError, match=r"donate_argnums=.*received 2 positional argument"):
        mirrored.run(
            lambda a, b: a, (jnp.ones(1), jnp.ones(1)), options=RunOptions(donate_argnums=argnums)
        )


def test_an_array_passed_twice_and_donated_once_is_kept(mirrored):
    x = mirrored.replicate(jnp.ones(4))
    step = lambda a, b: (a + 1, b + 2)  # noqa: E731
    for _ in range(2):
        x = mirrored.replicate(jnp.ones(4))
        a, b = mirrored.run(step, (x, x), options=RunOptions(donate_argnums=(0,)))
        assert (a.tolist(), b.tolist()) == ([2] * 4, [3] * 4)
    a, b = mirrored.run(step, (x, x), options=RunOptions(donate_argnums=(0, 1)))
    assert (a.tolist(), b.tolist()) == ([2] * 4, [3] * 4)


def test_compiler_options_reach_the_compiler(mirrored):
    bad = RunOptions(experimental_xla_options={"no_such_option": True})
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="No such compile option: 'no_such_option'"
    ):
        mirrored.run(lambda x: x + 1, (jnp.ones(2),), options=bad)


@pytest.mark.parametrize("options", [5, ["a"], {1: 0, "a": 0}])
def test_compiler_options_without_names_raise(options):
    message = re.escape(f"RunOptions(experimental_xla_options={options}): ") + ".* must map"
    with pytest.raises(TypeError, match=message):
        RunOptions(experimental_xla_options=options)


@pytest.mark.parametrize("options", ["fast", {}, 0, tpudist.InputOptions()])
def test_options_of_another_type_raise(mirrored, options):
    def step(x):
        return x

    for call in (mirrored.run, mirrored.lower):
        with pytest.raises(
            TypeError, match=r"run of 'step' received options=.*Pass a tpudist.RunO"
        ):
            call(step, (jnp.ones(2),), options=options)


@pytest.mark.parametrize("nest", [lambda x: x, lambda x: {"x": x}, lambda x: [1, x]])
def test_masked_arrays_raise(mirrored, nest):
    """Masked elements would count like the others."""
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])

    def step(x):
        return jax.tree.map(jnp.sum, x)

    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"An argument.* is a masked numpy array of shape \[2\]"
        ):
            mirrored.run(step, (nest(masked),))


def test_dynamic_shapes_raise():
    with pytest.raises(ValueError, match="compiled for static shapes"):
        RunOptions(experimental_bucketizing_dynamic_shape=True)


def test_a_program_can_be_lowered_without_being_run(mirrored):
    def step(box, x):
        box.value[...] += tpudist.get_replica_context().all_reduce("sum", x.sum())

    box = Box(1.0)
    text = mirrored.lower(step, (box, jax.ShapeDtypeStruct((4,), jnp.float32))).as_text()
    assert "all_reduce" in text
    assert float(box.value[...]) == 1


# Threads.


@pytest.fixture
def impatient_threads():
    """Makes threads switch thousands of times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work, num_threads=4):
    """Calls `work(i)` in all threads at the same time, and returns the results in order."""
    barrier = threading.Barrier(num_threads)

    def call(i):
        barrier.wait()
        return work(i)

    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(call, range(num_threads)))


@pytest.mark.slow
def test_threads_may_run_one_function_concurrently(mirrored, impatient_threads):
    """An evaluation thread and the training loop both start with the first call."""
    for offset in range(10):

        def step(x, offset=offset):
            return tpudist.get_replica_context().all_reduce("sum", x) + offset

        results = in_threads(
            lambda i, step=step: [float(mirrored.run(step, (jnp.float32(i),))) for _ in range(3)]
        )
        assert results == [[8.0 * i + offset] * 3 for i in range(4)]


def test_threads_that_change_the_same_state_lose_no_change(mirrored, impatient_threads):
    """Each step removes the state and puts it back; two steps must not use it at the same time."""
    with mirrored.scope():
        variable = tpudist.Variable(0.0)
    box = Box(0.0)

    def step(box):
        variable.assign_add(1)
        box.value[...] += 1

    in_threads(lambda i: [mirrored.run(step, (box,)) for _ in range(25)])
    assert (float(variable), float(box.value[...])) == (100, 100)


@pytest.mark.slow
def test_threads_may_run_functions_of_different_strategies(mirrored):
    strategies = (mirrored, tpudist.OneDeviceStrategy(), mirrored, tpudist.get_strategy())

    def work(i):
        strategy = strategies[i]
        with strategy.scope():
            for _ in range(20):
                total = strategy.run(lambda: tpudist.get_replica_context().all_reduce("sum", 1.0))
        return float(total)

    assert in_threads(work) == [8, 1, 8, 1]


@pytest.mark.slow
def test_a_compile_names_what_changed_in_an_nnx_object(mirrored, compiles):
    """`model.eval()` recompiles the step, and the log names the attribute that changed."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = mirrored.create(lambda: Model(nnx.Rngs(0)))

    def forward(model):
        return model.dropout(model.dense(jnp.ones((1, 2))))

    mirrored.run(forward, args=(model,))
    model.eval()
    mirrored.run(forward, args=(model,))
    (_, cause) = compiles()
    assert cause == "model.dropout.deterministic was the value False, is the value True"


def test_a_function_that_is_compiled_repeatedly_warns(mirrored, caplog):
    def scaled(x, by):
        return x * by

    with caplog.at_level("INFO", logger="tpudist.compile"):
        for by in range(6):
            options = RunOptions(static_argnums=1)
            mirrored.run(scaled, args=(np.float32(1), by), options=options)
    assert [r.levelname for r in caplog.records] == ["INFO"] * 4 + ["WARNING"] * 2
    assert "(time 6): by was the value 4, is the value 5" in caplog.records[-1].message


def test_a_dataclass_of_arrays_must_be_registered(mirrored):
    @dataclasses.dataclass
    class Batch:
        x: object

    def step(batch):
        return batch.x + 1

    batch = Batch(jnp.ones(2))
    with pytest.raises(
        TypeError, match=r"received a Batch that holds an array.*Register a dataclass"
    ):
        mirrored.run(step, (batch,))
    assert mirrored.run(step, (Batch(2),)) == 3
    jax.tree_util.register_dataclass(Batch, ["x"], [])
    assert mirrored.run(step, (batch,)).tolist() == [2, 2]


def test_containers_unknown_to_jax_are_merged(mirrored):
    class Metrics(dict):
        pass

    class Pair(list):
        pass

    class Lists(collections.defaultdict):
        pass

    def step(x):
        mine = x + tpudist.get_replica_context().replica_id_in_sync_group
        pair = Pair([x, Metrics(mine=mine, name="a")])
        return Metrics(mine=mine, pair=pair, lists=Lists(list, {"a": [x]}))

    result = mirrored.run(step, (jnp.float32(1),))
    assert type(result["lists"]) is Lists
    assert result["lists"]["b"] == []
    assert (type(result), type(result["pair"])) == (Metrics, Pair)
    assert isinstance(result["mine"], tpudist.PerReplica)
    assert type(result["pair"][1]) is Metrics
    assert result["pair"][1]["name"] == "a"
    with pytest.raises(TypeError, match="received a Metrics that holds an array"):
        mirrored.run(lambda m: m["mine"], (Metrics(mine=jnp.ones(2)),))


@pytest.mark.slow
def test_a_small_numpy_array_may_be_changed_after_the_call(mirrored):
    """A program that had not started yet once computed with values written after the call."""

    def work(x):
        for _ in range(8):
            x = x @ x
        return x

    matrix, x = mirrored.replicate(np.eye(300, dtype=np.float32)), np.ones(1 << 14, np.float32)
    for _ in range(10):
        x[:] = 1
        mirrored.run(work, (matrix,))  # the devices are busy
        total = mirrored.run(jnp.sum, (x,))
        x[:] = 7
        assert float(total) == x.size


def test_the_log_names_the_function_of_a_partial(mirrored):
    def add(x, y):
        return x + y

    class Add:
        def __call__(self, x):
            return x + 1

    x = jnp.ones(2)
    compiled = NewCompiles()
    mirrored.run(functools.partial(functools.partial(add, 1.0), y=x))
    tpudist.function(functools.partial(add, 1.0))(x)
    mirrored.run(functools.partial(Add()), (x,))
    mirrored.run(Add(), (x,))
    mirrored.run_steps(functools.partial(add, 1.0), iter([x, x]), 2)
    assert [r.function for r in compiled()] == ["add", "add", "Add", "Add", "add"]


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}])
def test_a_call_inside_a_transformation_gets_traced_arguments(axes):
    strategy = tpudist.TPUStrategy(replica_axes=axes) if axes else tpudist.MirroredStrategy()
    with strategy.scope():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(state, rows):
        total = tpudist.get_replica_context().all_reduce("mean", (rows * state["w"]).sum())
        return {"w": state["w"] * total, "step": state["step"] + 1}

    def run(scale):
        state = {"w": jnp.ones((4, 2)) * scale, "step": jnp.int32(0)}
        return strategy.run(step, (state, jnp.ones((4, 2))))["w"].sum()

    assert jax.jit(run)(2.0) == 8 * 2 * 16
    assert jax.grad(run)(2.0) == 8 * 2 * 16
    assert jax.vmap(run)(jnp.arange(2.0)).tolist() == [0, 64]
    whole = nnx.jit(lambda model: strategy.run(lambda model: model(jnp.ones((1, 2))), (model,)))
    np.testing.assert_allclose(whole(model), model(jnp.ones((1, 2))), rtol=1e-6)


def test_a_call_is_checked_only_while_its_arguments_must_move(mirrored, monkeypatch):
    """A checked call takes longer. Arguments from another device move at each call."""
    num_checked = 0
    prepare = placement.prepare_step_input

    def count(*args, **kwargs):
        nonlocal num_checked
        num_checked += 1
        return prepare(*args, **kwargs)

    monkeypatch.setattr(placement, "prepare_step_input", count)

    def step(x):
        return x * 2

    elsewhere = jax.device_put(jnp.ones(3), jax.devices()[1])
    x = mirrored.run(step, (elsewhere,))
    for _ in range(2):
        mirrored.run(step, (elsewhere,))
    num_moved = num_checked
    for _ in range(5):
        x = mirrored.run(step, (x,))
    assert num_moved >= 3
    assert num_checked == num_moved + 1  # the first of these calls finds that nothing moves
    assert x.tolist() == [64.0] * 3


def test_a_step_that_ran_several_times_in_one_program_is_released(mirrored):
    def start():
        def step(x):
            return x + 1

        mirrored.run_steps(step, iter([jnp.ones(2)] * 2), 2)
        [compiled] = mirrored._replicator.function_of(step).recent._steps
        return weakref.ref(compiled)

    compiled = start()
    gc.collect()
    assert compiled() is None
