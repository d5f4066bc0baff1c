"""`tpudist.function`: code in cross-replica context as one compiled program."""

import copy
import dataclasses
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import ReduceOp, VariableAggregation, VariableSynchronization

SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN


@pytest.fixture(
    scope="module",
    params=[
        "fsdp",
        pytest.param("mirrored", marks=[pytest.mark.exhaustive, pytest.mark.slow]),
        pytest.param("one device", marks=[pytest.mark.exhaustive, pytest.mark.slow]),
    ],
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


def test_run_and_reduce_become_one_program(strategy):
    """The specification's train step: run, then reduce."""
    n = strategy.num_replicas_in_sync

    def replica_step(x):
        mine = x + tpudist.get_replica_context().replica_id_in_sync_group
        return mine, tpudist.get_replica_context().all_reduce("mean", mine)

    traces = []

    @tpudist.function
    def step(x):
        traces.append(None)
        mine, mean = strategy.run(replica_step, args=(x,))
        assert tpudist.in_cross_replica_context()
        total = strategy.reduce(ReduceOp.SUM, mine, axis=None)
        return mine, total, mean + total, strategy.gather(mine, axis=0)

    with strategy.scope():
        for _ in range(2):
            mine, total, both, gathered = step(jnp.zeros(2))
    expected = n * (n - 1) / 2
    assert strategy.gather(mine, axis=0).tolist() == gathered.tolist()
    assert gathered.tolist() == np.repeat(np.arange(n), 2).tolist()
    assert total.tolist() == [expected] * 2
    assert both.tolist() == [expected + expected / n] * 2
    assert len(traces) == 1
    assert len(strategy.experimental_local_results(mine)) == n


def test_the_strategy_is_found_outside_of_a_scope(strategy):
    @tpudist.function
    def step(x):
        return strategy.reduce("sum", strategy.run(lambda x: 2 * x, (x,)), axis=None)

    n = strategy.num_replicas_in_sync
    assert float(step(jnp.float32(3))) == 6 * n
    assert float(step(jnp.float32(4))) == 8 * n


def test_the_strategy_of_a_variable_is_found(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(1.0)

    @tpudist.function
    def add(x):
        return v.assign_add(x)

    assert float(add(2.0)) == 3.0
    assert float(v) == 3.0


def test_a_function_may_enter_a_scope(strategy):
    @tpudist.function
    def step(x):
        with strategy.scope():
            double = strategy.run(lambda x: 2 * x, (x,))
        return strategy.reduce("sum", double, axis=None)

    n = strategy.num_replicas_in_sync
    assert float(step(jnp.float32(3))) == 6 * n

    def merge(strategy, x):
        with strategy.scope():
            return strategy.reduce("sum", x, axis=None)

    total = strategy.run(lambda: tpudist.get_replica_context().merge_call(merge, (1.0,)))
    assert float(total) == n


def test_variables_are_arguments_and_results(strategy):
    with strategy.scope():
        v = tpudist.Variable(1.0)

    @tpudist.function
    def add(tree, x):
        tree["v"].assign_add(x)
        return tree["v"], strategy.run(lambda v: v * 2, (tree["v"],))

    same, double = add({"v": v}, jnp.float32(2))
    assert same is v
    assert (float(v), float(double)) == (3.0, 6.0)


def test_local_results_in_a_function_cover_all_replicas(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = tpudist.Variable(2.0)
        sums = tpudist.Variable(
            0.0, synchronization=VariableSynchronization.ON_READ, aggregation=SUM
        )

    @tpudist.function
    def step():
        strategy.run(
            lambda: sums.assign(tpudist.get_replica_context().replica_id_in_sync_group * 1.0)
        )
        parts = strategy.experimental_local_results({"v": v, "sums": sums})
        return sum((1 + i) * part["sums"] for i, part in enumerate(parts)), parts[-1]["v"] * len(
            parts
        )

    total, copies = step()
    assert float(total) == sum((1 + i) * i for i in range(n))
    assert float(copies) == 2.0 * n


def test_functions_call_each_other(strategy):
    @tpudist.function
    def inner(x):
        return strategy.run(lambda x: x + 1, (x,))

    @tpudist.function
    def outer(x):
        return strategy.reduce("sum", inner(x), axis=None)

    assert float(outer(jnp.float32(3))) == 4 * strategy.num_replicas_in_sync


def test_a_function_without_a_strategy_is_compiled_like_jit():
    @tpudist.function
    def double(x, *, times=2):
        return {"x": x * times, "n": times}

    assert double(jnp.arange(2)) == {"x": pytest.approx([0, 2]), "n": 2}
    assert float(double(jnp.float32(2), times=3)["x"]) == 6


def test_variables_are_read_and_assigned(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        count = tpudist.Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        total = tpudist.Variable(
            0.0, synchronization=VariableSynchronization.ON_READ, aggregation=SUM
        )

    def replica_step(x):
        count.assign_add(1)
        total.assign_add(x)

    @tpudist.function
    def step(x):
        strategy.run(replica_step, (x,))
        strategy.run(replica_step, (x,))
        count.assign(count + 10)
        return total.read_value() + count

    assert float(step(1.5)) == 3 * n + 12
    assert float(step(1.5)) == 6 * n + 24
    assert int(count) == 24
    assert float(total) == 6 * n


def test_a_function_reads_values_that_only_its_replica_function_uses(strategy):
    """Variables and captured parts are inputs of the program around it."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = tpudist.Variable(3.0)
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )

    @tpudist.function
    def step():
        return strategy.reduce("sum", strategy.run(lambda: v * 2 + parts), axis=None)

    assert float(step()) == 6 * n + n * (n - 1) / 2
    v.assign(4.0)
    assert float(step()) == 8 * n + n * (n - 1) / 2


@pytest.mark.slow
def test_a_loop_of_steps_equals_single_steps(strategy):
    """Runs an epoch in one function, as TensorFlow's guides do, without the loop over its data."""

    def train(fused):
        with strategy.scope():
            w = tpudist.Variable(jnp.zeros(3), aggregation=MEAN)

        def replica_step(x):
            grad = jax.grad(lambda v: jnp.square(x @ v - 1).mean())(w.read_value())
            w.assign_sub(0.1 * grad)
            return jnp.square(x @ w.read_value() - 1).mean()

        def epoch(batches):
            losses = 0.0
            for x in batches:
                losses += strategy.reduce("mean", strategy.run(replica_step, (x,)), axis=None)
            return losses

        data = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
        dataset = strategy.experimental_make_numpy_dataset(data).batch(16)
        batches = list(strategy.experimental_distribute_dataset(dataset))
        losses = (tpudist.function(epoch) if fused else epoch)(batches)
        return float(losses), w.numpy().tolist()

    loss, w = train(fused=True)
    expected_loss, expected_w = train(fused=False)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert w == pytest.approx(expected_w, rel=1e-5)


@pytest.mark.slow
def test_nnx_objects_are_changed_as_by_run(strategy):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(self.dense(x)))

    def replica_step(model, optimizer, metric, x):
        def loss_fn(model):
            return tpudist.compute_average_loss(jnp.square(model(x)).mean(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metric.update(values=jnp.square(model(x)).mean(-1))
        return loss

    def train(fused):
        with strategy.scope():
            model = Model(nnx.Rngs(0))
            optimizer = tpudist.Optimizer(optax.adam(1e-2), model)
            metric = nnx.metrics.Average()

        def two_steps(model, optimizer, metric, x):
            first = strategy.run(replica_step, (model, optimizer, metric, x))
            second = strategy.run(replica_step, args=(model, optimizer, metric, x))
            return strategy.reduce("sum", first, None), strategy.reduce("sum", second, None)

        x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)
        losses = (tpudist.function(two_steps) if fused else two_steps)(model, optimizer, metric, x)
        values = [
            *losses,
            *jax.tree.leaves(nnx.state((model, optimizer, metric), nnx.Not(nnx.RngState))),
        ]
        return [np.asarray(v, float).ravel().tolist() for v in values], float(metric.compute())

    got, metric = train(True)
    expected, expected_metric = train(False)
    for x, y in zip(got, expected, strict=True):
        assert x == pytest.approx(y, rel=1e-4, abs=1e-6)
    assert metric == pytest.approx(expected_metric, rel=1e-5)


def test_elements_are_taken_before_the_call(strategy):
    data = np.arange(20.0, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset(data).batch(8)
    )

    def replica_step(x):
        replica = tpudist.get_replica_context()
        return jnp.where(replica.example_mask(x), x, 0).sum(), replica.num_examples(x)

    traces = []

    @tpudist.function
    def step(iterator):
        traces.append(None)
        total, count = strategy.run(replica_step, (next(iterator),))
        return strategy.reduce("sum", total, axis=None), count

    for _ in range(2):
        iterator = iter(dataset)
        results = [tuple(map(float, step(iterator))) for _ in range(3)]
        with pytest.raises(StopIteration):
            step(iterator)
        assert results == [(28.0, 8.0), (92.0, 8.0), (70.0, 4.0)]
    assert len(traces) <= 16  # for several numbers of rows of the partial batch, also 1 and 0


def test_any_iterator_may_be_an_argument(strategy):
    """The elements of iterators of Python or the default strategy are not constants."""

    @tpudist.function
    def step(iterator):
        return strategy.reduce("sum", strategy.run(lambda x: 2 * x, (next(iterator),)), axis=None)

    n = strategy.num_replicas_in_sync
    iterator = iter([jnp.float32(i) for i in range(3)])
    assert [float(step(iterator)) for _ in range(3)] == [0, 2.0 * n, 4.0 * n]
    with pytest.raises(StopIteration):
        step(iterator)


def test_a_function_does_not_keep_its_arguments_alive(mirrored):
    @tpudist.function
    def step(model, x):
        return mirrored.run(lambda model, x: model(x), (model, x))

    gc.freeze()  # objects that exist already need not be searched
    with mirrored.scope():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        step(model, jnp.ones((1, 2)))
    gone = weakref.ref(model)
    del model
    gc.collect()
    gc.unfreeze()
    assert gone() is None


def test_a_captured_iterator_is_looked_up_at_each_call(mirrored):
    data = np.arange(16.0, dtype=np.float32)
    dataset = mirrored.experimental_distribute_dataset(
        mirrored.experimental_make_numpy_dataset(data).batch(8)
    )
    iterator = iter(dataset)

    @tpudist.function
    def step():
        return mirrored.reduce("sum", mirrored.run(lambda x: x, (next(iterator),)), axis=0)

    assert [float(step()), float(step())] == [28.0, 92.0]
    iterator = iter(dataset)
    assert [float(step()), float(step())] == [28.0, 92.0]


class _Wrapper:
    def __init__(self, iterator):
        self._iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._iterator)

    def __getattr__(self, name):
        return getattr(self._iterator, name)


@pytest.mark.parametrize("make_iterator", [iter, lambda dataset: _Wrapper(iter(dataset))])
def test_elements_of_an_incomplete_call_are_put_back(mirrored, make_iterator):
    data = np.arange(24.0, dtype=np.float32)
    dataset = mirrored.experimental_distribute_dataset(
        mirrored.experimental_make_numpy_dataset(data).batch(8)
    )

    @tpudist.function
    def two_steps(iterator):
        return [mirrored.reduce("sum", next(iterator), axis=0) for _ in range(2)]

    iterator = make_iterator(dataset)
    assert [float(x) for x in two_steps(iterator)] == [28.0, 92.0]
    with pytest.raises(StopIteration):
        two_steps(iterator)
    assert float(mirrored.reduce("sum", next(iterator), axis=0)) == 156.0


@pytest.mark.slow
def test_two_elements_with_different_real_rows_are_counted_separately(mirrored):
    data = np.arange(20.0, dtype=np.float32)
    dataset = mirrored.experimental_distribute_dataset(
        mirrored.experimental_make_numpy_dataset(data).batch(16)
    )

    def replica_step(x):
        return tpudist.compute_average_loss(x)

    @tpudist.function
    def both(iterator):
        full, partial = next(iterator), next(iterator)
        means = [mirrored.reduce("mean", x, axis=0) for x in (full, partial)]
        losses = [mirrored.run(replica_step, (x,)) for x in (full, partial)]
        return means + [mirrored.reduce("sum", x, axis=None) for x in losses]

    expected = [7.5, 17.5, 7.5, 17.5]
    assert [float(x) for x in both(iter(dataset))] == pytest.approx(expected)


def test_a_loop_over_a_dataset_in_a_function_raises(mirrored):
    dataset = mirrored.experimental_distribute_dataset([np.ones(8), np.ones(8)])

    @tpudist.function
    def over_dataset():
        return [x for x in dataset]

    @tpudist.function
    def over_iterator(iterator):
        return [x for x in iterator]

    with mirrored.scope():
        with pytest.raises(ValueError, match="a loop over a dataset would become part"):
            over_dataset()
        with pytest.raises(TypeError, match="A tpudist.function loops over a dataset"):
            over_iterator(iter(dataset))


def test_a_function_called_in_a_replica_function_is_a_plain_function(mirrored):
    @tpudist.function
    def mine(x):
        return x + tpudist.get_replica_context().replica_id_in_sync_group

    assert mirrored.gather(mirrored.run(mine, (jnp.zeros(1),)), 0).tolist() == list(range(8))


def test_methods_are_functions_of_their_instance(mirrored):
    class Trainer:
        def __init__(self, start):
            with mirrored.scope():
                self.v = tpudist.Variable(start)

        @tpudist.function
        def step(self, x):
            return self.v.assign_add(x)

    one, two = Trainer(1.0), Trainer(5.0)
    assert [float(one.step(1.0)), float(two.step(1.0)), float(one.step(1.0))] == [2, 6, 3]
    assert one.step is one.step


def test_a_method_has_the_name_of_its_attribute_and_belongs_to_its_object():
    class Adder:
        def __init__(self, number):
            self.number = number

        def add(self, x):
            return x + self.number

        compiled_add = tpudist.function(add)

    one = Adder(1)
    assert one.compiled_add(1) == 2
    assert type(one.add) is types.MethodType
    for make in (copy.copy, copy.deepcopy):
        other = make(one)
        other.number = 10
        assert [int(x.compiled_add(1)) for x in (one, other)] == [2, 11]
    assert one.compiled_add.__reduce__() == (getattr, (one, "compiled_add"))
    one.attribute = tpudist.function(one.add)
    other = copy.deepcopy(one)
    other.number = 10
    assert [int(x.attribute(1)) for x in (one, other)] == [2, 11]


def test_a_method_of_an_nnx_object_gets_it_as_an_argument(mirrored):
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Param(jnp.zeros(()))

        @tpudist.function
        def step(self, x):
            def add(model, x):
                total = tpudist.get_replica_context().all_reduce("sum", x)
                model.count[...] = model.count[...] + total

            mirrored.run(add, (self, x))
            return self.count[...] * 2

    with mirrored.scope():
        one, two = Counter(), Counter()
        assert [float(one.step(1.0)), float(one.step(1.0)), float(two.step(1.0))] == [16, 32, 16]
    assert float(one.count[...]) == 16
    assert "step" not in vars(one)


def test_variables_created_in_a_function_are_created_once(mirrored):
    class Model:
        v = None

    model = Model()

    @tpudist.function
    def step(iterator):
        if model.v is None:
            model.v = tpudist.Variable(jnp.zeros(()), aggregation=SUM)
        mirrored.run(lambda x: model.v.assign_add(x.sum()), (next(iterator),))
        return model.v.read_value()

    dataset = mirrored.experimental_distribute_dataset([np.ones(8, np.float32)] * 2)
    iterator = iter(dataset)
    with mirrored.scope():
        assert [float(step(iterator)), float(step(iterator))] == [8.0, 16.0]
    assert float(model.v) == 16.0


def test_a_run_in_a_function_creates_variables(strategy):
    """The usual pattern in TensorFlow: the first step of a compiled loop creates its variables."""

    class Model:
        def __init__(self):
            self.w = None
            self.optimizer = tpudist.Optimizer(optax.sgd(0.5, momentum=0.5))

        def __call__(self, x):
            if self.w is None:
                self.w = tpudist.Variable(jnp.ones(x.shape[1]), name="w")
                self.count = tpudist.Variable(lambda: jnp.zeros((), jnp.int32), name="count")
            self.count.assign(self.count + 1)
            grad = x.sum(0) / tpudist.get_replica_context().num_replicas_in_sync
            self.optimizer.apply_gradients([(grad, self.w)])
            return self.w.read_value()

    model = Model()

    @tpudist.function
    def train(x):
        strategy.run(model, (x,))
        return strategy.run(model, (x,))

    x = jnp.asarray([[1.0, 2.0]])
    with strategy.scope():
        assert train(x).tolist() == [1 - 0.5 - 0.75, 1 - 1 - 1.5]
        train(x)
    assert int(model.count) == 4
    expected, velocity = np.ones(2), np.zeros(2)
    for _ in range(4):
        velocity = 0.5 * velocity + np.array([1.0, 2.0])
        expected -= 0.5 * velocity
    assert model.w.numpy().tolist() == expected.tolist()


def test_merge_call_update_and_nested_transformations_work_inside(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(0.0)

    def replica_step(x):
        replica = tpudist.get_replica_context()

        def merge(strategy, x):
            total = strategy.extended.reduce_to("sum", x, v)
            strategy.extended.update(v, lambda v, t: v.assign_add(t), args=(total,))
            return total

        return replica.merge_call(merge, args=(x + replica.replica_id_in_sync_group,))

    @tpudist.function
    def step(xs):
        totals = mirrored.run(replica_step, (xs[0],))

        def body(carry, x):
            return carry + mirrored.reduce("sum", mirrored.run(lambda x: x * 1.0, (x,)), None), ()

        return totals, jax.lax.scan(body, 0.0, xs)[0]

    total, scanned = step(jnp.arange(3.0))
    assert (float(total), float(scanned), float(v)) == (28.0, 24.0, 28.0)


def test_per_replica_values_differ_inside_as_outside(mirrored):
    @tpudist.function
    def step(x):
        return mirrored.run(lambda x: x, (x,)) + 1

    parts = mirrored.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )
    with mirrored.scope():
        assert float(step(jnp.float32(1))) == 2  # equal on every replica: a plain array
        with pytest.raises(TypeError, match="was used as one array, but every replica has its own"):
            step(parts)


def test_a_nested_run_captures_equal_and_different_parts(mirrored):
    parts = mirrored.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )

    @tpudist.function
    def step(x):
        mine = mirrored.run(lambda x: x + parts, (x,))
        doubled = mirrored.run(lambda: 2 * mine)  # captures values that differ
        return mirrored.reduce("sum", doubled, None), mirrored.reduce("sum", parts, None)

    assert [float(x) for x in step(jnp.float32(1))] == [72.0, 28.0]


def test_dataclasses_are_merged_field_by_field(mirrored):
    @dataclasses.dataclass
    class Metrics:
        loss: object
        name: str
        parts: dict

    def step(x):
        replica = tpudist.get_replica_context()
        mine = x + replica.replica_id_in_sync_group
        return Metrics(replica.all_reduce("sum", mine), "a", {"mine": Metrics(mine, "b", {})})

    for run in (
        mirrored.run,
        lambda f, args: tpudist.function(functools.partial(mirrored.run, f))(args),
    ):
        metrics = run(step, (jnp.float32(0),))
        assert isinstance(metrics, Metrics)
        assert (float(metrics.loss), metrics.name) == (28.0, "a")
        assert isinstance(metrics.parts["mine"].loss, tpudist.PerReplica)
        assert metrics.parts["mine"].parts == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("input_signature", ()),
        ("reduce_retracing", True),
        ("experimental_relax_shapes", True),
        ("experimental_implements", "a"),
        ("experimental_autograph_options", "a"),
        ("experimental_attributes", {}),
        ("experimental_follow_type_hints", True),
        ("jit_compile", False),
        ("experimental_compile", False),
    ],
)
def test_options_without_an_effect_warn(option, value):
    with pytest.warns(UserWarning, match=f"{option}=.*has no effect"):
        double = tpudist.function(lambda x: 2 * x, **{option: value})
    assert double(2) == 4


def test_function_is_a_decorator_with_and_without_options():
    @tpudist.function(autograph=False, jit_compile=True)
    def double(x):
        return 2 * x

    assert float(double(jnp.float32(2))) == 4
    assert double.__name__ == "double"
    with pytest.raises(TypeError, match="tpudist.function received 3"):
        tpudist.function(3)


def test_advice_about_captured_objects_passes_them_to_the_function_itself(mirrored):
    """`strategy.run(step, ...)` would call the compiled program on every replica."""
    model, table = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1024, 512))

    @tpudist.function
    def reads(x):
        return mirrored.run(lambda model, x: model(x), args=(model, x))

    @tpudist.function
    def differentiates(x):
        return nnx.grad(lambda model: model(x).sum())(model)

    @tpudist.function
    def large(x):
        return mirrored.run(lambda: x + table.sum())

    for function, advice in (
        (reads, r"argument: reads\(model, ...\)\."),
        (differentiates, r": differentiates\(model"),
        (large, r"arguments: large\(array, ...\)\."),
    ):
        with pytest.raises(ValueError, match=advice):
            function(jnp.ones((1, 2)))
