"""Eager replica functions compute the same results as compiled ones, and show their values."""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

import tpudist
from tpudist import PerReplica, ReduceOp, VariableAggregation, VariableSynchronization

N = 8
ON_READ = VariableSynchronization.ON_READ
context = tpudist.get_replica_context


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


def my_id():
    return context().replica_id_in_sync_group


def ids(strategy):
    """Returns the number of each replica, as an array of one row."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.full(1, c.replica_id_in_sync_group, np.float32)
    )


def batches(strategy, *arrays, batch=16):
    """Returns a distributed dataset of these arrays, whose last batch may be partial."""
    rows = [tuple(x[i : i + batch] for x in arrays) for i in range(0, len(arrays[0]), batch)]
    return strategy.experimental_distribute_dataset(rows)


def describe(tree):
    """Describes a result: its structure, and the kind, shape and dtype of each leaf."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, PerReplica))
    kinds = [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
    return treedef.num_leaves, kinds


def numbers(strategy, tree):
    """Returns the values of a result; for a PerReplica, of each replica without padding."""
    parts = jax.tree.leaves(strategy.experimental_local_results(tree))
    return [np.asarray(x) for x in parts if isinstance(x, jax.Array | float | int)]


def assert_same(strategy, eager, compiled):
    assert describe(eager) == describe(compiled)
    for x, y in zip(numbers(strategy, eager), numbers(strategy, compiled), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def run_both_ways(strategy, program):
    """Returns the results of `program()` compiled and eager; it creates its own state."""
    compiled = program()
    with strategy.debug():
        eager = program()
    assert_same(strategy, eager, compiled)
    return eager


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def examples(num_rows, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def train(strategy, num_rows, loop):
    """Runs some steps of a model with every special case: statistics, dropout, a metric."""
    with strategy.scope():
        model = Model()
        optimizer = tpudist.Optimizer(optax.sgd(0.1, momentum=0.9), model)
        metric = nnx.metrics.Average()

    def step(model, optimizer, metric, batch):
        x, y = batch

        def loss_fn(model):
            logits = model(x)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return tpudist.compute_average_loss(each), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        metric.update(values=loss * strategy.num_replicas_in_sync)
        total = context().all_reduce("sum", loss)
        return {"loss": loss, "total": total, "logits": logits, "rows": context().num_examples(x)}

    iterator = iter(batches(strategy, *examples(num_rows), batch=8))
    results = loop(strategy, step, (model, optimizer, metric), iterator)
    state = nnx.state((model, optimizer, metric))
    return results, jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        jax.tree.leaves(state),
    )


def one_by_one(strategy, step, args, iterator):
    return [strategy.run(step, (*args, batch)) for batch in iterator]


def in_one_program(strategy, step, args, iterator):
    return strategy.run_steps(step, iterator, 2, args)


def in_a_function(strategy, step, args, iterator):
    @tpudist.function
    def two_steps(*args):
        first = strategy.run(step, (*args, next(iterator)))
        second = strategy.run(step, (*args, next(iterator)))
        return first["loss"], strategy.reduce("sum", second["loss"], axis=None)

    return two_steps(*args)


@pytest.mark.slow
def test_a_model_with_one_layer_trains_to_the_same_numbers(mirrored):
    x, _ = examples(16)

    def program():
        with mirrored.scope():
            model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
            optimizer = tpudist.Optimizer(optax.sgd(0.1), model)

        def step(model, optimizer, batch):
            loss, grads = nnx.value_and_grad(
                lambda model: tpudist.compute_average_loss((model(batch[0]) ** 2).sum(-1))
            )(model)
            optimizer.update(model, grads)
            return loss

        (batch,) = batches(mirrored, x)
        return mirrored.run(step, (model, optimizer, batch)), model.kernel[...], optimizer.step[...]

    run_both_ways(mirrored, program)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [one_by_one, in_one_program, in_a_function])
def test_training_gives_the_same_numbers(loop):
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    run_both_ways(strategy, lambda: train(strategy, 16, loop))


@pytest.mark.slow
def test_training_with_a_partial_batch_gives_the_same_numbers():
    """The second batch has 5 of 13 rows, so one replica has four rows, and one has one."""
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    run_both_ways(strategy, lambda: train(strategy, 13, one_by_one))


def test_each_replica_sees_only_its_real_rows(mirrored):
    seen = []

    def step(batch):
        (x,) = batch
        seen.append(x.shape[0])
        return x, x.sum(0), context().all_gather(x, 0)

    rows = np.arange(13, dtype=np.float32)[:, None]

    def program():
        return [mirrored.run(step, (batch,)) for batch in batches(mirrored, rows)]

    compiled = program()
    seen.clear()
    with mirrored.debug():
        (eager,) = program()
    assert sum(seen) == 13
    assert len(seen) == N
    for x, y in zip(eager, compiled[0], strict=True):
        assert [p.tolist() for p in numbers(mirrored, x)] == [
            p.tolist() for p in numbers(mirrored, y)
        ]
    assert eager[0].rows == compiled[0][0].rows == tuple(seen)
    assert eager[0].shape == compiled[0][0].shape
    np.testing.assert_array_equal(mirrored.gather(eager[0], 0), rows)
    np.testing.assert_array_equal(eager[2], rows)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", [x for x in VariableAggregation if x.name != "NONE"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_variables_of_all_kinds_are_read_and_assigned_as_compiled(
    mirrored, aggregation, synchronization
):
    x = ids(mirrored)

    def program():
        with mirrored.scope():
            v = tpudist.Variable(
                jnp.ones(1),
                synchronization=VariableSynchronization[synchronization],
                aggregation=aggregation,
            )

        def step(x):
            before = v.read_value()
            v.assign_add(x)
            v.assign(v * 2 + x)
            return before, v.read_value()

        return [mirrored.run(step, (x,)), mirrored.run(step, (x,)), v.read_value()]

    run_both_ways(mirrored, program)


