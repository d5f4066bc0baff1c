"""Variables on servers, used by functions that a coordinator schedules on workers."""

import gc
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from tpudist import IndexedSlices
from tpudist.checkpoint import Checkpoint, CheckpointManager
from tpudist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.engine.engine import ActorDied
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.experimental import partitioners
from tpudist.ps.changes import Assignment
from tpudist.ps.closure_state import ServerCopies
from tpudist.ps.server_variable import ServerVariable
from tpudist.ps.sharded_variable import ShardedVariable, embedding_lookup
from tpudist.strategies.parameter_server import ParameterServerStrategy


class Run:
    """A strategy, its coordinator, and what a test needs of them."""

    def __init__(self, seed=None, **options):
        engine = ThreadEngine(seed)
        options = {"num_workers": 2, "num_servers": 2, **options}
        coordinator_options = {
            k: options.pop(k)
            for k in ("closure_timeout_s", "max_staleness", "queue_size")
            if k in options
        }
        self.strategy = ParameterServerStrategy(engine=engine, **options)
        self.coordinator = ClusterCoordinator(self.strategy, **coordinator_options)

    def make(self, value, **options):
        with self.strategy.scope():
            return tpudist.Variable(value, **options)

    def make_optimizer(self, tx):
        with self.strategy.scope():
            return tpudist.Optimizer(tx)

    def call(self, fn, *args):
        return self.coordinator.schedule(fn, args).fetch()


@pytest.fixture
def threads_left():
    """Returns a function that lists the running threads of tpudist that the test has started."""
    before = set(threading.enumerate())  # those of other tests may end at any time

    def threads_left():
        started = set(threading.enumerate()) - before
        return [x.name for x in started if x.name.startswith("tpudist")]

    return threads_left


@pytest.fixture
def start(threads_left):
    runs = []

    def start(**options):
        runs.append(Run(**options))
        return runs[-1]

    yield start
    for run in runs:
        run.coordinator.shutdown()
    assert threads_left() == []


def ones(*shape):
    return np.ones(shape, np.float32)


def slices(values, indices):
    return IndexedSlices(np.asarray(values, np.float32), np.asarray(indices))


# Variables.


def test_a_function_that_donates_a_value_leaves_that_of_the_server(start):
    """A server and a worker in threads of one process would otherwise share the array."""
    run = start(num_workers=1)
    variable = run.make([1.0, 2.0])
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    np.testing.assert_array_equal(run.call(lambda: double(variable.read_value())), [2, 4])
    np.testing.assert_array_equal(variable.read_value(), [1, 2])


def test_variables_go_to_servers_in_turn(start):
    run = start(num_servers=3)
    variables = [run.make(float(i), name=f"v{i}") for i in range(7)]
    assert [v.home.server for v in variables] == [0, 1, 2, 0, 1, 2, 0]
    assert [float(v.read_value()) for v in variables] == list(range(7))
    assert variables[1].device == "/job:ps/replica:0/task:1/device:CPU:0"
    with run.strategy.scope(), run.strategy.extended.colocate_vars_with(variables[2]):
        beside = tpudist.Variable(1.0)
    assert beside.home.server == 2
    assert all(type(v) is ServerVariable for v in [*variables, beside])
    assert run.make(0.0).home.server == 1


def test_outside_of_closures_variables_change_at_once(start):
    run = start()
    v = run.make(jnp.arange(4.0))
    v.assign_add(ones(4))
    v.assign_sub(2 * ones(4))
    v.scatter_update(slices([9], [0]))
    np.testing.assert_array_equal(v.numpy(), [9, 0, 1, 2])
    np.testing.assert_array_equal(v.sparse_read([[3, 0]]), [[2, 9]])
    assert float(v.assign(ones(4)).sum()) == 4
    with pytest.raises(ValueError, match=r"holds float32\[4\], but was assigned"):
        v.assign(ones(3))
    with pytest.raises(ValueError, match="Rows 4 to 4 of variable"):
        v.sparse_read([4])
    with pytest.raises(RuntimeError, match="Pass variable.read_value"):
        jax.jit(lambda: v + 1)()


def test_a_closure_sees_its_own_changes_and_others_see_them_after_it(start):
    run = start(num_workers=1)
    v = run.make(jnp.zeros(3), name="v")

    def work():
        first = v.assign_add(ones(3))
        second = v.scatter_add(slices([10], [1]))
        third = v.assign(v * 2)
        return first, second, third, v.read_value(), v

    first, second, third, read, itself = run.call(work)
    np.testing.assert_array_equal(first, [1, 1, 1])
    np.testing.assert_array_equal(second, [1, 11, 1])
    for x in (third, read, itself, run.call(lambda: v)):
        np.testing.assert_array_equal(x, [2, 22, 2])


