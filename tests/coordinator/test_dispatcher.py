"""Dispatcher: closures take effect once while workers die, hang, are added and are removed."""

import random
import threading

import jax
import jax.numpy as jnp
import pytest

from tpudist.context.closure_place import current_place
from tpudist.coordinator import dispatcher as dispatcher_module
from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.worker import (
    ResourceRef,
    Worker,
    experimental_get_current_worker_index,
)
from tpudist.engine.engine import ActorDied
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.errors import CancelledError
from tpudist.ps.closure_ledger import ClosureLedger


class Run:
    """An engine, workers, and a count of closures."""

    def __init__(self, num_workers=2, seed=None, max_size=256, max_staleness=None, **options):
        self.engine = ThreadEngine(seed)
        self.queue = ClosureQueue(max_size, self.engine.concurrency, max_staleness=max_staleness)
        devices = jax.devices()
        self.dispatcher = Dispatcher(
            self.engine,
            self.queue,
            lambda i: (Worker, i, devices[i % len(devices)]),
            **options,
        )
        self.count, self.closures = 0, []
        for _ in range(num_workers):
            self.dispatcher.add_worker()

    def schedule(self, fn, *args, **kwargs):
        output = RemoteValue(changed=self.queue.changed)
        closure = Closure(self.count, fn, args, kwargs, output)
        self.count += 1
        self.queue.put(closure)
        self.closures.append(closure)
        return output

    @property
    def num_lost(self):
        """Number of repeated starts."""
        return sum(len(closure.retries) for closure in self.closures)

    def join(self):
        assert self.queue.wait(60)

    def actor(self, index):
        return self.dispatcher._actors.get(index)

    def close(self):
        self.dispatcher.close()
        self.engine.shutdown()


@pytest.fixture(params=[None, 0, 1], ids=lambda seed: f"seed {seed}")
def run(request):
    before, made = set(threading.enumerate()), Run(seed=request.param)
    yield made
    made.close()
    started = set(threading.enumerate()) - before
    assert not [x for x in started if x.name.startswith("tpudist worker")]


def test_functions_run_on_the_device_of_their_worker(run):
    def where(x, scale=1):
        y = jnp.ones(2) * x * scale
        return experimental_get_current_worker_index(), y.devices(), y.sum()

    outputs = [run.schedule(where, i, scale=2) for i in range(12)]
    run.join()
    for i, output in enumerate(outputs):
        worker, devices, total = output.get()
        assert devices == {jax.devices()[worker]}
        assert total == 4 * i
    assert current_place() is None
    with pytest.raises(RuntimeError, match="must be called on a worker"):
        experimental_get_current_worker_index()


def test_errors_name_their_closure_and_worker(run):
    def fail(x):
        raise KeyError(f"no row {x}")

    output = run.schedule(fail, 3)
    with pytest.raises(KeyError, match="no row 3") as caught:
        run.join()
    assert "Raised in closure 0, 'test_errors_name" in caught.value.__notes__[0]
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(KeyError):
        output.fetch()
    assert run.schedule(lambda: 5) is not None
    run.join()


def test_the_error_of_a_resource_is_raised_by_each_closure_without_older_notes(run):
    def make():
        raise KeyError("no file")

    key = run.dispatcher.resources.add(make)
    for _ in range(3):
        run.schedule(lambda resource: None, ResourceRef(key))
        with pytest.raises(KeyError, match="no file") as caught:
            run.join()
        assert len(caught.value.__notes__) == 1


def test_each_worker_creates_its_resources_again_after_a_loss(run):
    made = []

    def make(start):
        made.append(current_place().worker)
        return [start]

    key = run.dispatcher.resources.add(make, (10,))

    def use(kept):
        kept.append(1)
        run.engine.concurrency.sleep(0.01)
        return experimental_get_current_worker_index(), len(kept)

    outputs = [run.schedule(use, ResourceRef(key)) for _ in range(10)]
    run.join()
    for worker in range(2):
        lengths = [x.get()[1] for x in outputs if x.get()[0] == worker]
        assert lengths == list(range(2, 2 + len(lengths)))
    used = sorted(made)
    run.engine.kill(run.actor(used[0]), "for a test")
    outputs = [run.schedule(use, ResourceRef(key)) for _ in range(10)]
    run.join()
    assert len(made) > len(used) or all(x.get()[0] != used[0] for x in outputs)


@pytest.mark.parametrize("seed", range(6))
def test_a_starting_worker_takes_no_closure(seed):
    """Processes take seconds to start, and their resources may take longer."""
    run = Run(seed=seed)
    clock, made, killed = run.engine.concurrency, [], []

    def make():
        made.append(current_place().worker)
        clock.sleep(20 if len(made) > 2 else 0)

    def die_once(kept):
        if not killed:
            killed.append(run.actor(experimental_get_current_worker_index()))
            run.engine.kill(killed[0], "for a test")
        return clock.now_s()

    key = run.dispatcher.resources.add(make)
    for _ in range(2):  # both workers are there
        run.schedule(lambda kept: clock.sleep(1), ResourceRef(key))
    run.join()
    begun_s = clock.now_s()
    assert run.schedule(die_once, ResourceRef(key)).get() - begun_s < 1
    run.close()
    assert len(made) == 3