@pytest.mark.slow
def test_variables_in_branches_loops_and_gradients_match_compiled_code(mirrored):
    x = ids(mirrored)

    def program():
        with mirrored.scope():
            v = tpudist.Variable(jnp.ones(1), aggregation=VariableAggregation.MEAN)
            total = tpudist.Variable(jnp.zeros(1), synchronization=ON_READ)

        def loss(w, x):
            total.assign_add(x)
            return (w * v * x).sum()

        def step(x):
            grads = jax.grad(loss)(jnp.ones(1), x)

            def body(carry, y):
                v.assign_add(y[None] * x)
                return carry + v.read_value(), carry

            carry, _ = jax.lax.scan(body, jnp.zeros(1), jnp.arange(3.0))
            jax.lax.cond(x[0] > 2, lambda: total.assign(x), lambda: total.assign(2 * x))
            return grads, carry, total.read_value()

        return mirrored.run(step, (x,)), v.read_value()

    run_both_ways(mirrored, program)


@pytest.mark.slow
def test_collectives_and_their_gradients_match_compiled_code(mirrored):
    x = ids(mirrored)

    def program():
        def step(x):
            here = context()

            def loss(w):
                mean = here.all_reduce("mean", w * x)
                rows = here.all_gather(w * x, 0)
                return (mean**2).sum() + (rows**3).sum()

            return {
                "sum": here.all_reduce("sum", x),
                "extremes": [here.all_reduce(op, {"a": x, "b": -x}) for op in ("min", "max")],
                "mean of integers": here.all_reduce("mean", jnp.asarray(x, jnp.int32)),
                "half": here.all_reduce("sum", jnp.asarray(x, jnp.bfloat16)),
                "gather": here.all_gather({"x": x, "i": my_id()[None]}, 0),
                "grad": jax.grad(loss)(jnp.ones(1)),
                "under vmap": jax.vmap(lambda y: here.all_reduce("sum", y))(jnp.stack([x, -x])),
                "key": jax.random.normal(here.random_key(3), (2,)),
                "slices": here.all_reduce("mean", tpudist.IndexedSlices(x[:, None], my_id()[None])),
                "number": here.num_examples(x),
                "replicas": here.num_replicas_in_sync,
            }

        return mirrored.run(step, (x,))

    run_both_ways(mirrored, program)