def test_what_an_assignment_gives_is_what_its_closure_has_made(start):
    """And not what the variable is when somebody looks at it."""
    run = start(num_workers=1)
    v, w = run.make(1.0), run.make(jnp.zeros(2))
    output = run.coordinator.schedule(lambda: {"v": v.assign_add(1.0), "w": [w.assign(ones(2))]})
    run.coordinator.join()
    v.assign(100.0)
    assert isinstance(output.get()["v"], jax.Array)
    assert output.fetch()["v"] == 2
    np.testing.assert_array_equal(output.get()["w"][0], 1)


def test_a_closure_that_raises_changes_nothing(start):
    run = start()
    v = run.make(jnp.zeros(3))

    def work():
        v.assign_add(ones(3))
        raise KeyError("after the change")

    with pytest.raises(KeyError, match="after the change"):
        run.call(work)
    with pytest.raises(KeyError):
        run.coordinator.join()
    np.testing.assert_array_equal(v.numpy(), 0)


def test_variables_that_are_only_changed_are_not_fetched(start, monkeypatch):
    run = start(num_workers=1)
    v = run.make(jnp.zeros(3))
    run.coordinator.join()
    asked = []
    call = run.strategy.engine.call

    def note(actor, method, *args):
        asked.append(method)
        return call(actor, method, *args)

    monkeypatch.setattr(run.strategy.engine, "call", note)

    def work():
        v.assign_add(ones(3))
        run.strategy.run(lambda: v.assign_add(2 * ones(3)) is None)

    run.call(work)
    assert asked == ["run", "push"]
    np.testing.assert_array_equal(v.numpy(), 3)


def test_unchanged_variables_are_fetched_once(start, monkeypatch):
    run = start(num_workers=1)
    v, w = run.make(jnp.zeros(3)), run.make(jnp.zeros(3))
    fetched, take = [], ServerCopies.take

    def record(copies, values):
        fetched.extend(values.arrays)
        take(copies, values)

    monkeypatch.setattr(ServerCopies, "take", record)

    def work():
        return v + w

    for _ in range(5):
        run.call(work)
    assert len(fetched) == 2
    w.assign_add(ones(3))
    np.testing.assert_array_equal(run.call(work), 1)
    assert len(fetched) == 3


class Session:
    """The session of a worker, and what it asks servers for."""

    def __init__(self, run, monkeypatch):
        self.run, self.asked = run, []
        self.session = run.strategy.make_session_factory()(0)
        call, ask = run.strategy.engine.call, self.asked

        def note(actor, method, *args):
            if actor.role == "ps":
                ask.append(method)
            return call(actor, method, *args)

        monkeypatch.setattr(run.strategy.engine, "call", note)

    def begin(self, number, read_ahead_limit=None):
        servers = self.run.strategy.servers.actors
        return self.session.begin(number, 0, servers, Session.add, read_ahead_limit)

    def add(self, number, variables, read_ahead_limit=None):
        """Returns the values that a closure reads from variables. It adds 1 to each."""
        state = self.begin(number, read_ahead_limit)
        found = [float(state.read(v)) for v in variables]
        for v in variables:
            state.record_change(v.home, Assignment(v.home.number, "add", np.float32(1)))
        self.asked.append(state.finish())
        return found


def test_what_waits_is_read_when_the_closure_before_has_ended(start, monkeypatch):
    run = start(num_servers=1)
    v, w, x = (run.make(i) for i in (0.0, 10.0, 20.0))
    session = Session(run, monkeypatch)
    assert session.add(0, [v, w]) == [0, 10]
    assert session.asked == ["pull", "pull", "push", 0]
    session.asked.clear()
    assert session.add(1, [v, w], read_ahead_limit=4) == [1, 11]
    assert session.asked == ["pull", "push_and_pull", 0]
    session.asked.clear()
    assert session.add(2, [v, w, x]) == [2, 12, 20]
    assert session.asked == ["pull", "push", 0]  # of what nobody had read before
    assert [float(a.numpy()) for a in (v, w, x)] == [3, 13, 21]


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_closure_scheduled_later_sees_earlier_changes(start, monkeypatch, scheduled):
    run = start(num_servers=1)
    v = run.make(0.0)
    session, other = Session(run, monkeypatch), Session(run, monkeypatch)
    session.add(0, [v], read_ahead_limit=4)
    v.assign(50.0)
    assert other.add(1, [v]) == [50]
    session.asked.clear()
    # The last that was scheduled when closure 0 began is closure 3.
    assert session.add(3 if scheduled else 4, [v]) == ([1] if scheduled else [51])
    assert session.asked == (["push", 1] if scheduled else ["pull", "push", 0])
    assert session.add(5, [v]) == [52]  # it is used once


