"""Optimizers and tables of servers in checkpoints: on other servers, and in other strategies."""

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import tpudist
from tpudist import IndexedSlices
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.experimental import partitioners
from tpudist.ps.embedding_table import Table
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad
from tpudist.strategies.parameter_server import ParameterServerStrategy

ADAM = optax.adam(0.1)
CHAIN = optax.chain(optax.adagrad(0.5), optax.trace(0.9))


@pytest.fixture
def start():
    coordinators = []

    def start(num_servers=2, num_parts=1, **options):
        strategy = ParameterServerStrategy(
            num_workers=1,
            num_servers=num_servers,
            variable_partitioner=partitioners.FixedShardsPartitioner(num_parts),
            **options,
        )
        coordinators.append(ClusterCoordinator(strategy))
        return strategy

    yield start
    for coordinator in coordinators:
        coordinator.shutdown()


class Model:
    """Two Variables, of which one may be in parts, and an optimizer of both."""

    def __init__(self, strategy, tx=ADAM):
        with strategy.scope():
            self.v = tpudist.Variable(jnp.arange(14.0).reshape(7, 2), name="v")
            self.w = tpudist.Variable(jnp.ones(()), name="w")
            self.optimizer = tpudist.Optimizer(tx)
        self.strategy = strategy

    def build(self):
        self.optimizer.build([self.v, self.w])
        return self

    def train(self, *, of_rows):
        """An update of all rows; or of the fourth and the last alone, and of the fourth twice."""
        whole = jnp.asarray(np.sin(np.arange(14.0)), jnp.float32).reshape(7, 2)
        gradient = IndexedSlices(whole[:3], jnp.array([3, 6, 3])) if of_rows else whole
        self.optimizer.apply_gradients([(gradient, self.v), (jnp.ones(()), self.w)])

    def values(self):
        return np.append(self.v.numpy(), self.w.numpy())

    def objects(self):
        return Checkpoint(v=self.v, w=self.w, optimizer=self.optimizer)

    def save(self, folder):
        with CheckpointManager(self.objects(), folder) as manager:
            manager.save(1)

    def restore(self, folder):
        CheckpointManager(self.objects(), folder).restore()


@pytest.mark.slow
@pytest.mark.parametrize(("tx", "of_rows"), [(ADAM, True), (CHAIN, False)], ids=["adam", "chain"])
def test_an_optimizer_resumes_with_other_servers_and_parts(start, tmp_path, tx, of_rows):
    first = Model(start(2, 3), tx)
    for _ in range(3):
        first.train(of_rows=of_rows)
    first.save(tmp_path / "0")
    first.train(of_rows=of_rows)
    for i, (num_servers, num_parts) in enumerate([(3, 2), (2, 5)]):
        other = Model(start(num_servers, num_parts), tx).build()
        other.restore(tmp_path / str(i))
        other.save(tmp_path / str(i + 1))  # and on from there
        other.train(of_rows=of_rows)
        np.testing.assert_allclose(other.values(), first.values(), rtol=1e-6)


@pytest.mark.slow
def test_an_optimizer_goes_to_strategies_in_step_and_back(start, tmp_path):
    def run(model):
        if model.strategy.servers is not None:
            return model.train(of_rows=False)
        with model.strategy.scope():
            return model.train(of_rows=False)

    first = Model(start(2, 3))
    run(first)
    first.save(tmp_path / "servers")
    step = Model(tpudist.MirroredStrategy()).build()
    step.restore(tmp_path / "servers")
    step.save(tmp_path / "mirrored")
    for model in (first, step):
        run(model)
    np.testing.assert_allclose(step.values(), first.values(), rtol=1e-6)
    back = Model(start(3, 2)).build()
    back.restore(tmp_path / "mirrored")
    run(back)
    np.testing.assert_allclose(back.values(), first.values(), rtol=1e-6)


@pytest.mark.slow
def test_an_optimizer_that_was_not_used_is_saved_as_it_begins(start, tmp_path):
    Model(start()).save(tmp_path / "nothing")  # for no Variables, as in strategies in step
    Model(start()).restore(tmp_path / "nothing")
    Model(start()).build().save(tmp_path / "new")
    other = Model(start(3, 2))
    other.train(of_rows=False)
    other.restore(tmp_path / "new")
    fresh = Model(start())
    for model in (other, fresh):
        model.train(of_rows=False)
    np.testing.assert_allclose(other.values(), fresh.values(), rtol=1e-6)
    with pytest.raises(CheckpointError, match="not in the objects: optimizer.slots.0.count int32"):
        Model(start()).restore(tmp_path / "new")


@pytest.mark.slow
def test_a_part_of_the_state_may_be_restored(start, tmp_path):
    first = Model(start(2, 3))
    first.train(of_rows=False)
    first.save(tmp_path)
    other = Model(start(1, 2)).build()
    other.train(of_rows=False)
    other.train(of_rows=False)
    CheckpointManager(other.objects(), tmp_path).restore(only="optimizer.slots.0.count")
    with CheckpointManager(other.objects(), tmp_path / "other") as manager:
        manager.save(1)
    again = Model(tpudist.OneDeviceStrategy()).build()
    CheckpointManager(again.objects(), tmp_path / "other").restore()
    state = again.optimizer.slots.state()
    assert state[0].count.numpy() == 1
    assert not np.array_equal(state[0].mu["0000 v"].numpy(), 0.1 * np.sin(np.arange(14.0)))


