"""Table: rows by id on the servers of a strategy, which closures look up and change."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.ps.embedding_table import Table
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad
from tpudist.strategies.parameter_server import ParameterServerStrategy

IDS = np.array([[-5, 1 << 62], [0, -5], [7, 1 << 40]])


@pytest.fixture
def start():
    coordinators = []

    def start(num_servers=3, num_workers=2, seed=None, **options):
        strategy = ParameterServerStrategy(
            num_workers=num_workers, num_servers=num_servers, engine=ThreadEngine(seed), **options
        )
        coordinators.append(ClusterCoordinator(strategy))
        return strategy, coordinators[-1]

    yield start
    for coordinator in coordinators:
        coordinator.shutdown()


def make(strategy, dim=4, optimizer=None, **options):
    with strategy.scope():
        return Table(dim, optimizer or optax.sgd(0.5), **options)


def test_rows_do_not_depend_on_the_number_of_servers(start):
    rows = []
    for num_servers in (1, 3, 8):
        strategy, coordinator = start(num_servers)
        table = make(strategy, seed=3)
        rows.append(coordinator.schedule(table.lookup, (IDS,)).fetch())
        assert len(table) == 5
        np.testing.assert_array_equal(table.lookup(IDS), rows[-1])
        assert table.lookup(np.array([99]), create=False).shape == (1, 4)
        assert len(table) == 5
    assert rows[0].shape == (3, 2, 4)
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(rows[0][0, 0], rows[0][1, 1])


def test_gradients_of_one_id_are_summed_and_other_rows_stay(start):
    strategy, coordinator = start()
    table = make(strategy)
    before = np.asarray(table.lookup(IDS))

    def work():
        rows = table.lookup(IDS)
        gradient = strategy.run(lambda rows: jnp.ones_like(rows), args=(rows,))
        table.apply_gradients(IDS, gradient)

    coordinator.schedule(work)
    coordinator.join()
    expected = before - 0.5
    expected[0, 0] = expected[1, 1] = before[0, 0] - 1.0
    np.testing.assert_allclose(table.lookup(IDS), expected, rtol=1e-6)


def test_a_closure_cannot_look_up_rows_that_it_changed(start):
    strategy, coordinator = start()
    table = make(strategy, name="users")

    def work():
        table.assign([1, 2], np.ones((2, 4), np.float32))
        return table.lookup([1])

    with pytest.raises(RuntimeError, match="table 'users' were looked up after the same closure"):
        coordinator.schedule(work).get()
    with pytest.raises(RuntimeError):
        coordinator.join()
    table.assign([1, 2], np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(table.lookup([2, 1]), 1)


WRONG = {
    "ids": (lambda t: t.lookup([0.5]), TypeError, "have dtype float64"),
    "a dim": (
        lambda t: t.apply_gradients([1], np.ones((1, 3))),
        ValueError,
        r"gradients of shape \[1, 3\] do not match ids \[1\] of table 'users' with dim 4",
    ),
    "whole numbers": (
        lambda t: t.assign([1], np.ones((1, 4), int)),
        TypeError,
        "but rows has dtype",
    ),
    "made elsewhere": (lambda t: Table(4, optax.sgd(1.0)), RuntimeError, "needs parameter servers"),
    "traced": (
        lambda t: jnp.vectorize(lambda i: t.lookup(i).sum())(jnp.arange(3)),
        RuntimeError,
        "in a traced function",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_calls_of_tables_raise_errors(start, case):
    table = make(start()[0], name="users")
    act, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        act(table)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_each_update_takes_effect_once_while_actors_die(start, tmp_path, seed):
    """Closure i counts id i and a shared id, while workers and servers die."""
    size, common = 120, -1
    strategy, coordinator = start(seed=seed, log=tmp_path)
    table = make(
        strategy, dim=2, optimizer=optax.sgd(1.0), initializer=lambda *_: jnp.zeros((1, 2))
    )
    engine, chance = strategy.engine, np.random.default_rng(seed or 0)

    def work(i):
        ids = np.array([i, common])
        table.lookup(ids)
        table.apply_gradients(ids, -np.ones((2, 2), np.float32))

    coordinator.schedule(work, (0,))
    coordinator.join()

    def kill():
        for _ in range(12):
            engine.concurrency.sleep(0.01 if seed is None else 0.002)
            actors = [*strategy.servers.actors, *coordinator._dispatcher._actors.values()]
            engine.kill(actors[chance.integers(len(actors))], "for a test")

    killer = engine.concurrency.start("killer", kill)
    for i in range(1, size):
        coordinator.schedule(work, (i,))
    assert coordinator.join(timeout_s=120)
    assert killer.join(60)
    np.testing.assert_array_equal(table.lookup(np.arange(size)), 1)
    np.testing.assert_array_equal(table.lookup([common]), size)


def test_a_full_server_fails_the_closure_and_changes_nothing(start, tmp_path):
    options = {"dim": 4, "capacity": 16, "max_bytes": 4000, "optimizer": optax.sgd(1.0)}
    strategy, coordinator = start(num_servers=1, log=tmp_path)
    table, other = make(strategy, **options), make(strategy)

    def work(first, last):
        for ids in (np.arange(first, last), np.arange(-last, -first)):
            other.apply_gradients(ids, np.ones((len(ids), 4)))
            table.apply_gradients(ids, np.ones((len(ids), 4)))

    coordinator.schedule(work, (1, 20))
    coordinator.join()
    before = table.state(), other.state()
    for act, args in ((work, (20, 45)), (table.lookup, (np.arange(100, 150),))):
        with pytest.raises(MemoryError, match=r"With max_bytes=4000 it has room for 64"):
            coordinator.schedule(act, args).get()
        with pytest.raises(MemoryError):
            coordinator.join()
    strategy.engine.kill(strategy.servers.actors[0], "for a test")
    for state, expected in zip((table.state(), other.state()), before, strict=True):
        for name in ("ids", "rows"):
            np.testing.assert_array_equal(state[name], expected[name])
    for num_servers, refused in ((2, False), (1, True)):
        fuller = make(start(num_servers)[0], **options)
        if refused:
            with pytest.raises(MemoryError):
                fuller.lookup(np.arange(100))
        else:
            fuller.lookup(np.arange(100))


def test_rows_survive_the_program_and_move_to_other_servers(start, tmp_path):
    adagrad = rowwise_adagrad(0.1)
    ids, gradients = np.arange(50) * 7919, np.random.default_rng(0).normal(size=(50, 4))

    def begin(folder, num_servers):
        strategy, coordinator = start(num_servers, log=folder)
        table = make(strategy, optimizer=adagrad)
        return table, coordinator

    def train(table, coordinator, times):
        for _ in range(times):
            coordinator.schedule(table.apply_gradients, (ids, gradients))
            coordinator.join()
        return np.asarray(table.lookup(ids))

    table, coordinator = begin(tmp_path / "a", 2)
    first = train(table, coordinator, 2)
    state = table.state()
    second = train(table, coordinator, 1)
    coordinator.shutdown()
    table, coordinator = begin(tmp_path / "a", 2)
    np.testing.assert_array_equal(table.lookup(ids), second)
    table, coordinator = begin(None, 5)
    table.restore(state)
    np.testing.assert_array_equal(table.lookup(ids), first)
    np.testing.assert_array_equal(train(table, coordinator, 1), second)
    assert table.evict(min_touches=100) == 50
    assert len(table) == 0


def test_prefetch_looks_rows_up_ahead(start):
    strategy, coordinator = start(num_workers=1)
    table = make(strategy, initializer=lambda *_: jnp.zeros((1, 4)))
    asked = []

    def batches():
        for i in range(5):
            asked.append(i)
            yield np.array([i, i + 1])

    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: table.prefetch_of(batches(), lambda ids: ids, ahead=2)
        )
    )

    def work(iterator):
        ids, rows = next(iterator)
        found = rows.get()
        table.apply_gradients(ids, np.ones((2, 4), np.float32))
        return ids[0], len(asked), found[:, 0]

    results = [coordinator.schedule(work, (iterator,)) for _ in range(5)]
    coordinator.join()
    results = coordinator.fetch(results)
    assert [x[0] for x in results] == [0, 1, 2, 3, 4]
    assert [x[1] for x in results] == [3, 4, 5, 5, 5]
    # They are from before the updates of the two closures between.
    np.testing.assert_array_equal([x[2] for x in results], np.zeros((5, 2)))
    np.testing.assert_array_equal(table.lookup(np.arange(6))[:, 0], [-0.5, -1, -1, -1, -1, -0.5])


def test_prefetch_yields_elements_that_are_none_and_needs_a_positive_distance(start):
    table = make(start()[0])
    elements = [None, 1, None, None]
    pairs = table.prefetch_of(elements, lambda x: [x or 0])
    assert [(x, rows.get().shape) for x, rows in pairs] == [(x, (1, 4)) for x in elements]
    with pytest.raises(ValueError, match="ahead=0.*at least 1"):
        table.prefetch_of(elements, lambda x: [0], ahead=0)