def test_values_of_a_dead_server_are_read_again(start, monkeypatch, tmp_path):
    run = start(num_servers=1, log=tmp_path)
    v = run.make(0.0)
    session = Session(run, monkeypatch)
    session.add(0, [v], read_ahead_limit=4)
    (actor,) = run.strategy.servers.actors
    run.strategy.engine.kill(actor, "for a test")
    run.strategy.servers.replace(ActorDied(actor, "for a test"))
    session.asked.clear()
    assert session.add(1, [v]) == [1]
    assert session.asked == ["pull", "push", 0]


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_nothing_is_read_ahead_where_closures_run_in_turn(start, monkeypatch, max_staleness):
    run = start(max_staleness=max_staleness, num_workers=1, num_servers=1)
    v, gate = run.make(0.0), threading.Event()
    session = Session(run, monkeypatch)
    first = run.coordinator.schedule(gate.wait, (20,))

    def work():
        return v.assign_add(1.0)

    outputs = [run.coordinator.schedule(work) for _ in range(4)]
    gate.set()
    assert first.fetch()
    assert run.coordinator.fetch(outputs) == [1, 2, 3, 4]
    ahead = session.asked.count("push_and_pull")
    assert ahead == (3 if max_staleness is None else 0)
    assert session.asked.count("pull") == (1 if max_staleness is None else 4)


# Replica functions.


@pytest.mark.slow
def test_training_on_one_worker_matches_one_device(start):
    run = start(num_workers=1)
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(8, 3)).astype(np.float32) for _ in range(6)]

    def train(make, optimizer, strategy, call):
        w, b = make(jnp.ones((3, 1)), name="w"), make(jnp.zeros(()), name="b")
        count = make(0, name="count")

        def replica(x):
            def loss(w, b):
                return jnp.mean((x @ w + b - x.sum(1, keepdims=True) * 2) ** 2)

            value, gradients = jax.value_and_grad(loss, (0, 1))(w.read_value(), b.read_value())
            optimizer.apply_gradients(zip(gradients, (w, b), strict=True))
            count.assign_add(1)
            return value

        losses = [call(lambda x=x: strategy.run(replica, args=(x,))) for x in batches]
        return [np.asarray(x) for x in (w, b, count, *losses)]

    adam = optax.adam(0.1)
    servers = train(run.make, run.make_optimizer(adam), run.strategy, run.call)
    one = tpudist.OneDeviceStrategy()
    with one.scope():
        alone = train(tpudist.Variable, tpudist.Optimizer(adam), one, lambda fn: fn())
    for x, y in zip(servers, alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_function_defined_in_the_closure_is_compiled_once(start):
    run = start(num_workers=1)
    v = run.make(jnp.zeros(()))
    traces = []

    @tpudist.function
    def step(x):
        def replica(x):
            traces.append(1)
            v.assign_add(x)

        run.strategy.run(replica, args=(x,))

    for i in range(5):
        run.coordinator.schedule(step, args=(jnp.asarray(float(i)),))
    run.coordinator.join()
    assert v.numpy() == 10
    assert len(traces) <= 2  # one finds out which variables there are


def test_a_function_that_captures_another_constant_is_another_function(start):
    run = start(num_workers=1)

    def sign_of(zero):
        return run.strategy.run(lambda: jnp.copysign(1.0, zero))

    assert [run.call(sign_of, zero) for zero in (0.0, -0.0, 0.0)] == [1, -1, 1]


def test_a_step_sees_its_own_changes(start):
    run = start(num_workers=1)
    v, table = run.make(1.0), run.make(jnp.zeros((4, 2)))

    def replica(x):
        v.assign(v * x)
        v.assign_add(1.0)
        table.scatter_add(IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 3])))
        return v.read_value(), table.read_value(), jax.grad(lambda y: y * v.read_value())(2.0)

    for expected in (3.0, 7.0):
        value, rows, gradient = run.call(lambda: run.strategy.run(replica, args=(2.0,)))
        assert value == v.numpy() == gradient == expected
        np.testing.assert_array_equal(rows, table.numpy())
    np.testing.assert_array_equal(table.numpy()[:, 0], [0, 2, 0, 2])