@pytest.mark.slow
def test_functions_that_jax_traces_see_the_variables_of_their_replica(mirrored):
    """JAX caches these traces; the trace of another replica or step would be wrong."""
    with mirrored.scope():
        own = tpudist.Variable(jnp.zeros(1), synchronization=ON_READ)

    @jax.checkpoint
    def loss(w, x):
        return (context().all_reduce("sum", w * x) * own.read_value() ** 2).sum()

    def step(x):
        own.assign_add(x)
        before = jax.grad(loss)(jnp.ones(1), x)
        own.assign_add(x)
        return before, jax.grad(loss)(jnp.ones(1), x)

    x = ids(mirrored)

    def program():
        with mirrored.scope():
            own.assign(jnp.ones(1))
        return mirrored.run(step, (x,)), mirrored.run(step, (x,))

    run_both_ways(mirrored, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ops", [tpudist.HierarchicalCopyAllReduce(), tpudist.ReductionToOneDevice()]
)
def test_chosen_reductions_match_compiled_code(ops):
    strategy = tpudist.MirroredStrategy(cross_device_ops=ops)
    x = ids(strategy)
    run_both_ways(strategy, lambda: strategy.run(lambda x: context().all_reduce("mean", x), (x,)))


def test_merge_call_is_called_once_with_the_values_of_all(mirrored):
    x, calls = ids(mirrored), []

    def program():
        with mirrored.scope():
            v = tpudist.Variable(jnp.zeros(1), aggregation=VariableAggregation.SUM)
            own = tpudist.Variable(
                jnp.zeros(1), synchronization=ON_READ, aggregation=VariableAggregation.SUM
            )

        def merge(strategy, x, shared, name):
            calls.append((type(x), name))
            v.assign_add(strategy.reduce("mean", x, axis=None))
            own.assign(own + 8)
            return x, v.read_value(), shared, name

        def step(x, shared):
            v.assign(x)
            own.assign_add(x)
            result = context().merge_call(merge, (x, shared, "a name"))
            v.assign_add(result[1])
            return result, own.read_value()

        return mirrored.run(step, (x, jnp.ones(2))), v.read_value(), own.read_value()

    calls.clear()
    run_both_ways(mirrored, program)
    assert len(calls) == 1 + 1


@pytest.mark.slow
def test_optimizers_of_variables_match_compiled_code(mirrored):
    x = ids(mirrored)

    def program():
        with mirrored.scope():
            w = tpudist.Variable(jnp.ones(1), name="w")
            optimizer = tpudist.Optimizer(optax.adam(0.1))

        def step(x):
            grad = jax.grad(lambda w: (w * x).sum())(w.read_value())
            optimizer.apply_gradients([(grad, w)])

        mirrored.run(step, (x,))
        mirrored.run(step, (x,))
        return w.read_value(), [v.read_value() for v in optimizer.variables]

    run_both_ways(mirrored, program)


@pytest.mark.slow
def test_microbatches_match_compiled_code(mirrored):
    x, _ = examples(48)

    def program(rows):
        def loss(w, batch):
            return tpudist.compute_average_loss((batch @ w) ** 2), w.sum()

        def step(w, batch):
            return tpudist.value_and_grad_in_microbatches(loss, 2, has_aux=True)(w, batch[0])

        data = batches(mirrored, x[:rows], batch=32)
        return [mirrored.run(step, (jnp.ones(4), batch)) for batch in data]

    run_both_ways(mirrored, lambda: program(32))
    run_both_ways(mirrored, lambda: program(43))


def test_variables_that_a_function_creates_are_created_once(mirrored):
    x = ids(mirrored)
    made = []

    def step(x):
        v = tpudist.Variable(lambda: jnp.ones(1), aggregation=VariableAggregation.SUM)
        made.append(v)
        v.assign_add(x)
        return v.read_value()

    with mirrored.debug():
        mirrored.run(step, (x,))
        second = mirrored.run(step, (x,))
    assert len(set(map(id, made))) == 1
    assert float(second[0]) == 1 + 2 * sum(range(N))
    assert float(mirrored.run(step, (x,))[0]) == 1 + 3 * sum(range(N))