def test_state_that_was_restored_outlives_its_server(start, tmp_path):
    first = Model(start(2, 3))
    first.train(of_rows=False)
    first.save(tmp_path / "saved")
    other = Model(start(2, 2, log=tmp_path / "log")).build()
    other.restore(tmp_path / "saved")
    for actor in other.strategy.servers.actors:
        other.strategy.engine.kill(actor, "for a test")
    for model in (first, other):
        model.train(of_rows=False)
    np.testing.assert_allclose(other.values(), first.values(), rtol=1e-6)


def test_a_checkpoint_during_functions_raises_an_error(start, tmp_path):
    model, may_end, begun = Model(start()).build(), threading.Event(), threading.Event()
    with model.strategy.scope():
        table = Table(2, optax.sgd(1.0), name="users")
    coordinator = ClusterCoordinator(model.strategy)

    def work():
        begun.set()
        may_end.wait(30)

    coordinator.schedule(work)
    assert begun.wait(30)
    assert coordinator.num_unfinished == 1
    for x in (model.optimizer, table):
        with pytest.raises(RuntimeError, match=r"1 function\(s\) .* Call coordinator.join\(\)"):
            CheckpointManager(Checkpoint(x=x), tmp_path).save(1)
    may_end.set()
    coordinator.join()
    with CheckpointManager(Checkpoint(x=table), tmp_path) as manager:
        manager.save(1)
        output = coordinator.schedule(manager.save, (2,))
        with pytest.raises(RuntimeError, match="outside of scheduled functions"):
            output.get()
        with pytest.raises(RuntimeError):
            coordinator.join()


def test_an_optimizer_of_other_variables_is_refused(start, tmp_path):
    model = Model(start())
    model.train(of_rows=False)
    model.optimizer.build([model.v])
    with pytest.raises(ValueError, match=r"for the Variables \['0000 v'\].* Pass optimizer.build"):
        model.save(tmp_path)
    model.optimizer.slots.on_servers = []  # as where workers are other processes
    with pytest.raises(RuntimeError, match=r"Call optimizer.build\(variables\) first"):
        model.save(tmp_path)


def test_state_that_has_no_place_in_a_checkpoint_is_refused(start, tmp_path):
    noise = Model(start(), optax.add_noise(0.1, 0.5, 0)).build()
    with pytest.raises(ValueError, match=r"rng_key in it is a random key"):
        noise.save(tmp_path)
    by_name = optax.GradientTransformation(
        lambda tree: {"w" if k.endswith("w") else "other": jnp.zeros(()) for k in tree},
        lambda g, s, p=None: (g, s),
    )
    with pytest.raises(ValueError, match=r"\['w'\]\"\] in one place, .* reads the names"):
        Model(start(1), by_name).build().save(tmp_path)
    sums = optax.GradientTransformation(
        lambda tree: {k: jnp.zeros(x.size) for k, x in tree.items()}, lambda g, s, p=None: (g, s)
    )
    parts = Model(start(2, 2), sums).build()
    with pytest.raises(
        ValueError, match=r"shapes \[\(8,\), \(6,\)\] for parts .* \(14,\) for the complete"
    ):
        parts.save(tmp_path)
    apart = Model(start(2, 2)).build()
    second = apart.v.variables[1].home
    assert (second.server, apart.w.home.server) == (1, 0)
    apart.strategy.servers.restore_optimizer(1, 0, (second.number,), {0: np.array(7, np.int32)})
    with pytest.raises(ValueError, match=r"for \[0\].count, server 0 has 0, but server 1 has 7"):
        apart.save(tmp_path)


# Tables.


def make(strategy, optimizer, **options):
    with strategy.scope():
        return Table(3, optimizer, **options)


def save(table, folder):
    with CheckpointManager(Checkpoint(table=table), folder) as manager:
        manager.save(1)


def assert_same(found, expected):
    assert list(found) == list(expected)
    orders = [np.argsort(state["ids"]) for state in (found, expected)]
    for name in found:
        ours, theirs = (
            x[name] if name == "clock" else x[name][order]
            for x, order in zip((found, expected), orders, strict=True)
        )
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


IDS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40)


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(IDS, max_size=3), st.sampled_from([optax.adam(0.1), rowwise_adagrad(0.1)]))
def test_a_table_is_saved_from_8_servers_to_5_and_back_and_loses_nothing(
    start, tmp_path_factory, batches, optimizer
):
    folder = tmp_path_factory.mktemp("table")
    table = make(start(8), optimizer)
    for i, ids in enumerate(batches):
        table.apply_gradients(np.array(ids, np.int64), np.full((len(ids), 3), i + 1.0))
        table.lookup(np.array(ids[::2], np.int64))
    expected = table.state()
    for num_servers in (5, 8):
        save(table, folder / str(num_servers))
        table = make(start(num_servers), optimizer)
        table.lookup(np.array([5, 6, 7]))  # which go
        CheckpointManager(Checkpoint(table=table), folder / str(num_servers)).restore()
        assert_same(table.state(), expected)


@pytest.mark.slow
def test_a_table_of_another_kind_is_refused_and_stays(start, tmp_path):
    table = make(start(2), optax.adam(0.1))
    table.apply_gradients(np.arange(4), np.ones((4, 3)))
    save(table, tmp_path)
    strategy = start(3)
    with strategy.scope():
        wide = Table(4, optax.adam(0.1))
    wide.lookup([1])
    with pytest.raises(
        CheckpointError, match=r"table.rows is float32\[4,4\] in the objects, float32"
    ):
        CheckpointManager(Checkpoint(table=wide), tmp_path).restore()
    other = make(strategy, optax.sgd(0.1))
    with pytest.raises(CheckpointError, match="not in the objects: table.slots.0.mu float32"):
        CheckpointManager(Checkpoint(table=other), tmp_path).restore()
    assert (len(wide), len(other)) == (1, 0)
