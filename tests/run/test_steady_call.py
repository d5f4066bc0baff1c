"""The straight path of calls that look alike: what it costs, and what it must notice."""

import collections
import gc
import signal
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.goodput import goodput
from tpudist.run.steady import steady_call

# A call of a function with ten per-replica arguments enters at most this many Python functions.
MOST_FUNCTIONS = 12


@pytest.fixture
def strategy():
    return tpudist.MirroredStrategy()


@pytest.fixture
def outcomes(monkeypatch):
    """Counts calls that were and that were not steady."""
    counts = collections.Counter()
    make = steady_call.make

    def make_counted(*args):
        steady = make(*args)

        def count(*own):
            result = steady(*own)
            counts["differs" if result is steady_call.NOT_STEADY else "steady"] += 1
            return result

        return count

    monkeypatch.setattr(steady_call, "make", make_counted)
    return counts


def per_replica(strategy, value=0.0):
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full((2, 3), value + context.replica_id_in_sync_group)
    )


def total(*values):
    return tpudist.get_replica_context().all_reduce("sum", sum(x.sum() for x in values))


def count_functions(call):
    for _ in range(4):
        jax.block_until_ready(call())
    names = []

    def count(frame, event, _):
        # Python 3.11 calls a comprehension like a function; 3.12 inlines it.
        if event == "call" and not frame.f_code.co_name.endswith("comp>"):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without `call` itself


@pytest.mark.parametrize("in_scope", [False, True])
def test_a_steady_call_enters_few_python_functions(strategy, in_scope):
    values = tuple(per_replica(strategy, i) for i in range(10))

    def step(*args):
        return sum(x.sum() for x in args)

    if in_scope:
        with strategy.scope():
            names = count_functions(lambda: strategy.run(step, args=values))
    else:
        names = count_functions(lambda: strategy.run(step, args=values))
    assert len(names) <= MOST_FUNCTIONS, names


def test_the_number_of_python_functions_does_not_grow_with_the_state(strategy):
    def calls(number):
        with strategy.scope():
            variables = [tpudist.Variable(jnp.zeros(3)) for _ in range(number)]

        def step():
            for variable in variables:
                variable.assign_add(jnp.ones(3))

        return len(count_functions(lambda: strategy.run(step)))

    assert calls(20) == calls(2)


def test_steady_calls_compute_what_the_first_calls_compute(strategy, outcomes):
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = tpudist.Optimizer(optax.sgd(0.01), model)
        counter = tpudist.Variable(0)

    def step(model, optimizer, batch, scale, flag):
        def loss(model):
            return (model(batch) ** 2).mean() * scale * (2 if flag else 1)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        counter.assign_add(1)
        return {"loss": value, "model": model, "flag": flag}

    results = []
    for i in range(6):
        args = model, optimizer, per_replica(strategy, i), 0.5, True
        results.append(strategy.run(step, args=args))
        assert results[-1]["model"] is model
        assert results[-1]["flag"] is True
    assert int(counter.numpy()) == 6
    assert outcomes["steady"] == 4

    # The same steps without steady calls.
    steady, kernel = results, model.kernel.get_value()
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = tpudist.Optimizer(optax.sgd(0.01), model)
    for i in range(6):
        strategy._replicator.steady_calls.clear()
        args = model, optimizer, per_replica(strategy, i), 0.5, True
        checked = strategy.run(step, args=args)["loss"]
        parts = map(strategy.experimental_local_results, (checked, steady[i]["loss"]))
        for x, y in zip(*parts, strict=True):
            np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(kernel, model.kernel.get_value())


def on_device_3(strategy):
    return jax.device_put(jnp.ones((2, 3)), jax.devices()[3])


# Calls that differ from `run(step, args=(x,))` in one way each: arguments and options.
DIFFERENT = {
    "another number of arguments": lambda s, x: ((x, x), None),
    "another shape": lambda s, x: ((s.run(lambda x: x[:1], (x,)),), None),
    "another dtype": lambda s, x: ((s.run(lambda x: x.astype(jnp.int32), (x,)),), None),
    "an array that replicas share": lambda s, x: ((jnp.ones((2, 3)),), None),
    "an array on another device": lambda s, x: ((on_device_3(s),), None),
    "a NumPy array": lambda s, x: ((np.ones((2, 3), np.float32),), None),
    "a number": lambda s, x: ((2.5,), None),
    "a container": lambda s, x: (({"x": x},), None),
    "options": lambda s, x: ((x,), tpudist.RunOptions(donate_state=False)),
}