def test_a_mean_of_16_bit_state_matches_compiled_code(mirrored):
    """If each addition rounded, the sum of 8 numbers of 8 bits would differ."""

    class Model(nnx.Module):
        def __init__(self):
            self.mean = nnx.BatchStat(jnp.zeros((), jnp.bfloat16))

    def step(model, x):
        model.mean[...] = jnp.asarray(60000 + 937.5 * x[0], jnp.bfloat16)

    def program():
        model = Model()
        mirrored.run(step, (model, ids(mirrored)))
        return model.mean[...]

    run_both_ways(mirrored, program)


def test_results_have_the_same_structure_as_compiled_results(mirrored):
    """Equal values that each replica computed itself are still returned as a PerReplica."""
    x, data = ids(mirrored), jnp.arange(3.0)
    with mirrored.scope():
        captured = jnp.arange(2.0)
        v = tpudist.Variable(jnp.ones(1))

    def step(x, data, number):
        return {
            "own": x * 0,
            "shared": data + 1,
            "captured": captured * 2,
            "constant": jnp.ones(2),
            "reduced": context().all_reduce("sum", x) / 2,
            "argument": data,
            "objects": ("text", None, 3, ReduceOp.SUM),
            "variable": v,
            "a number": data * number,
        }

    compiled = mirrored.run(step, (x, data, 2.5))
    with mirrored.debug():
        eager = mirrored.run(step, (x, data, 2.5))
    assert eager["argument"] is compiled["argument"] is data
    assert eager["variable"] is v
    assert_same(mirrored, eager, compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        tpudist.OneDeviceStrategy,
        lambda: tpudist.TPUStrategy(replica_axes={"tensor": 2}),
        tpudist.experimental.CentralStorageStrategy,
    ],
    ids=["one device", "two devices each", "central storage"],
)
def test_other_strategies_match_compiled_code(make):
    strategy = make() if make is not tpudist.OneDeviceStrategy else make("cpu:0")

    def program():
        with strategy.scope():
            v = tpudist.Variable(jnp.ones((4, 2)), aggregation=VariableAggregation.SUM)
        (batch,) = batches(strategy, examples(16)[0])

        def step(batch):
            loss, grad = jax.value_and_grad(lambda w: ((batch[0] @ w) ** 2).sum())(v.read_value())
            v.assign_sub(0.01 * grad)
            return loss, context().all_reduce("mean", loss)

        return strategy.run(step, (batch,)), v.read_value()

    run_both_ways(strategy, program)


# What eager functions are for.


@pytest.mark.slow
def test_python_sees_the_values_of_each_replica(mirrored, capsys):
    def step(x):
        if x[0] > 5:
            print(f"replica {my_id()} has {float(x[0])}")
            return x
        return -x

    with mirrored.debug():
        result = mirrored.run(step, (ids(mirrored),))
    assert capsys.readouterr().out == "replica 6 has 6.0\nreplica 7 has 7.0\n"
    assert [float(x[0]) for x in result.values] == [0, -1, -2, -3, -4, -5, 6, 7]


def test_values_are_seen_in_gradients_loops_and_jitted_functions(mirrored):
    seen = []

    @jax.jit
    def jitted(x):
        seen.append(float(x[0]))
        return x * 2

    def step(x):
        def loss(w):
            assert bool(w[0] == 1)
            return (w * jitted(x)).sum()

        return jax.lax.fori_loop(0, 2, lambda i, c: c + float(i), jax.grad(loss)(jnp.ones(1)))

    with mirrored.debug():
        mirrored.run(step, (ids(mirrored),))
    assert seen == list(map(float, range(N)))


def test_replicas_take_turns_and_the_first_runs_in_the_callers_thread(mirrored):
    order, threads = [], []

    def step(x):
        order.append((0, int(x[0])))
        threads.append(threading.current_thread())
        context().all_reduce("sum", x)
        order.append((1, int(x[0])))

    with mirrored.debug():
        mirrored.run(step, (ids(mirrored),))
    assert order == [(half, i) for half in (0, 1) for i in range(N)]
    assert threads[0] is threading.current_thread()
    assert not any(thread.is_alive() for thread in threads[1:])


