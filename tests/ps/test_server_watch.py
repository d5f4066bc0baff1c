"""ServerWatch: silent servers are replaced, and busy ones are not."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.engine.thread_engine import ThreadEngine, _Future
from tpudist.errors import UnavailableError
from tpudist.ps.shard import Shard
from tpudist.strategies.parameter_server import ParameterServerStrategy

TIMEOUT_S = 4.0
LONG_S = 100.0


class HangingEngine(ThreadEngine):
    """Seeded threads that seem to hang like processes: they exist, and do not answer."""

    actors_may_hang = True

    def __init__(self):
        super().__init__(seed=0)
        self.silent = set()

    def ping(self, actor):
        is_silent = actor in self.silent
        return _Future(self._find(actor), "ping", ()) if is_silent else super().ping(actor)


class Run:
    """A strategy whose servers take long for the fourth push."""

    def __init__(self, monkeypatch, log, *, is_silent):
        self.engine = HangingEngine()
        self.now_s = self.engine.concurrency.now_s
        self.strategy = ParameterServerStrategy(
            engine=self.engine, num_workers=2, log=log, server_timeout_s=TIMEOUT_S
        )
        self.coordinator = ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.v = tpudist.Variable(jnp.zeros(8))
        push, self.num_pushes, self.late = Shard.push, 0, []

        def push_later(shard, closure, low, changes):
            self.num_pushes += 1
            if self.num_pushes == 4:
                if is_silent:
                    self.engine.silent.add(self.strategy.servers.actors[0])
                self.engine.concurrency.sleep(LONG_S)
                try:
                    return push(shard, closure, low, changes)
                except ValueError as error:  # its log has another writer now
                    self.late.append(error)
                    raise
            return push(shard, closure, low, changes)

        monkeypatch.setattr(Shard, "push", push_later)

    def add_to_each_row(self):
        def add(row):
            one = np.ones(1, np.float32)
            self.v.scatter_add(tpudist.IndexedSlices(one, np.array([row])))

        for row in range(8):
            self.coordinator.schedule(add, (row,))
        self.coordinator.join()

    @property
    def incarnation(self):
        return self.strategy.servers.actors[0].incarnation


def test_a_silent_server_is_replaced(monkeypatch, tmp_path, caplog):
    """During a push, which it completes later without effect."""
    run = Run(monkeypatch, tmp_path, is_silent=True)
    run.add_to_each_row()
    assert TIMEOUT_S < run.now_s() < 1.5 * TIMEOUT_S
    assert run.incarnation == 1
    assert "ps 0 hangs: it did not answer for 4 s, so it was given up." in caplog.text
    np.testing.assert_array_equal(run.v.numpy(), 1)
    run.engine.concurrency.sleep(2 * LONG_S)
    assert len(run.late) == 1
    np.testing.assert_array_equal(run.v.numpy(), 1)
    run.coordinator.shutdown()


def test_a_busy_server_is_not_replaced(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, is_silent=False)
    run.add_to_each_row()
    assert run.now_s() >= LONG_S
    assert run.incarnation == 0
    np.testing.assert_array_equal(run.v.numpy(), 1)
    run.coordinator.shutdown()


def test_a_hanging_server_without_a_log_raises_unavailable(monkeypatch):
    run = Run(monkeypatch, None, is_silent=True)
    with pytest.raises(UnavailableError, match="ps 0 has died: it did not answer for 4 s"):
        run.add_to_each_row()
    run.engine.concurrency.sleep(2 * LONG_S)
    run.coordinator.shutdown()


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_only_servers_that_have_started_are_given_up(after_s, caplog):
    """Reading a log may take long; a server that has answered once has started."""
    engine = HangingEngine()
    spawn, spawned = engine.spawn, []

    def spawn_silent(*args):
        spawned.append(spawn(*args))
        if not after_s:
            engine.silent.add(spawned[0])
        return spawned[-1]

    engine.spawn = spawn_silent
    strategy = ParameterServerStrategy(engine=engine, num_workers=1, server_timeout_s=TIMEOUT_S)
    engine.concurrency.sleep(after_s)
    engine.silent.add(spawned[0])
    with caplog.at_level(logging.WARNING, "tpudist"):
        engine.concurrency.sleep(LONG_S)
    assert ("hangs" in caplog.text) == (after_s > 0)
    engine.silent.clear()
    strategy.shutdown()


def test_a_server_that_answered_only_calls_is_given_up(tmp_path, caplog):
    """It hangs between two looks, just after it replaced another one."""
    engine = HangingEngine()
    strategy = ParameterServerStrategy(
        engine=engine, num_workers=1, log=tmp_path, server_timeout_s=TIMEOUT_S
    )
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = tpudist.Variable(jnp.zeros(()))
    engine.concurrency.sleep(TIMEOUT_S)
    spawn = engine.spawn

    def spawn_silent(*args):
        actor = spawn(*args)
        if actor.incarnation == 1:
            engine.silent.add(actor)
        return actor

    engine.spawn = spawn_silent
    engine.kill(strategy.servers.actors[0])
    assert v.numpy() == 0  # of the next one, which has a log to read
    with caplog.at_level(logging.WARNING, "tpudist"):
        engine.concurrency.sleep(2 * TIMEOUT_S)
    assert "hangs: it did not answer for 4 s" in caplog.text
    assert v.numpy() == 0
    assert strategy.servers.actors[0].incarnation == 2
    coordinator.shutdown()