def test_a_worker_may_have_several_replicas(start):
    devices = [f"cpu:{i}" for i in range(8)]
    run = start(worker_strategy=lambda i: tpudist.MirroredStrategy(devices[4 * i : 4 * i + 4]))
    total = run.make(0.0, aggregation=tpudist.VariableAggregation.SUM)
    w = run.make(jnp.zeros(2))
    optimizer = run.make_optimizer(optax.sgd(1.0))
    assert run.strategy.num_replicas_in_sync == 4

    def replica():
        number = tpudist.get_replica_context().replica_id_in_sync_group
        total.assign_add(number * 1.0)
        optimizer.apply_gradients([(jnp.ones(2) * number, w)])
        return number

    def work():
        numbers = run.strategy.run(replica)
        assert run.strategy.num_replicas_in_sync == 4
        return run.strategy.reduce("sum", numbers, axis=None)

    assert [run.call(work) for _ in range(3)] == [6, 6, 6]
    assert total.numpy() == 18
    np.testing.assert_array_equal(w.numpy(), -18)


def test_a_plain_number_is_not_summed_over_replicas(start):
    run = start(worker_strategy=lambda i: tpudist.MirroredStrategy(["cpu:0", "cpu:1"]))
    v = run.make(0.0, name="v", aggregation=tpudist.VariableAggregation.SUM)
    for assign in (v.assign, v.assign_add):
        with pytest.raises(ValueError, match="'v'"):
            run.call(lambda assign=assign: run.strategy.run(lambda: assign(1.0)))
        with pytest.raises(ValueError, match="'v'"):
            run.coordinator.join()
    assert v.numpy() == 0