def test_debug_disable_jit_and_run_functions_eagerly_run_eagerly(mirrored):
    kinds = []

    @tpudist.function
    def function(x):
        return mirrored.run(lambda x: kinds.append(isinstance(x, jax.core.Tracer)), (x,))

    x = ids(mirrored)
    for ask in (mirrored.debug, jax.disable_jit):
        with ask():
            function(x)
    assert not tpudist.functions_run_eagerly()
    tpudist.run_functions_eagerly(True)
    try:
        assert tpudist.functions_run_eagerly()
        function(x)
    finally:
        tpudist.run_functions_eagerly(False)
    assert kinds == [False] * 3 * N
    function(x)
    assert kinds[3 * N :] == [True]
    with pytest.raises(TypeError, match="run_functions_eagerly\\(1\\): .*not int"):
        tpudist.run_functions_eagerly(1)  # type: ignore[arg-type]


def test_other_strategies_stay_compiled(mirrored):
    other = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    kinds = []
    with mirrored.debug():
        other.run(lambda x: kinds.append(isinstance(x, jax.core.Tracer)), (ids(other),))
    assert kinds == [True]


def test_settings_of_jax_hold_on_all_replicas(mirrored):
    found = []
    with mirrored.debug(), jax.default_matmul_precision("float32"), jax.enable_x64(True):
        mirrored.run(
            lambda: found.append((jax.config.jax_default_matmul_precision, jnp.ones(1).dtype))
        )
    assert found == [("float32", jnp.float64)] * N


# Failures.


@pytest.fixture
def state(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(jnp.zeros(1), aggregation=VariableAggregation.SUM, name="v")
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])

    def is_as_before():
        return float(v[0]) == 0 and np.array_equal(model.kernel[...], kernel)

    return v, model, is_as_before


@pytest.mark.parametrize("failing", [0, 2, N - 1])
def test_an_exception_names_its_replica_and_keeps_the_state(mirrored, state, failing):
    v, model, is_as_before = state
    ended = []

    def step(model, x):
        try:
            v.assign_add(x)
            model.kernel[...] = model.kernel[...] + 1
            context().merge_call(lambda strategy: v.assign_add([5.0]))
            if my_id() == failing:
                raise KeyError("mine")
            context().all_reduce("sum", x)
        finally:
            ended.append(int(x[0]))

    with mirrored.debug(), pytest.raises(KeyError, match="mine") as caught:
        mirrored.run(step, (model, ids(mirrored)))
    assert f"Replica {failing} of 8 raised this" in caught.value.__notes__[0]
    assert sorted(ended) == list(range(N))
    assert is_as_before()


def test_replicas_at_different_collectives_raise_with_both_lines(mirrored, state):
    v, _, is_as_before = state

    def step(x):
        v.assign_add(x)
        if x[0] == 3:
            return x
        return context().all_reduce("max", x)

    with mirrored.debug(), pytest.raises(RuntimeError, match="diverged") as caught:
        mirrored.run(step, (ids(mirrored),))
    message = str(caught.value)
    assert "replica 0 has come to pmax of float32[1] at " in message
    assert "test_debug_mode.py" in message
    assert '(return context().all_reduce("max", x))' in message
    assert "replica 3 has come to the end of the function." in message
    assert is_as_before()


def test_an_except_clause_does_not_hide_that_replicas_diverged(mirrored):
    def step(x):
        for _ in range(int(x[0]) % 2 + 1):
            try:
                context().all_reduce("sum", x)
            except Exception:
                pytest.fail("this is nothing to be caught")

    with mirrored.debug(), pytest.raises(RuntimeError, match="diverged"):
        mirrored.run(step, (ids(mirrored),))


