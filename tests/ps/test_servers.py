"""Servers: numbers of variables, checks of optimizers, and servers that die again and again."""

import jax
import numpy as np
import optax
import pytest

import tpudist
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.errors import UnavailableError
from tpudist.ps.embedding_table import Table
from tpudist.ps.server_variable import check_once
from tpudist.ps.shard import Shard
from tpudist.strategies.parameter_server import ParameterServerStrategy


@pytest.fixture
def start(tmp_path):
    strategies = []

    def start(**options):
        strategies.append(
            ParameterServerStrategy(
                num_workers=1, num_servers=2, engine=ThreadEngine(), log=tmp_path, **options
            )
        )
        return strategies[-1]

    yield start
    for strategy in strategies:
        strategy.shutdown()


@pytest.mark.parametrize(
    ("method", "message"),
    [("pull", "during a call of pull, which"), ("define", "while they read the log in")],
)
def test_servers_that_always_die_raise_an_error(start, monkeypatch, method, message):
    """Without a bound, the program would start servers forever."""
    strategy = start()
    with strategy.scope():
        v = tpudist.Variable(np.ones(2, np.float32))

    def die(shard, *args):
        strategy.engine.kill(strategy.servers._newest[0], "it was out of memory")
        strategy.engine.ping(strategy.servers._newest[0])

    with monkeypatch.context() as dying:
        dying.setattr(Shard, method, die)
        strategy.engine.kill(strategy.servers.actors[0], "for a test")
        with pytest.raises(UnavailableError, match=f"the last of 10 servers in a row .*{message}"):
            v.numpy()
    np.testing.assert_array_equal(v.numpy(), [1, 1])


def test_a_lookup_during_which_servers_always_die_raises_an_error(start, monkeypatch):
    strategy = start()
    with strategy.scope():
        table = Table(4, optax.sgd(0.5))
    died = set()  # both servers call `die`

    def die(shard, *args):
        newest = strategy.servers._newest[1]
        died.add(newest)
        strategy.engine.kill(newest, "it was out of memory")
        strategy.engine.ping(newest)

    ids = np.arange(32)
    with monkeypatch.context() as dying:
        dying.setattr(Shard, "pull_table", die)
        message = r"ps 1.*out of memory.* last of 10 servers in a row .* 32 rows.*more memory"
        with pytest.raises(UnavailableError, match=message):
            table.lookup(ids)
    assert len(died) == 10
    assert table.lookup(ids).shape == (32, 4)


def test_a_definition_that_raises_takes_no_number(start):
    """A restarted program may not fail there, and must find its variables in the log."""
    first = start()
    with first.scope():
        made = [tpudist.Variable(float(i), name=f"v{i}") for i in range(3)]
    first.shutdown()
    again = start()
    with again.scope():
        tpudist.Variable(0.0, name="v0")
        with pytest.raises(ValueError, match="the log of server 1 has 'v1'"):
            tpudist.Variable(0.0, name="other")
        found = [tpudist.Variable(0.0, name=f"v{i}") for i in (1, 2)]
    assert [v.home for v in found] == [v.home for v in made[1:]]
    assert [v.numpy() for v in found] == [1, 2]


def test_a_variable_is_checked_even_if_its_first_part_was(start):
    strategy = start(variable_partitioner=lambda shape, dtype: [2])
    with strategy.scope():
        v = tpudist.Variable(np.ones(4, np.float32))
    tx = optax.clip_by_block_rms(1.0)  # of all elements
    check_once(strategy, 0, tx, [v.variables[0]])
    with pytest.raises(ValueError, match="in 2 parts on servers"):
        check_once(strategy, 0, tx, [v])


def test_labels_of_a_transformation_may_be_numbers(start):
    """Servers name variables by their numbers."""
    transforms = {"0": optax.adam(0.1), "2": optax.sgd(0.1, momentum=0.9)}
    tx = optax.multi_transform(
        transforms, lambda tree: jax.tree.map(lambda x: "2" if x.size == 3 else "0", tree)
    )
    strategy, values = start(), [np.ones(size, np.float32) for size in (3, 4, 5)]
    with strategy.scope():
        variables, optimizer = [tpudist.Variable(x) for x in values], tpudist.Optimizer(tx)
    alone, state = values, tx.init(values)
    for _ in range(3):
        optimizer.apply_gradients(list(zip(values, variables, strict=True)))
        updates, state = tx.update(values, state, alone)
        alone = optax.apply_updates(alone, updates)
    for v, expected in zip(variables, alone, strict=True):
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