def test_values_that_differ_between_replicas_are_refused(start):
    run = start(
        num_workers=1, worker_strategy=lambda i: tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    )
    v = run.make(0, name="v")

    def replica():
        v.assign(tpudist.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(ValueError, match="assign different values to variable 'v'"):
        run.call(lambda: run.strategy.run(replica))
    with pytest.raises(ValueError, match="different values"):
        run.coordinator.join()


REFUSED = {
    "made in a closure": (lambda run, v: run.make(1.0), "was created in a closure"),
    "made in a step": (
        lambda run, v: run.strategy.run(lambda: tpudist.Variable(1.0)),
        "each worker would have its own Variable",
    ),
    "changed in a loop": (
        lambda run, v: run.strategy.run(
            lambda: jax.lax.scan(lambda c, _: (c, v.assign_add(1.0, read_value=False)), 0, None, 2)
        ),
        "changed inside a nested transformation",
    ),
    "read under jit": (lambda run, v: jax.jit(lambda: v + 1)(), "would become a constant of"),
    "read after its optimizer": (
        lambda run, v: (run.optimizer.apply_gradients([(jnp.ones(()), v)]), v.read_value()),
        "read after an optimizer updated it",
    ),
    "another optimizer": (
        lambda run, v: tpudist.Optimizer(optax.sgd(1.0)).apply_gradients([(jnp.ones(()), v)]),
        "made outside of the strategy's scope",
    ),
    "an NNX object": (
        lambda run, v: run.strategy.run(lambda model: model(jnp.ones(2)), args=(run.model,)),
        "received an NNX object, Linear, in a scheduled function",
    ),
    "a variable of no server": (
        lambda run, v: run.elsewhere.assign_add(1.0),
        "'elsewhere' was assigned in a function that a coordinator has scheduled",
    ),
    "a lookup in a step": (
        lambda run, v: run.strategy.run(lambda: embedding_lookup(run.table, [1])),
        "it would fetch the complete variable",
    ),
    "a gradient of another shape": (
        lambda run, v: run.optimizer.apply_gradients([(jnp.ones(3), v)]),
        r"float32\[3\], but the parameter is float32\[\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_request_raises_an_error_that_names_it(start, case):
    run = start(num_workers=1)
    v = run.make(1.0, name="v")
    run.optimizer = run.make_optimizer(optax.sgd(1.0))
    run.table, run.elsewhere = run.make(jnp.ones((3, 2))), tpudist.Variable(1.0, name="elsewhere")
    run.model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    work, message = REFUSED[case]
    with pytest.raises((RuntimeError, ValueError), match=message):
        run.call(work, run, v)
    with pytest.raises((RuntimeError, ValueError), match=message):
        run.coordinator.join()
    assert v.numpy() == run.elsewhere.numpy() == 1


def test_what_a_worker_makes_for_itself_it_may_change(start):
    run = start(num_workers=1)

    def make():
        local = tpudist.Variable(0.0)
        while True:
            yield local

    iterator = iter(run.coordinator.create_per_worker_dataset(make))

    def work(iterator):
        return next(iterator).assign_add(1.0)

    assert [float(run.call(work, iterator)) for _ in range(3)] == [1, 2, 3]


def test_a_constraint_that_raises_leaves_all_as_it_was(start, tmp_path):
    run = start(num_servers=1, log=tmp_path)
    fails = []

    def constrain(x):
        if fails:
            raise OverflowError("too large")
        return jnp.minimum(x, 5.0)

    v = run.make(jnp.zeros(2), constraint=constrain)
    optimizer = run.make_optimizer(optax.sgd(1.0, momentum=0.5))
    plain = optax.sgd(1.0, momentum=0.5)
    value, state = jnp.zeros(2), plain.init(jnp.zeros(2))
    for i in range(4):
        gradient = -jnp.ones(2)
        if i == 2:
            fails.append(1)
            with pytest.raises(OverflowError):
                optimizer.apply_gradients([(gradient, v)])
            fails.clear()
        optimizer.apply_gradients([(gradient, v)])
        updates, state = plain.update(gradient, state)
        value = jnp.minimum(value + updates, 5.0)
        np.testing.assert_allclose(v.numpy(), value, rtol=1e-6)
    run.strategy.engine.kill(run.strategy.servers.actors[0], "for a test")
    np.testing.assert_allclose(v.numpy(), value, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"max_staleness": -1}, {"closure_timeout_s": 0}, {"queue_size": 0}, {"speculate": 1}],
)
def test_wrong_options_of_the_coordinator_are_refused(options):
    strategy = ParameterServerStrategy(num_workers=1)
    with pytest.raises(ValueError, match=next(iter(options))):
        ClusterCoordinator(strategy, **options)
    strategy.shutdown()


def test_an_iterator_is_not_a_dataset_of_several_workers(start):
    with pytest.raises(TypeError, match="which can be read once"):
        start().coordinator.create_per_worker_dataset(iter([1, 2]))


def test_optimizers_that_look_at_several_variables_are_refused(start):
    run = start()
    v, w = run.make(jnp.ones(3), name="v"), run.make(jnp.ones(3), name="w")
    optimizer = run.make_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    with pytest.raises(ValueError, match=re.escape("others ('v', 'w')")):
        optimizer.apply_gradients([(jnp.ones(3), v), (jnp.ones(3), w)])
    optimizer.apply_gradients([(jnp.ones(3), v)])
    np.testing.assert_allclose(v.numpy(), 1 - 1 / np.sqrt(3), rtol=1e-6)


# Variables in parts.


def test_a_partitioner_divides_rows_as_tensorflow_does(start):
    run = start(num_servers=5, variable_partitioner=partitioners.FixedShardsPartitioner(5))
    v = run.make(jnp.arange(26.0).reshape(13, 2), name="v")
    assert isinstance(v, ShardedVariable)
    assert isinstance(v, tpudist.Variable)
    assert [part.shape[0] for part in v] == [3, 3, 3, 2, 2]
    assert [part.home.server for part in v.variables] == [0, 1, 2, 3, 4]
    assert [part.name for part in v][:2] == ["v/part_0", "v/part_1"]
    np.testing.assert_array_equal(v.numpy(), np.arange(26).reshape(13, 2))
    np.testing.assert_array_equal(v[2:4], np.arange(26).reshape(13, 2)[2:4])
    assert type(run.make(0.0)) is ServerVariable
    with run.strategy.scope(), run.strategy.extended.colocate_vars_with(v):
        assert type(tpudist.Variable(jnp.ones(10))) is ServerVariable
    v.variables[1].assign(ones(3, 2) * -1)
    np.testing.assert_array_equal(v.numpy()[3:6], -1)
    v.assign(v * 0)
    v.scatter_add(slices(ones(3, 2), [0, 12, 12]))
    np.testing.assert_array_equal(v.numpy()[:, 0], [1] + [0] * 11 + [2])


def test_lookups_ask_for_the_wanted_rows_only(start, monkeypatch):
    run = start(num_servers=3, variable_partitioner=partitioners.FixedShardsPartitioner(3))
    table = run.make(jnp.arange(40.0).reshape(20, 2), name="table")
    whole = []
    monkeypatch.setattr(ShardedVariable, "_read", lambda self: whole.append(self))
    ids = np.array([[19, 0], [0, 7]])

    def work():
        return embedding_lookup(table, ids), embedding_lookup(table.variables, [3])

    rows, other = run.call(work)
    np.testing.assert_array_equal(rows, np.arange(40).reshape(20, 2)[ids])
    np.testing.assert_array_equal(other, [[6, 7]])
    assert whole == []
    with pytest.raises(TypeError, match="embedding_lookup\\(params=list\\)"):
        embedding_lookup(table.variables[:1], [0])
    with pytest.raises(ValueError, match="Rows 20 to 20"):
        embedding_lookup(table, [20])


def test_gradients_of_rows_change_those_rows_alone(start):
    run = start(num_servers=2, variable_partitioner=partitioners.MinSizePartitioner(8, 2))
    table, bias = run.make(jnp.ones((6, 2)), name="table"), run.make(0.0, name="bias")
    optimizer = run.make_optimizer(optax.adagrad(0.5, initial_accumulator_value=0.0))

    def work(ids):
        rows = embedding_lookup(table, ids)

        def replica(rows):
            gradient = jax.grad(lambda rows: jnp.sum(rows * 3))(rows)
            pairs = [(IndexedSlices(gradient, jnp.asarray(ids)), table), (jnp.ones(()), bias)]
            optimizer.apply_gradients(pairs)

        run.strategy.run(replica, args=(rows,))

    run.call(work, [1, 1, 5])
    np.testing.assert_allclose(table.numpy()[:, 0], [1, 0.5, 1, 1, 1, 0.5], rtol=1e-5)
    run.call(work, [0])
    np.testing.assert_allclose(table.numpy()[:, 0], [0.5, 0.5, 1, 1, 1, 0.5], rtol=1e-5)


def test_other_optimizers_are_refused_for_variables_in_parts(start):
    run = start(variable_partitioner=partitioners.FixedShardsPartitioner(2))
    v = run.make(jnp.ones((4, 2)), name="v")
    optimizer = run.make_optimizer(optax.lamb(0.1))
    with pytest.raises(ValueError, match="variable 'v' depends on its other elements"):
        optimizer.apply_gradients([(jnp.ones((4, 2)), v)])


@pytest.mark.parametrize(
    ("counts", "message"), [([2], "for each of the 2 dims"), ([1, 2], "only along their first dim")]
)
def test_a_partitioner_that_cuts_otherwise_is_refused(start, counts, message):
    run = start(variable_partitioner=lambda shape, dtype: counts)
    with pytest.raises(ValueError, match=message):
        run.make(jnp.ones((4, 2)))


def test_a_checkpoint_is_restored_on_other_servers(start, tmp_path):
    first = start(num_servers=2, variable_partitioner=partitioners.FixedShardsPartitioner(2))
    v, w = first.make(jnp.arange(8.0).reshape(4, 2), name="v"), first.make(3.0, name="w")
    with CheckpointManager(Checkpoint(v=v, w=w), tmp_path) as manager:
        manager.save(1)
    second = start(num_servers=3, variable_partitioner=partitioners.FixedShardsPartitioner(3))
    v2, w2 = second.make(jnp.zeros((4, 2)), name="v"), second.make(0.0, name="w")
    with CheckpointManager(Checkpoint(v=v2, w=w2), tmp_path) as manager:
        manager.restore(1)
    np.testing.assert_array_equal(v2.numpy(), np.arange(8).reshape(4, 2))
    assert w2.numpy() == 3
    with tpudist.OneDeviceStrategy().scope():
        v3, w3 = tpudist.Variable(jnp.zeros((4, 2)), name="v"), tpudist.Variable(0.0, name="w")
    with CheckpointManager(Checkpoint(v=v3, w=w3), tmp_path) as manager:
        manager.restore(1)
    np.testing.assert_array_equal(v3.numpy(), v2.numpy())


# Servers and workers that die.


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [None, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (0, 1, 2))]
)
def test_each_row_is_counted_once_through_deaths(start, tmp_path, seed):
    """Closure i adds 1 to row i of two variables; workers and servers die at any moment."""
    size, num_kills = 200, 20
    run = start(seed=seed, num_workers=3, log=tmp_path)
    engine, chance = run.strategy.engine, np.random.default_rng(seed or 0)
    a, b = run.make(jnp.zeros(size), name="a"), run.make(jnp.zeros(size), name="b")
    w = run.make(jnp.zeros(4), name="w")
    optimizer = run.make_optimizer(optax.adam(0.1))

    def work(row):
        for v in (a, b):
            v.scatter_add(slices([1], [row]))
        optimizer.apply_gradients([(w.read_value() - 1, w)])
        return row

    run.call(work, 0)  # compiled before somebody dies of it

    def kill():
        for _ in range(num_kills):
            engine.concurrency.sleep(0.01 if seed is None else 0.002)
            actors = [*run.strategy.servers.actors, *run.coordinator._dispatcher._actors.values()]
            engine.kill(actors[chance.integers(len(actors))], "for a test")

    killer = engine.concurrency.start("killer", kill)
    outputs = [run.coordinator.schedule(work, (i,)) for i in range(1, size)]
    assert run.coordinator.join(timeout_s=120)
    assert killer.join(60)
    assert run.coordinator.fetch(outputs) == list(range(1, size))
    np.testing.assert_array_equal(a.numpy(), 1)
    np.testing.assert_array_equal(b.numpy(), 1)
    assert run.coordinator.num_finished == size