def test_an_error_in_creating_a_resource_is_raised_in_its_users(run):
    def make():
        raise OSError("no such data")

    key = run.dispatcher.resources.add(make)
    assert run.schedule(lambda: 3).get() == 3
    run.schedule(lambda kept: kept, ResourceRef(key))
    with pytest.raises(OSError, match="no such data"):
        run.join()


class Shard:
    """Counts closures, each at most once."""

    def __init__(self, size):
        self.rows, self.ledger, self.num_repeated = [0] * size, ClosureLedger(), 0

    def add(self, number, row):
        if not self.ledger.add(number):
            self.num_repeated += 1
            return
        self.rows[row] += 1

    def read(self):
        return list(self.rows), self.num_repeated


@pytest.mark.parametrize(
    "seed",
    [None, 0, 1, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in range(2, 8))],
)
def test_each_row_is_counted_once_while_actors_are_killed(seed):
    """Closure i adds 1 to row i of two shards, one after the other; workers die at any moment."""
    size, num_kills = 400, 40
    run = Run(3, seed)
    engine, chance = run.engine, random.Random(seed or 0)
    shards = [engine.spawn("ps", i, Shard, size) for i in range(2)]

    def work(row):
        for shard in shards:
            engine.concurrency.sleep(0.0005)
            engine.result(engine.call(shard, "add", current_place().closure, row))
        return row

    def kill():
        for _ in range(num_kills):
            engine.concurrency.sleep(0.002)
            actor = run.actor(chance.randrange(3))
            if actor is not None:
                engine.kill(actor, "for a test")

    killer = engine.concurrency.start("killer", kill)
    outputs = [run.schedule(work, i) for i in range(size)]
    run.join()
    assert killer.join(60)
    assert [x.get() for x in outputs] == list(range(size))
    assert run.num_lost > (10 if seed is not None else 2)  # of threads the machine decides
    found = [engine.result(engine.call(shard, "read")) for shard in shards]
    assert [rows for rows, _ in found] == [[1] * size] * 2
    run.close()


def test_a_hanging_worker_is_given_up():
    run = Run(2, timeout_s=0.3)
    hang = threading.Event()
    begun = []

    def work(i):
        if i == 3 and not begun:
            begun.append(i)
            hang.wait(20)
        return i

    outputs = [run.schedule(work, i) for i in range(10)]
    run.join()
    assert [x.get() for x in outputs] == list(range(10))
    hang.set()
    run.close()


def test_a_closure_that_kills_its_workers_fails(monkeypatch):
    monkeypatch.setattr(dispatcher_module, "MAX_RETRIES", 3)
    run = Run(2, seed=0)

    def end():
        place = current_place()
        run.engine.kill(run.actor(place.worker), "as a fault of its memory would")
        run.engine.call(run.actor(place.worker), "keep", 1, list, ())

    output = run.schedule(end)
    with pytest.raises(
        CancelledError,
        match=r"(?s)was started 4 times, and a worker was lost 4 times.*as a fault of its memory",
    ):
        run.join()
    with pytest.raises(CancelledError):
        output.get()
    assert run.schedule(lambda: 1).get() == 1
    run.close()


def test_workers_can_be_added_and_removed(run):
    seen = set()

    def work():
        run.engine.concurrency.sleep(0.01)
        seen.add(experimental_get_current_worker_index())

    assert run.dispatcher.add_worker() == 2
    for _ in range(30):
        run.schedule(work)
    run.join()
    assert seen == {0, 1, 2}
    run.dispatcher.remove_worker(0)
    assert run.dispatcher.workers == [1, 2]
    seen.clear()
    for _ in range(20):
        run.schedule(work)
    run.join()
    assert 0 not in seen
    run.dispatcher.remove_worker(1)
    for index in (1, 2):
        with pytest.raises(ValueError, match="one of these workers, and at least one other"):
            run.dispatcher.remove_worker(index)


def test_the_death_of_another_actor_is_raised_or_repaired():
    for mend in (False, True):
        lost = []
        run = Run(1, 0, on_lost=lost.append if mend else None)
        first = run.engine.spawn("ps", 0, Shard, 1)
        shard = [first]

        def work(run=run, shard=shard):
            actor = shard[0]
            shard[:] = [run.engine.spawn("ps", 0, Shard, 1)]
            return run.engine.result(run.engine.call(actor, "read"))

        run.engine.kill(first, "for a test")
        output = run.schedule(work)
        if mend:
            run.join()
            assert output.get() == ([0], 0)
            assert [died.actor for died in lost] == [first]
        else:
            with pytest.raises(ActorDied, match="ps 0 has died: for a test"):
                run.join()
        run.close()