def test_replicas_with_values_of_different_shapes_raise(mirrored):
    def step(x):
        return context().all_reduce("sum", jnp.zeros(int(x[0]) // 7 + 1))

    with mirrored.debug(), pytest.raises(RuntimeError, match=r"float32\[1\].*float32\[2\]"):
        mirrored.run(step, (ids(mirrored),))


def test_state_that_differs_raises_with_its_values(mirrored):
    with mirrored.scope():
        v = tpudist.Variable(jnp.zeros((2, 2)), name="table")
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def assign(x):
        v.assign(v.read_value().at[1, 0].add(jnp.maximum(x[0], 4)))

    def change(model, x):
        model.bias[...] = x

    with mirrored.debug():
        with pytest.raises(ValueError, match="Variable 'table' would differ") as caught:
            mirrored.run(assign, (ids(mirrored),))
        assert (
            "replica 0 has 4.0 at [1, 0], and replica 5 has 5.0 (different from replica 0: "
            "replicas 5-7)." in str(caught.value)
        )
        with pytest.raises(ValueError, match="Param 'bias' would differ .* replica 1 has 1.0"):
            mirrored.run(change, (model, ids(mirrored)))
    assert float(v.read_value().sum()) == 0
    assert float(model.bias[0]) == 0


def test_results_that_cannot_be_merged_raise(mirrored):
    x = ids(mirrored)
    with mirrored.debug():
        with pytest.raises(ValueError, match="different structure on replica 1 than on replica 0"):
            mirrored.run(lambda x: [x] * (1 + int(x[0])), (x,))
        with pytest.raises(ValueError, match="gave 'replica 0', and replica 1 gave 'replica 1'"):
            mirrored.run(lambda x: f"replica {int(x[0])}", (x,))
        numbers = mirrored.run(lambda x: float(x[0]), (x,))
    assert [float(x) for x in numbers.values] == list(map(float, range(N)))


def test_programs_that_cannot_run_eagerly_raise_with_their_name(mirrored, state):
    v, model, _ = state
    x = ids(mirrored)

    def captures(x):
        model.bias[...] = x

    with mirrored.debug():
        with pytest.raises(RuntimeError, match="inside a function that jax.jit"):
            jax.jit(lambda y: mirrored.run(lambda y: y, (y,)))(jnp.ones(1))
        with pytest.raises(RuntimeError, match="assigned inside jax.vmap"):
            mirrored.run(lambda x: jax.vmap(lambda y: v.assign(y[None]))(x), (x,))
        with pytest.raises(NameError, match="unbound axis name") as caught:
            mirrored.run(lambda x: jax.lax.psum(x, "replica"), (x,))
        assert "get_replica_context().all_reduce" in caught.value.__notes__[0]
        with pytest.raises(Exception, match="trace level"):
            mirrored.run(captures, (x,))
        with pytest.raises(TypeError, match="merge_call of .* received a Linear"):
            mirrored.run(lambda m: context().merge_call(lambda strategy, m: None, (m,)), (model,))


@pytest.fixture
def ctrl_c():
    """Installs Python's own handler, which a process in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("running", [0, 3])
def test_ctrl_c_ends_the_replica_that_runs(mirrored, state, ctrl_c, running):
    v, _, is_as_before = state
    ended = []

    def step(x):
        try:
            v.assign_add(x)
            if int(x[0]) == running:
                ctrl_c()
                while True:
                    pass
            context().all_reduce("sum", x)
        finally:
            ended.append(int(x[0]))

    with mirrored.debug(), pytest.raises(KeyboardInterrupt):
        mirrored.run(step, (ids(mirrored),))
    assert running in ended
    assert is_as_before()
    assert float(mirrored.run(lambda x: context().all_reduce("sum", x), (ids(mirrored),))[0]) == 28


# Properties.

_UNARY = (jnp.sin, jnp.abs, lambda x: x * 2 - 1, lambda x: x**2)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["sum", "mean", "min", "max", "assign", "own"]), st.integers(0, 3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_sequence_of_collectives_and_assignments_matches_compiled_code(mirrored, steps):
    x = ids(mirrored)

    def program():
        with mirrored.scope():
            v = tpudist.Variable(jnp.ones(1), aggregation=VariableAggregation.MEAN)

        def step(x):
            found = []
            for what, number in steps:
                x = _UNARY[number](x)
                if what == "assign":
                    v.assign_add(x)
                    x = x + v.read_value()
                elif what != "own":
                    x = context().all_reduce(what, x)
                found.append(x)
            return found

        return mirrored.run(step, (x,)), v.read_value()

    run_both_ways(mirrored, program)