def test_a_restarted_program_resumes(start, tmp_path):
    def begin():
        run = start(log=tmp_path)
        run.v = run.make(jnp.zeros(40), name="v")
        run.optimizer = run.make_optimizer(optax.sgd(1.0, momentum=0.5))

        def work(row):
            run.optimizer.apply_gradients([(slices([-1], [row]), run.v)])

        run.work = work
        return run

    run = begin()
    for _ in range(17):
        assert run.coordinator.schedule(run.work, (run.coordinator.next_batch(),)) is not None
    run.coordinator.join()
    run.coordinator.shutdown()
    run = begin()
    assert run.coordinator.num_finished == 17
    while (row := run.coordinator.next_batch()) < 40:
        run.coordinator.schedule(run.work, (row,))
    run.coordinator.join()
    np.testing.assert_array_equal(run.v.numpy(), 1)


def test_a_resumed_program_does_not_run_cancelled_functions(start, tmp_path):
    """They do not delay later functions: their numbers count as finished."""

    def begin(**options):
        run = start(seed=0, log=tmp_path, num_workers=1, max_staleness=3, **options)
        run.v = run.make(jnp.zeros(20), name="v")
        return run

    def add(run, row, is_slow=False):
        run.strategy.engine.concurrency.sleep(1.0 if is_slow else 0.0)
        run.v.scatter_add(slices([1], [row]))

    def schedule(run):
        row = run.coordinator.next_batch()
        return run.coordinator.schedule(add, (run, row, row == 3))

    run = begin()
    outputs = [schedule(run) for _ in range(3)]
    run.coordinator.join()
    outputs += [schedule(run) for _ in range(7)]
    assert [x.cancel() for x in outputs[5:7]] == [True, True]
    assert outputs[5].cancel()
    assert outputs[5].done()
    run.strategy.engine.concurrency.sleep(0.5)
    assert not outputs[3].cancel()  # a worker has begun it
    assert not outputs[3].done()
    run.coordinator._records.file.close()  # as if the program were killed
    run.coordinator._records.file._file = None
    run.coordinator.join()
    assert not outputs[3].cancel()
    assert run.coordinator.num_finished == run.coordinator._queue.finished.low == 10
    for get in (outputs[5].get, outputs[6].fetch):
        with pytest.raises(tpudist.errors.CancelledError, match="cancel.. of its RemoteValue"):
            get()
    run.coordinator.shutdown()
    for _ in range(2):
        run = begin()
        assert run.coordinator.num_finished == 3
        run.coordinator._records.file.close()
        run.coordinator._records.file._file = None
        outputs = [None] * 3 + [schedule(run) for _ in range(12)]
        run.coordinator.join()
        expected = np.ones(20)
        expected[[5, 6, *range(15, 20)]] = 0
        np.testing.assert_array_equal(run.v.numpy(), expected)
        assert run.coordinator.num_finished == 15
        assert outputs[6].cancel()
        with pytest.raises(tpudist.errors.CancelledError, match="an earlier program with this log"):
            outputs[6].fetch()
        run.coordinator.shutdown()


