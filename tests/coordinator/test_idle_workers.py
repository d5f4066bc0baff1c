"""IdleWorkers: a closure wakes one worker, however many wait, and is never left waiting."""

import pytest

from tpudist.context.closure_place import current_place
from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.stragglers import Stragglers
from tpudist.coordinator.worker import Worker
from tpudist.engine import concurrency
from tpudist.engine.seeded_concurrency import SeededConcurrency
from tpudist.engine.thread_engine import ThreadEngine

OPTIONS = {
    "plain": dict,
    "bounded staleness": lambda: {"max_staleness": 0},
    "wide staleness": lambda: {"max_staleness": 50},
    "stragglers": lambda: {"stragglers": Stragglers(3.0)},
}


class Run:
    """Workers that are idle, in an order of events that a seed determines."""

    def __init__(self, num_workers, seed=0, **options):
        self.engine = ThreadEngine(seed)
        self.concurrency = self.engine.concurrency
        self.queue = ClosureQueue(1000, self.concurrency, **options)
        self.dispatcher = Dispatcher(self.engine, self.queue, lambda i: (Worker, i))
        for _ in range(num_workers):
            self.dispatcher.add_worker()
        self.count = 0
        for _ in range(3 * num_workers):  # each worker starts its actor, and waits again
            self.put()
        self.queue.wait()
        self.concurrency.sleep(1.0)

    def put(self, fn=lambda: None, *args):
        output = RemoteValue(changed=self.queue.changed)
        closure = Closure(self.count, fn, args, {}, output)
        self.count += 1
        self.queue.put(closure)
        return output

    def close(self):
        self.dispatcher.close()
        self.engine.shutdown()


def count_per_closure(monkeypatch, num_workers, options, num_at_once, num_closures=60):
    """Returns the numbers of evaluated predicates, and of threads that were chosen to continue."""
    run, evaluated = Run(num_workers, **options()), []
    may_hold = concurrency._may_hold
    with monkeypatch.context() as patch:
        patch.setattr(concurrency, "_may_hold", lambda x: evaluated.append(1) or may_hold(x))
        num_events = len(run.concurrency.history)
        for _ in range(0, num_closures, num_at_once):
            outputs = [run.put() for _ in range(num_at_once)]
            for output in outputs:
                output.get()
        num_events = len(run.concurrency.history) - num_events
    run.close()
    return len(evaluated) / num_closures, num_events / num_closures


@pytest.mark.parametrize(("num_at_once", "few_workers"), [(1, 2), (30, 32)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_work_for_a_closure_does_not_grow_with_the_number_of_workers(
    monkeypatch, options, num_at_once, few_workers
):
    counts = {
        n: count_per_closure(monkeypatch, n, options, num_at_once) for n in (few_workers, 256)
    }
    for few, many in zip(counts[few_workers], counts[256], strict=True):
        assert many < 1.3 * few  # not 8 or 128 times
    assert counts[256][0] < 10
    assert counts[256][1] < 20


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_worker_that_leaves_when_it_is_woken_leaves_the_closure_to_another(options):
    for seed in range(20):
        for worker in range(2):
            run = Run(2, seed, **options())
            # It may be woken for the closure and then find that it was removed.
            removing = run.concurrency.start(
                "remove", lambda run=run, worker=worker: run.dispatcher.remove_worker(worker)
            )
            assert run.put(lambda: 7).get() == 7
            assert removing.join(60.0)
            run.close()


def test_a_worker_whose_wait_ends_leaves_the_closure_to_another():
    for seed in range(50):
        chance = SeededConcurrency(seed)
        queue, got = ClosureQueue(9, chance), []

        def get(worker, timeout_s, queue=queue, got=got):
            closure = queue.get(worker, timeout_s)
            if closure is not None:
                got.append(worker)
                queue.finish(closure, worker, None)

        def put(queue=queue, chance=chance):
            chance.sleep(1.0)
            queue.put(Closure(0, len, (), {}, RemoteValue(changed=queue.changed)))

        threads = [
            chance.start("short", lambda get=get: get(0, 1.0)),
            chance.start("long", lambda get=get: get(1, 99.0)),
            chance.start("put", put),
        ]
        assert all(thread.join(200.0) for thread in threads)
        assert len(got) == 1


def test_all_closures_start_that_one_result_has_let_start():
    """All but the first wait until it ends, and then a single event lets the others start."""
    for seed in range(20):
        run = Run(5, seed, max_staleness=4)
        started = []

        def wait(run=run, started=started):
            started.append(run.concurrency.now_s())
            run.concurrency.sleep(10.0)

        def begin(run=run):
            run.concurrency.sleep(5.0)

        begin_s = run.concurrency.now_s()
        run.put(begin)
        for _ in range(3):
            run.put()
        for _ in range(4):  # the first of them starts at once
            run.put(wait)
        run.queue.wait()
        assert len(started) == 4
        assert max(started) <= begin_s + 5.0 + 0.1
        run.close()


def test_one_idle_worker_watches_for_slow_closures_and_another_takes_its_place():
    for seed in range(20):
        run = Run(4, seed, stragglers=Stragglers(3.0))
        begun = []

        def work(name, run=run, begun=begun):
            begun.append(name)
            run.concurrency.sleep(30.0 if begun.count(name) == 1 else 5.0)

        for i in range(3):  # its usual duration is short
            run.queue._stragglers.record(Closure(i, work, (), {}, RemoteValue()), 0.01)
        begin_s = run.concurrency.now_s()
        for output in [run.put(work, name) for name in "ab"]:
            output.get()
        assert run.concurrency.now_s() - begin_s < 1.0 + 5.0 + 0.1
        assert sorted(begun) == ["a", "a", "b", "b"]
        run.close()


def test_slow_closures_are_found_after_the_removal_of_the_worker_that_watched():
    for seed in range(20):
        run = Run(4, seed, stragglers=Stragglers(3.0))
        begun = []

        def work(run=run, begun=begun):
            begun.append(current_place().worker)
            run.concurrency.sleep(30.0 if len(begun) == 1 else 5.0)

        for i in range(3):
            run.queue._stragglers.record(Closure(i, work, (), {}, RemoteValue()), 0.01)
        begin_s = run.concurrency.now_s()
        output = run.put(work)
        run.concurrency.sleep(0.5)
        idle = sorted(set(range(4)) - set(begun))
        for worker in idle[:-1]:
            run.dispatcher.remove_worker(worker)
        output.get()
        assert run.concurrency.now_s() - begin_s < 1.0 + 5.0 + 0.1
        assert begun[1:] == idle[-1:]
        run.close()
