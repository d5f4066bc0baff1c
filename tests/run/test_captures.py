"""Objects that a replica function captures, and the Variables that it creates itself."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import tpudist


@pytest.fixture(
    scope="module",
    params=["mirrored", "fsdp", pytest.param("one device", marks=pytest.mark.exhaustive)],
)
def strategy(request):
    if request.param == "one device":
        return tpudist.OneDeviceStrategy("cpu:1")
    if request.param == "fsdp":
        return tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    return tpudist.MirroredStrategy()


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


def parts_of(strategy, value_fn=lambda i: jnp.full(2, float(i))):
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_fn(context.replica_id_in_sync_group)
    )


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


module_value = None


# Captured PerReplica values.


def test_a_captured_per_replica_is_the_part_of_this_replica(mirrored):
    captured = parts_of(mirrored)
    assert local(mirrored, mirrored.run(lambda: captured + 1)) == [[i + 1.0] * 2 for i in range(8)]
    assert local(mirrored, mirrored.run(lambda: 3 - captured)) == [[3.0 - i] * 2 for i in range(8)]
    assert local(mirrored, mirrored.run(lambda: captured[0])) == [float(i) for i in range(8)]
    assert local(mirrored, mirrored.run(lambda: captured.sum())) == [2.0 * i for i in range(8)]
    assert local(mirrored, mirrored.run(lambda: jnp.sin(captured).shape[0])) == [2]
    assert local(mirrored, mirrored.run(lambda: -captured @ captured)) == [
        -2.0 * i * i for i in range(8)
    ]


def test_a_captured_tree_has_the_parts_of_this_replica(mirrored):
    captured = {"x": parts_of(mirrored), "y": 2.0}

    def step():
        doubled = jax.tree.map(lambda x: 2 * x, captured)
        return doubled["x"], jax.jit(lambda tree: tree["x"] + tree["y"])(captured)

    doubled, added = mirrored.run(step)
    assert local(mirrored, doubled) == [[2.0 * i] * 2 for i in range(8)]
    assert local(mirrored, added) == [[2.0 + i] * 2 for i in range(8)]


def test_a_captured_per_replica_is_reduced_and_returned_as_itself(mirrored):
    captured = parts_of(mirrored)

    def step():
        replica = tpudist.get_replica_context()
        merged = replica.merge_call(lambda s: s.reduce("sum", captured, axis=None))
        return replica.all_reduce("sum", captured), merged, captured

    total, merged, same = mirrored.run(step)
    assert total.tolist() == merged.tolist() == [28.0, 28.0]
    assert same is captured


def test_assigning_a_captured_per_replica_raises_an_error_that_names_it(mirrored):
    captured = parts_of(mirrored, lambda i: float(i))
    with mirrored.scope():
        v = tpudist.Variable(0.0)
    with pytest.raises(ValueError, match="depends on 'captured', which the function captures"):
        mirrored.run(lambda: v.assign(captured + 0.0))


def test_a_captured_name_is_read_at_each_call(mirrored):
    """The value at the time of compilation is not used."""
    global module_value
    captured = parts_of(mirrored, lambda i: float(i))
    module_value = parts_of(mirrored, lambda i: 10.0 * i)

    def step():
        return captured + module_value

    assert local(mirrored, mirrored.run(step)) == [11.0 * i for i in range(8)]
    captured = parts_of(mirrored, lambda i: 1.0)
    assert local(mirrored, mirrored.run(step)) == [1 + 10.0 * i for i in range(8)]
    module_value = parts_of(mirrored, lambda i: 2.0)
    assert local(mirrored, mirrored.run(step)) == [3.0] * 8
    captured = parts_of(mirrored, lambda i: np.full(3, i))  # of another shape
    assert local(mirrored, mirrored.run(step)) == [[2.0 + i] * 3 for i in range(8)]
    captured = 1.0
    with pytest.raises(
        TypeError, match="captures 'captured', which was a PerReplica .* is 1.0 now"
    ):
        mirrored.run(step)


def test_a_captured_partial_batch_raises(mirrored):
    dataset = mirrored.experimental_make_numpy_dataset(np.arange(20.0)).batch(16)
    full, partial = mirrored.experimental_distribute_dataset(dataset)
    assert float(mirrored.run(lambda: tpudist.get_replica_context().all_reduce("sum", full))[0])
    with pytest.raises(ValueError, match="a partial batch. tpudist counts the real rows"):
        mirrored.run(lambda: partial + 1)


def test_a_captured_per_replica_of_another_strategy_raises(mirrored):
    captured = parts_of(tpudist.MirroredStrategy(["cpu:0", "cpu:1"]))
    with pytest.raises(ValueError, match=r"captures PerReplica.* of 2 .*runs on 8 replica\(s\)"):
        mirrored.run(lambda: captured + 1)


def test_a_captured_per_replica_works_in_scan_and_grad(mirrored):
    captured = parts_of(mirrored, lambda i: float(i))

    def step():
        total, _ = jax.lax.scan(lambda c, x: (c + captured * x, None), 0.0, jnp.arange(3.0))
        return total, jax.grad(lambda w: w * captured)(1.0)

    total, grad = mirrored.run(step)
    assert local(mirrored, total) == [3.0 * i for i in range(8)]
    assert local(mirrored, grad) == [float(i) for i in range(8)]


def test_a_per_replica_has_values_and_no_other_attributes(mirrored):
    value = parts_of(mirrored)
    assert [x.tolist() for x in value.values] == [[float(i)] * 2 for i in range(8)]
    assert [next(iter(x.devices())) for x in value.values] == jax.devices()
    with pytest.raises(AttributeError, match="has no attribute 'sum': every replica has its own"):
        _ = value.sum


def test_a_function_with_captures_can_be_forgotten(mirrored):
    captured = parts_of(mirrored)
    gc.freeze()  # objects that exist already need not be searched

    def step():
        return captured + 1

    mirrored.run(step)
    gone = weakref.ref(step)
    del step
    gc.collect()
    gc.unfreeze()
    assert gone() is None


def test_a_variable_without_a_strategy_is_read_by_every_strategy(strategy):
    """TensorFlow does the same: there it is an ordinary variable."""
    v = tpudist.Variable(3.0, name="outside")

    def step(x):
        return x * v + tpudist.get_replica_context().all_reduce("sum", v)

    n = strategy.num_replicas_in_sync
    assert float(strategy.run(step, (jnp.float32(2),))) == 6 + 3 * n
    v.assign(5.0)
    assert float(strategy.run(step, (jnp.float32(2),))) == 10 + 5 * n

    @tpudist.function
    def whole():
        return strategy.reduce("sum", strategy.run(step, (1.0,)), axis=None) + v

    assert float(whole()) == n * (5 + 5 * n) + 5
    with pytest.raises(RuntimeError, match="'outside' was made under DefaultStrategy"):
        strategy.run(lambda: v.assign(1.0))


# isinstance.


def test_isinstance_distinguishes_mirrored_and_per_replica_values(mirrored):
    def step(x):
        replica = tpudist.get_replica_context()
        return replica.all_reduce("sum", x), x + replica.replica_id_in_sync_group

    total, mine = mirrored.run(step, (jnp.ones(2),))
    assert isinstance(total, tpudist.Mirrored)
    assert isinstance(total, tpudist.DistributedValues)
    assert isinstance(mine, tpudist.PerReplica)
    assert isinstance(mine, tpudist.DistributedValues)
    assert not isinstance(mine, tpudist.Mirrored)
    assert not isinstance(jnp.ones(2), tpudist.DistributedValues)
    assert not isinstance(3, tpudist.Mirrored)
    assert not isinstance(mine.array, tpudist.Mirrored)
    assert not isinstance(total, tpudist.PerReplica)


# Variables created in a replica function.


def test_a_variable_is_created_once(strategy):
    calls = []

    def step(x):
        calls.append(None)
        v = tpudist.Variable(1.0, aggregation=tpudist.VariableAggregation.MEAN, name="inside")
        v.assign_add(x)
        return v.read_value()

    assert float(strategy.run(step, (jnp.float32(2),))) == 3.0
    assert float(strategy.run(step, (jnp.float32(2),))) == 5.0
    assert len(calls) == 2  # traced to find the Variable, then with it
    assert strategy.run(step, (jnp.ones(()),)).tolist() == 6.0


def test_guarded_variables_are_created_once(strategy):
    class Model:
        made = None

        def __call__(self, x):
            if self.made is None:
                self.w = tpudist.Variable(jnp.full((2,), 3.0))
                self.made = tpudist.Variable(lambda: jnp.zeros((), jnp.int32), trainable=False)
            self.made.assign(self.made + 1)
            return x * self.w

    model = Model()
    assert strategy.run(model, (jnp.ones(2),)).tolist() == [3.0, 3.0]
    first = model.w
    assert strategy.run(model, (jnp.ones((1, 2)),)).tolist() == [[3.0, 3.0]]
    assert model.w is first
    assert int(model.made) == 2
    assert strategy.extended.variable_created_in_scope(first)
    model.w.assign([1.0, 2.0])
    assert strategy.run(model, (jnp.ones(2),)).tolist() == [1.0, 2.0]


def test_the_first_replica_determines_the_initial_value(strategy):
    def step(x):
        v = tpudist.Variable(
            x * 2,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        return v.read_value()

    x = parts_of(strategy, lambda i: jnp.float32(i + 1))
    assert local(strategy, strategy.run(step, (x,))) == [2.0] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int32"])
def test_computed_initial_values_keep_their_dtype(mirrored, dtype):
    def step():
        return tpudist.Variable(jnp.ones(3, dtype)).read_value()

    made = mirrored.run(step)
    assert made.dtype == dtype
    assert made.astype(int).tolist() == [1, 1, 1]


def test_a_variable_is_created_in_merge_call_and_from_a_captured_one(mirrored):
    with mirrored.scope():
        start = tpudist.Variable(2.0)

    def merge(strategy):
        v = tpudist.Variable(start + 1, name="merged")
        v.assign_add(1.0)
        return v.read_value()

    def step():
        return tpudist.get_replica_context().merge_call(merge)

    assert float(mirrored.run(step)) == 4.0
    assert float(mirrored.run(step)) == 5.0


def test_an_initial_value_computed_in_a_nested_transformation_raises(mirrored):
    def bad():
        return jax.jit(lambda: tpudist.Variable(jnp.zeros(2)).read_value())()

    def good():
        return jax.jit(lambda: tpudist.Variable(lambda: jnp.zeros(2)).read_value())()

    with pytest.raises(RuntimeError, match="made inside a nested JAX transformation"):
        mirrored.run(bad)
    assert mirrored.run(good).tolist() == [0, 0]


def test_a_variable_is_created_again_after_its_function_failed(mirrored):
    fails = True
    made = []

    def step():
        made.append(tpudist.Variable(jnp.ones(())))
        if fails:
            raise KeyError("no")
        return made[-1].read_value()

    with pytest.raises(KeyError):
        mirrored.run(step)
    with pytest.raises(RuntimeError, match="failed before its initial value was computed"):
        mirrored.run(lambda: made[0].read_value())
    fails = False
    assert float(mirrored.run(step)) == 1.0


def test_lowering_creates_variables_that_do_not_depend_on_abstract_arguments(mirrored):
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)

    def good(x):
        return x * tpudist.Variable(jnp.full((2,), 2.0)).read_value()

    def bad(x):
        return tpudist.Variable(x, name="from x").read_value()

    assert "stablehlo" in mirrored.lower(good, (abstract,)).as_text()
    assert mirrored.run(good, (jnp.ones(2),)).tolist() == [2, 2]
    with pytest.raises(ValueError, match="makes Variable 'from x' from its arguments, .* abstract"):
        mirrored.lower(bad, (abstract,))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, nnx.jit], ids=lambda f: f.__name__)
def test_an_object_captured_by_a_nested_jit_raises(transform):
    """The nested function stores its own constants, which would never change either."""
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    table = jnp.ones((1024, 512))
    x = jnp.ones((2, 3))
    of_model, of_table = transform(lambda x: model(x)), transform(lambda x: x + table.sum())
    with pytest.raises(ValueError, match="captures an NNX object: its Param"):
        strategy.run(lambda x: of_model(x), args=(x,))
    with pytest.raises(ValueError, match=r"captures an array float32\[1024,512\] of 2.0 MiB"):
        strategy.run(lambda x: of_table(x), args=(x,))


# Functions that JAX traces once for all the programs that call them.

KEPT = {
    "jit": lambda read: jax.jit(lambda x: x + read()),
    "scan": lambda read: _make_scan(lambda c, _: (c + read(), None)),
    "cond": lambda read: _make_cond(lambda x: x + read()),
    "checkpoint": lambda read: jax.checkpoint(lambda x: x + read()),
    "vmap of jit": lambda read: jax.vmap(jax.jit(lambda x: x + read()[0])),
}


def _make_scan(turn):
    return lambda x: jax.lax.scan(turn, x, length=1)[0]


def _make_cond(branch):
    return lambda x: jax.lax.cond(x[0] < 1e9, branch, jnp.negative, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KEPT)
def test_a_module_function_reads_its_captured_values_in_each_program(mirrored, kind):
    """It would read the value of the first program that JAX traced, or the part of one replica."""
    parts = parts_of(mirrored)
    with mirrored.scope():
        held = tpudist.Variable(jnp.full(2, 10.0))
    helper = KEPT[kind](lambda: parts + held)
    x = np.ones(2, np.float32)
    expected = [11.0 + i for i in range(8)]

    def again(x):
        held.assign_add(jnp.ones(2))
        return helper(x), helper(2 * x)

    def values(result):
        return [y[0] for y in local(mirrored, result)]

    # In the second turn, the value is known already when the helper captures it.
    for first in (lambda: 0.0, lambda: parts):
        assert values(mirrored.run(lambda x: first() * 0 + helper(x), (x,))) == expected  # noqa: B023
    assert values(mirrored.run(lambda x: 2 * helper(x), (x,))) == [2 * y for y in expected]
    grad = mirrored.run(lambda x: jax.grad(lambda y: helper(y).sum())(x), (x,))
    assert {y for part in local(mirrored, grad) for y in part} == {1.0}
    first, second = mirrored.run(again, (x,))
    assert values(first) == [y + 1 for y in expected]
    assert values(second) == [y + 2 for y in expected]
    with pytest.raises(RuntimeError, match="read in a function that jax.jit"):
        jax.jit(lambda x: x + held)(x)
    assert values(mirrored.run(lambda x: helper(x), (x,))) == [y + 1 for y in expected]


class Captured:
    """Steps that use captured objects, as steps for tf.distribute do."""

    def __init__(self, strategy):
        self.model = strategy.create(lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        self.optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.1), self.model))
        self.norm = strategy.create(lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
        self.rngs = nnx.Rngs(0)

    def train(self, x):
        """Differentiates the model."""
        return nnx.grad(lambda model: model(x).mean())(self.model)

    def update(self, x):
        """Changes the optimizer."""
        model = nnx.clone(self.model)
        self.optimizer.update(model, nnx.state(model, nnx.Param))

    def normalize(self, x):
        """Changes running statistics."""
        return self.norm(x).sum()

    def draw(self, x):
        """Changes a random stream."""
        return jax.random.uniform(self.rngs.params())

    def note(self, x):
        """Changes an attribute."""
        self.model.seen = True


@pytest.mark.parametrize("method", ["train", "update", "normalize", "draw", "note"])
def test_changing_or_differentiating_a_captured_object_raises(mirrored, method):
    step = getattr(Captured(mirrored), method)
    message = (
        rf"'{method}' changes or differentiates an NNX object that it captures \(\w+\), at "
        rf".*test_captures.py:\d+. .* Pass the object as an argument"
    )
    with pytest.raises(ValueError, match=message):
        mirrored.run(step, args=(jnp.ones((2, 4)),))


def test_an_error_of_flax_about_another_object_is_unchanged(mirrored):
    def step(x):
        counter = nnx.Variable(jnp.zeros(()))

        def loss(x):
            counter[...] += 1
            return x.sum()

        return jax.grad(loss)(x)

    with pytest.raises(TraceContextError, match="Cannot mutate Variable from a different trace"):
        mirrored.run(step, args=(jnp.ones((2, 4)),))