def test_without_a_log_the_death_of_a_server_is_the_end(start):
    run = start()
    v = run.make(0.0)
    run.call(lambda: v + 1)
    run.strategy.engine.kill(run.strategy.servers.actors[0], "for a test")
    output = run.coordinator.schedule(lambda: v.assign_add(1.0))
    with pytest.raises(tpudist.errors.UnavailableError, match="ps 0 has died: for a test"):
        run.coordinator.join()
    with pytest.raises(tpudist.errors.UnavailableError, match="log=FOLDER"):
        output.fetch()
    with pytest.raises(tpudist.errors.UnavailableError):
        run.coordinator.schedule(lambda: v + 1).get()
    with pytest.raises(tpudist.errors.UnavailableError):
        run.coordinator.schedule(lambda: v + 1)
    with pytest.raises(tpudist.errors.UnavailableError):
        v.read_value()


def test_a_closure_that_ends_its_servers_is_given_up(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tpudist.coordinator.dispatcher.MAX_RETRIES", 3)
    run = start(log=tmp_path)
    v, servers = run.make(0.0), run.strategy.servers

    def work():
        run.strategy.engine.kill(servers.actors[0], "it has no memory left")
        v.assign_add(1.0, read_value=False)

    output = run.coordinator.schedule(work)
    with pytest.raises(tpudist.errors.CancelledError, match="a ps was lost 4 times"):
        run.coordinator.join()
    with pytest.raises(tpudist.errors.CancelledError, match="it has no memory left"):
        output.fetch()
    assert run.call(lambda: v + 1) == 1


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_several_threads_may_schedule_one_after_the_other(start, seed):
    """Their closures have the order of their numbers; else each would wait for another one."""
    run = start(seed=seed, max_staleness=0, queue_size=1)
    v = run.make(0)

    def schedule():
        for _ in range(10):
            run.coordinator.schedule(lambda: v.assign(v + 1, read_value=False))

    concurrency = run.strategy.engine.concurrency
    threads = [concurrency.start(f"scheduler {i}", schedule) for i in range(4)]
    assert all(thread.join(30) for thread in threads)
    assert run.coordinator.join(timeout_s=30)
    assert v.numpy() == 40


def test_staleness_is_counted_and_bounded(start):
    run = start(num_workers=4, max_staleness=0)
    v = run.make(0.0)
    for i in range(12):
        run.coordinator.schedule(lambda i=i: v.assign(v * 2 + i))
    run.coordinator.join()
    expected = 0
    for i in range(12):
        expected = expected * 2 + i
    assert v.numpy() == expected
    assert run.coordinator.staleness == {0: 12}


# Arguments, and threads that remain.


def cluster(**jobs):
    return SimpleClusterResolver(ClusterSpec(jobs))


LOCAL = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
WRONG = {
    "nothing": (lambda: ParameterServerStrategy(), "num_workers=None"),
    "no servers": (lambda: ParameterServerStrategy(num_workers=1, num_servers=0), "num_servers=0"),
    "empty": (lambda: ParameterServerStrategy(cluster()), "must be non-empty"),
    "no ps": (lambda: ParameterServerStrategy(cluster(worker=["localhost:1"])), "no task of 'ps'"),
    "no worker": (lambda: ParameterServerStrategy(cluster(ps=["localhost:1"])), "no task of 'wo"),
    "both": (lambda: ParameterServerStrategy(cluster(**LOCAL), num_workers=1), "Pass one of them"),
    "other hosts": (
        lambda: ParameterServerStrategy(cluster(**{**LOCAL, "ps": ["10.0.0.9:1"]})),
        "ps 0 at 10.0.0.9:1, on another host",
    ),
    "a worker": (
        lambda: ParameterServerStrategy(
            SimpleClusterResolver(ClusterSpec(LOCAL), task_type="worker", task_id=1)
        ),
        "made by worker 1",
    ),
    "no time": (
        lambda: ParameterServerStrategy(num_workers=1, server_timeout_s=0),
        "server_timeout_s must be more than 0 seconds",
    ),
    "an engine by name": (
        lambda: ParameterServerStrategy(num_workers=1, engine="mpi"),
        "engine='mpi'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(threads_left, case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()
    assert threads_left() == []


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match=r"cluster_resolver must be a .* got str"):
        ParameterServerStrategy("localhost")
    with pytest.raises(TypeError, match="variable_partitioner=3\\): it must not be of type int"):
        ParameterServerStrategy(num_workers=1, variable_partitioner=3)


def test_as_many_as_the_cluster_has():
    strategy = ParameterServerStrategy(cluster(**LOCAL))
    assert repr(strategy) == "ParameterServerStrategy(2 worker(s), 1 server(s))"
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 2
    assert strategy.num_replicas_in_sync == 1
    strategy.shutdown()
    strategy.shutdown()


def test_what_belongs_in_closures_is_refused_outside(start):
    run = start()
    with pytest.raises(
        RuntimeError,
        match="run of ParameterServerStrategy.* was called outside of a scheduled function",
    ):
        run.strategy.run(lambda: 1)
    with pytest.raises(RuntimeError, match="reduce of"):
        run.strategy.reduce("sum", 1, axis=None)
    with pytest.raises(ValueError, match="outside of its workers"):
        iter(run.strategy.experimental_distribute_dataset([1]))


@pytest.mark.parametrize("has_log", [False, True])
def test_a_coordinator_that_replaces_a_deleted_one_has_effect(start, has_log, tmp_path):
    """It numbered its functions like the deleted one, and servers ignored them as finished."""
    run = start(log=tmp_path if has_log else None)
    v = run.make(0.0)
    for expected in (1, 2, 3):
        run.coordinator = None
        gc.collect()
        run.coordinator = ClusterCoordinator(run.strategy)
        run.call(v.assign_add, 1.0)
        assert v.numpy() == expected
        assert run.coordinator.num_finished == expected
    assert run.coordinator.next_batch() == 2


def test_numbers_are_fetched_as_numpy_has_them(start):
    found = start().call(lambda: (jnp.float32(1.5), jnp.arange(2)))
    assert (type(found[0]), type(found[1])) == (np.float32, np.ndarray)


def test_nothing_is_left_when_it_is_forgotten(threads_left):
    run = Run()
    v = run.make(0.0)
    run.coordinator.schedule(v.assign_add, (1.0,))
    run.coordinator.join()
    assert v.numpy() == 1
    assert threads_left() != []
    del run, v
    for _ in range(100):  # the last reference may be in a worker that is ending
        gc.collect()
        if not threads_left():
            return
        time.sleep(0.1)
    raise AssertionError(threads_left())
