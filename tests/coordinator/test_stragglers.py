"""Stragglers: idle workers start slow closures again, which count once."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from server_faults import wait_until
from tpudist.context.closure_place import current_place
from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue
from tpudist.coordinator.stragglers import MIN_S, Stragglers
from tpudist.engine.seeded_concurrency import SeededConcurrency
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.strategies.parameter_server import ParameterServerStrategy


class Setting:
    """A queue whose time passes only while a test sleeps, and closures that have taken 2 s."""

    def __init__(self, **options):
        self.concurrency = SeededConcurrency(0)
        self.queue = ClosureQueue(99, self.concurrency, stragglers=Stragglers(3.0), **options)
        self.count = 0
        for _ in range(3):
            closure = self.begin()
            self.concurrency.sleep(2.0)
            self.queue.finish(closure, 0, None)

    def put(self, fn=len, per_worker_values=()):
        output = RemoteValue(changed=self.queue.changed)
        closure = Closure(self.count, fn, (), {}, output, per_worker_values=per_worker_values)
        self.count += 1
        self.queue.put(closure)
        return closure

    def begin(self, *args):
        closure = self.put(*args)
        assert self.queue.get(0) is closure
        return closure

    def begin_twice(self):
        closure = self.begin()
        assert self.queue.get(1, 60.0) is closure
        return closure


def test_a_slow_closure_starts_again_after_a_multiple_of_the_median():
    setting = Setting()
    closure, began_s = setting.begin(), setting.concurrency.now_s()
    assert setting.queue.get(1, 5.9) is None
    assert setting.queue.get(1, 60.0) is closure
    assert setting.concurrency.now_s() - began_s == pytest.approx(6.0)
    assert setting.queue.get(2, 60.0) is None  # two are enough
    assert setting.queue.tally.retries == {"slow": 1}
    assert setting.queue.tally.workers[0].retries == 1
    (why,) = closure.retries
    assert (
        why == "it is slow: it has run for 6 s, and 2 s is the median of the last 3 of its function"
    )


def test_waiting_closures_start_before_slow_ones_unless_they_must_wait():
    setting = Setting()
    setting.begin()
    setting.concurrency.sleep(10)
    waiting = setting.put()
    assert setting.queue.get(1, 60.0) is waiting
    setting = Setting(max_staleness=0)
    slow, waiting = setting.begin(), setting.put()
    assert setting.queue.get(1, 60.0) is slow
    setting.queue.finish(slow, 0, None)
    assert setting.queue.get(1, 60.0) is waiting


def test_an_idle_worker_notices_closures_that_start_later():
    setting = Setting()
    found = []
    thread = setting.concurrency.start("1", lambda: found.append(setting.queue.get(1, 60.0)))
    setting.concurrency.sleep(1.0)
    began_s = setting.concurrency.now_s()
    closure = setting.begin()  # by either of the two; the other one runs it as well
    assert thread.join(60)
    assert found == [closure]
    assert setting.concurrency.now_s() - began_s == pytest.approx(6.0)


@pytest.mark.parametrize("case", ["another function", "an iterator of each worker", "short ones"])
def test_closures_that_are_not_slow_run_once(case):
    setting = Setting()
    if case == "another function":
        setting.begin(lambda: None)
    elif case == "an iterator of each worker":
        setting.begin(len, [PerWorkerValue([])])
    else:
        for _ in range(40):
            setting.queue.finish(setting.begin(), 0, None)
        setting.begin()
        assert setting.queue.get(1, 0.9 * MIN_S) is None
        assert setting.queue.get(1, 0.2 * MIN_S) is not None
    assert setting.queue.get(1, 60.0) is None


def test_the_first_of_two_results_counts():
    setting = Setting()
    closure = setting.begin_twice()
    assert setting.queue.claim(closure, 0)
    setting.queue.finish(closure, 0, "first")
    assert setting.queue.is_done()  # though somebody still runs it
    assert not setting.queue.claim(closure, 1)
    assert closure.output.get() == "first"
    for late in (
        lambda closure: setting.queue.fail(closure, 1, KeyError("late")),
        lambda closure: setting.queue.put_back(closure, 1, "its worker has died"),
    ):
        closure = setting.begin_twice()
        assert setting.queue.claim(closure, 0)
        late(closure)
        assert not setting.queue.is_done()
        setting.queue.finish(closure, 0, "first")
        assert setting.queue.wait()
        assert closure.output.get() == "first"
    assert setting.queue.finished.low == setting.count


def test_an_error_counts_if_no_other_worker_runs_the_closure():
    setting = Setting()
    closure = setting.begin_twice()
    setting.queue.fail(closure, 0, KeyError("of the first"))
    assert not closure.output.done()
    setting.queue.finish(closure, 1, "of the second")
    assert setting.queue.wait()
    closure = setting.begin_twice()
    setting.queue.put_back(closure, 0, "its worker has died")
    assert setting.queue.get(2, 5.9) is None  # who runs it now has not begun long ago
    setting.queue.fail(closure, 1, KeyError("of the second"))
    with pytest.raises(KeyError, match="of the second"):
        setting.queue.wait()
    closure = setting.begin_twice()
    setting.queue.put_back(closure, 0, "its worker has died")
    setting.queue.put_back(closure, 1, "the other one has died")
    assert setting.queue.get(2) is closure
    setting.queue.finish(closure, 2, 1)


def test_a_result_that_cannot_be_recorded_leaves_the_closure_to_others():
    setting = Setting()
    closure = setting.begin_twice()
    assert setting.queue.claim(closure, 0)
    setting.queue.disclaim(closure)
    setting.queue.put_back(closure, 0, "a server has died")
    assert setting.queue.claim(closure, 1)
    setting.queue.disclaim(closure)
    setting.queue.put_back(closure, 1, "a server has died")
    assert setting.queue.get(2) is closure


def test_no_closure_starts_again_after_an_error_or_stop():
    setting = Setting()
    setting.begin()
    setting.queue.fail(setting.begin(), 0, KeyError())
    assert setting.queue.get(1, 60.0) is None
    setting.queue.stop()
    assert setting.queue.get(1, 60.0) is None


# With workers and servers.


class Run:
    """A strategy with a log, and a coordinator that speculates."""

    def __init__(self, folder, seed=None, num_workers=3, **options):
        self.strategy = ParameterServerStrategy(
            engine=ThreadEngine(seed), num_workers=num_workers, num_servers=2, log=folder
        )
        self.concurrency = self.strategy.engine.concurrency
        self.coordinator = ClusterCoordinator(self.strategy, speculate=2.0, **options)

    def make(self, value, name):
        with self.strategy.scope():
            return tpudist.Variable(value, name=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_staleness", "seed"),
    [
        *((staleness, seed) for seed in (0, 1) for staleness in (None, 2)),
        *(
            pytest.param(staleness, seed, marks=pytest.mark.exhaustive)
            for seed in range(2, 8)
            for staleness in (None, 2)
        ),
    ],
)
def test_each_row_is_counted_once_with_speculation_and_deaths(tmp_path, seed, max_staleness):
    """Each closure adds 1 to a row of two variables; some are slow, and workers and servers die.

    Its update of a third variable depends on the worker: only one run may apply it.
    """
    size, num_kills = 100, 8
    run = Run(tmp_path, seed, max_staleness=max_staleness)
    engine, chance = run.strategy.engine, np.random.default_rng(seed)
    a, b = (run.make(jnp.zeros(size), name) for name in "ab")
    odd, even = (run.make(jnp.zeros(size), name) for name in ("odd", "even"))
    begun = []

    def work(row):
        for v in (a, b):
            v.scatter_add(tpudist.IndexedSlices(np.ones(1, np.float32), np.array([row])))
        begun.append(row)
        v = odd if len(begun) % 2 else even
        v.scatter_add(tpudist.IndexedSlices(np.ones(1, np.float32), np.array([row])))
        run.concurrency.sleep(chance.choice([0.1, 20.0], p=[0.8, 0.2]))
        return row

    def kill():
        for _ in range(num_kills):
            run.concurrency.sleep(3.0)
            actors = [*run.strategy.servers.actors, *run.coordinator._dispatcher._actors.values()]
            engine.kill(actors[chance.integers(len(actors))], "for a test")

    killer = run.concurrency.start("killer", kill)
    outputs, found = [], np.zeros((4, size))
    for first in range(0, size, 10):
        outputs += [run.coordinator.schedule(work, (i,)) for i in range(first, first + 10)]
        assert run.coordinator.join(timeout_s=1000)
        before, found = found, np.stack([v.numpy() for v in (a, b, odd, even)])
        np.testing.assert_array_equal(found[:, :first], before[:, :first])  # late ones have ended
        np.testing.assert_array_equal(found[0], np.arange(size) < first + 10)
        np.testing.assert_array_equal(found[1], found[0])
    assert killer.join(1000)
    assert run.coordinator.fetch(outputs) == list(range(size))
    assert run.coordinator.num_finished == run.coordinator._queue.finished.low == size
    assert run.coordinator.num_speculated > 3
    run.coordinator.shutdown()


def test_updates_of_the_slower_run_are_rejected_on_other_servers(tmp_path):
    """Even after the death of the server, because its log contains the seal."""
    run = Run(tmp_path, num_workers=2)
    first, second = run.make(jnp.zeros(()), "first"), run.make(jnp.zeros(()), "second")
    assert {first.home.server, second.home.server} == {0, 1}
    go_on, ended, begun = threading.Event(), threading.Event(), []

    def work(is_slow=False):
        if is_slow and not begun:
            begun.append(current_place().worker)
            go_on.wait(60)
            first.assign_add(1.0, read_value=False)
            ended.set()
        else:
            second.assign_add(1.0, read_value=False)

    for _ in range(4):
        run.coordinator.schedule(work)
    run.coordinator.join()
    output = run.coordinator.schedule(work, (True,))
    assert run.coordinator.join(timeout_s=60)
    assert output.done()
    assert (first.numpy(), second.numpy()) == (0, 5)
    go_on.set()
    assert ended.wait(60)
    wait_until(lambda: not run.coordinator._dispatcher._running, "the end of the slower one")
    assert (first.numpy(), second.numpy()) == (0, 5)
    before = run.strategy.servers.report()
    for actor in run.strategy.servers.actors:
        run.strategy.engine.kill(actor, "for a test")
    assert (first.numpy(), second.numpy()) == (0, 5)
    after = run.strategy.servers.report()
    assert [(x["changed"], x["low"]) for x in after] == [(x["changed"], x["low"]) for x in before]
    run.coordinator.shutdown()


def test_shutdown_does_not_wait_for_the_slower_run(tmp_path):
    run = Run(tmp_path, seed=1, num_workers=2)
    begun = []

    def work(is_slow):
        if is_slow and not begun:
            begun.append(1)
            run.concurrency.sleep(25)
        return run.concurrency.now_s()

    outputs = [run.coordinator.schedule(work, (i == 4,)) for i in range(5)]
    last_s = max(run.coordinator.fetch(outputs))
    run.coordinator._dispatcher.close()
    assert run.concurrency.now_s() == last_s
    run.concurrency.sleep(30)
    run.coordinator.shutdown()