@pytest.mark.parametrize("build", DIFFERENT.values(), ids=DIFFERENT)
def test_a_call_that_differs_computes_what_a_new_function_computes(strategy, build):
    def step(*args):
        return sum(x.sum() for x in jax.tree.leaves(args))

    def new_step(*args):
        return step(*args)

    def run(fn, *args):
        return np.stack(strategy.experimental_local_results(strategy.run(fn, *args)))

    x = per_replica(strategy)
    args, options = build(strategy, x)
    for _ in range(4):
        before = run(step, (x,))
    for _ in range(4):
        expected = run(new_step, args, None, options)
        np.testing.assert_array_equal(run(step, args, None, options), expected)
        np.testing.assert_array_equal(run(step, (x,)), before)


def test_a_partial_batch_after_full_ones_has_its_real_rows(strategy):
    batches = np.split(np.arange(20, dtype=np.float32), [8, 16])
    dataset = strategy.experimental_distribute_dataset(batches)

    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    for _ in range(2):
        assert [float(strategy.run(step, args=(x,))) for x in dataset] == [28.0, 92.0, 70.0]


def test_values_that_the_program_contains_are_noticed(strategy):
    class Model:
        scale = 1.0

    model = Model()

    def step(x, flag):
        return total(x) * model.scale * (2 if flag else 1)

    x = per_replica(strategy)
    one = float(strategy.run(step, args=(x, False)))
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0):
        model.scale = scale
        for flag in (False, True, True, True, False, False, False):
            assert strategy.run(step, args=(x, flag)) == one * scale * (2 if flag else 1)


def test_no_steady_call_is_tried_if_calls_take_turns(strategy, outcomes):
    def step(x, flag):
        return total(x) if flag else -total(x)

    x = per_replica(strategy)
    for i in range(12):
        strategy.run(step, args=(x, i % 2 == 0))
    assert outcomes["steady"] + outcomes["differs"] <= 1
    for _ in range(6):
        strategy.run(step, args=(x, True))
    assert outcomes["steady"] == 4


@pytest.mark.parametrize("shape", [(), (3,)])
def test_variables_with_equal_values_are_different_arguments(strategy, shape):
    with strategy.scope():
        variables = [tpudist.Variable(jnp.zeros(shape)) for _ in range(2)]

    def step(variable):
        variable.assign_add(jnp.ones(shape))

    for variable in variables:
        variables[0].assign(jnp.zeros(shape))
        for _ in range(4):
            strategy.run(step, args=(variable,))
        np.testing.assert_array_equal(variable.numpy(), np.full(shape, 4.0))


def test_settings_and_contexts_are_noticed(strategy):
    def step(x):
        calls.append(0)
        return 1 / total(x)

    calls = []
    x = per_replica(strategy)
    zero = strategy.run(lambda x: 0 * x, args=(x,))
    for _ in range(4):
        strategy.run(step, args=(x,))
    traced = len(calls)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="infinity"):
        strategy.run(step, args=(zero,))
    with jax.disable_jit():
        strategy.run(step, args=(x,))
    assert len(calls) > traced
    with tpudist.OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(step, args=(x,))
    assert np.isinf(strategy.run(step, args=(zero,)))


def test_a_strategy_with_a_context_of_its_own_enters_it_in_each_call():
    class Strategy(tpudist.MirroredStrategy):
        entered = 0

        def around_run(self):
            Strategy.entered += 1
            return super().around_run()

    strategy = Strategy()
    x = per_replica(strategy)
    before = Strategy.entered
    for _ in range(5):
        strategy.run(total, args=(x,))
    assert Strategy.entered == before + 5


def test_a_signal_waits_until_the_mesh_is_what_it_was(strategy, monkeypatch):
    with strategy.scope():
        variable = tpudist.Variable(0)

    def step():
        variable.assign_add(1)

    for _ in range(4):
        strategy.run(step)
    meshes = []
    monkeypatch.setattr(goodput, "recorder", object())
    monkeypatch.setattr(goodput, "begin_call", lambda: signal.raise_signal(signal.SIGUSR1))
    handler = signal.signal(
        signal.SIGUSR1, lambda *_: meshes.append(jax.sharding.get_abstract_mesh())
    )
    try:
        strategy.run(step)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert [mesh.empty for mesh in meshes] == [True]


def test_arrays_that_a_user_has_read_or_shares_stay_readable(strategy):
    options = tpudist.RunOptions(donate_argnums=(0,))
    with strategy.scope():
        variable = tpudist.Variable(jnp.zeros(3))

    def step(state, x):
        variable.assign_add(jnp.ones(3))
        return [y + x for y in state]

    one = strategy.run(lambda: jnp.ones(3))
    state = [one + 0, one + 0]
    for _ in range(4):
        state = strategy.run(step, args=(state, one), options=options)
    read = variable.read_value()
    shared = strategy.run(step, args=([one, one], one), options=options)
    np.testing.assert_array_equal(read, 4 * np.ones(3))
    np.testing.assert_array_equal(one, np.ones(3))
    np.testing.assert_array_equal(shared, 2 * np.ones((2, 3)))


def test_a_new_shape_may_read_and_assign_more_variables(strategy):
    with strategy.scope():
        variables = [tpudist.Variable(0.0) for _ in range(3)]

    def step(x):
        for variable in variables[: x.size]:
            variable.assign_add(1.0)
        return variables[0].read_value()

    def run(size):
        return strategy.run(step, args=(arrays[size],))

    arrays = {size: strategy.run(lambda size=size: jnp.ones(size)) for size in (1, 2, 3)}
    for _ in range(4):
        run(1)
    assert [run(size) for size in (2, 1, 2, 3, 3, 1)] == [5, 6, 7, 8, 9, 10]
    batches = [arrays[3], arrays[3]]
    assert strategy.run_steps(step, iter(batches), 2) == [11, 12]
    assert [float(variable.numpy()) for variable in variables] == [12, 6, 4]


def test_an_error_of_a_new_shape_is_the_function_s_own(strategy):
    def step(x):
        if x.shape[0] == 1:
            raise ValueError("no single rows")
        return total(x)

    x = per_replica(strategy)
    row = strategy.run(lambda x: x[:1], args=(x,))
    for _ in range(4):
        before = strategy.run(step, args=(x,))
    for _ in range(2):
        with pytest.raises(ValueError, match="no single rows"):
            strategy.run(step, args=(row,))
        np.testing.assert_array_equal(strategy.run(step, args=(x,)), before)


def test_nothing_keeps_functions_objects_or_arrays_alive(strategy):
    class Trainer:
        def __init__(self):
            self.weights = per_replica(strategy)

        def step(self, x):
            return total(x)

    trainer = Trainer()
    for _ in range(4):
        strategy.run(trainer.step, args=(trainer.weights,))
    assert len(strategy._replicator.steady_calls) == 1
    references = weakref.ref(trainer), weakref.ref(trainer.weights.array)
    del trainer
    gc.collect()
    strategy.run(lambda: jnp.zeros(()))  # the throttle keeps results of the last steps
    assert [reference() for reference in references] == [None, None]
    assert not strategy._replicator.steady_calls


def test_a_method_that_is_replaced_is_called(strategy):
    class Trainer:
        def step(self, x):
            return total(x)

    trainer, x = Trainer(), per_replica(strategy)
    for factor in range(2, 8):
        for _ in range(3):
            strategy.run(trainer.step, args=(x,))

        def step(self, x, factor=factor):
            return factor * total(x)

        Trainer.step = step
        gc.collect()
        assert strategy.run(trainer.step, args=(x,)) == factor * strategy.run(total, args=(x,))


def test_many_steps_at_once_are_steady(strategy, outcomes):
    with strategy.scope():
        variable = tpudist.Variable(0.0)

    def step(scale, batch):
        variable.assign_add(scale * total(batch["x"]))
        return variable.read_value()

    def run(batches, scale=1.0):
        return strategy.run_steps(step, iter(batches), len(batches), args=(scale,))

    batches = [{"x": per_replica(strategy, i)} for i in range(4)]
    sums = np.cumsum([float(strategy.run(total, args=(batch["x"],))) for batch in batches])
    outcomes.clear()
    for turn in range(5):
        np.testing.assert_allclose(run(batches), turn * sums[-1] + sums)
    assert outcomes["steady"] == 4
    # Elements that differ from each other run one by one.
    row = {"x": strategy.run(lambda x: x[:1], args=(batches[0]["x"],))}
    before = float(variable.numpy())
    results = run([*batches[:3], row])
    np.testing.assert_allclose(results[:3], before + sums[:3])
    assert len(results) == 4
    variable.assign(0.0)
    np.testing.assert_allclose(run(batches, 2.0), 2 * sums)


def test_batches_of_many_steps_keep_their_dtypes(strategy):
    def step(x):
        return x // 2

    def run(*batches):
        return strategy.run_steps(step, iter(batches), len(batches))

    floats = [strategy.run(lambda: jnp.ones(3)) for _ in range(2)]
    integers = strategy.run(lambda: jnp.ones(3, jnp.int32))
    for _ in range(4):
        run(*floats)
    assert [x.dtype for x in run(floats[0], integers)] == [jnp.float32, jnp.int32]


def test_a_deleted_batch_of_many_steps_is_named(strategy):
    batches = [{"x": strategy.run(lambda: jnp.ones(3))} for _ in range(2)]

    def step(batch):
        return batch["x"].sum()

    for _ in range(4):
        strategy.run_steps(step, iter(batches), 2)
    batches[0]["x"].delete()
    with pytest.raises(RuntimeError, match=r"argument 'batch\['x'\]'"):
        strategy.run_steps(step, iter(batches), 2)
