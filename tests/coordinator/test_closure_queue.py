"""ClosureQueue: TensorFlow's tests of its queue, for several sizes, threads and seeds."""

import threading
import time

import pytest

from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue, fetch_all
from tpudist.engine.concurrency import SystemConcurrency
from tpudist.engine.seeded_concurrency import SeededConcurrency
from tpudist.errors import CancelledError

CASES = [(size, seed) for size in (256, 2) for seed in (None, 0, 1)]


class Setting:
    """A queue, and threads that use it."""

    def __init__(self, max_size=256, seed=None, **options):
        self.concurrency = SystemConcurrency() if seed is None else SeededConcurrency(seed)
        self.queue = ClosureQueue(max_size, self.concurrency, **options)
        self.count, self.threads = 0, []

    def close(self):
        """Ends the threads."""
        self.queue.stop()
        assert all(thread.join(10) for thread in self.threads)

    def closure(self, fn=lambda: None):
        self.count += 1
        return Closure(self.count - 1, fn, (), {}, RemoteValue(changed=self.queue.changed))

    def put(self, fn=lambda: None):
        closure = self.closure(fn)
        self.queue.put(closure)
        return closure

    def work(self, worker=0, done=lambda: None):
        """Runs closures until the queue is stopped."""
        while (closure := self.queue.get(worker)) is not None:
            try:
                value = closure.fn()
            except Exception as error:
                self.queue.fail(closure, worker, error)
            else:
                self.queue.finish(closure, worker, value)
            done()

    def start(self, count=1):
        self.threads += [
            self.concurrency.start(f"worker {i}", lambda i=i: self.work(i)) for i in range(count)
        ]
        return self.threads


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} places, seed {case[1]}")
def setting(request):
    made = Setting(*request.param)
    yield made
    made.close()


def test_each_closure_runs_once_and_sets_its_result(setting):
    threads = setting.start(3)
    ran = []
    closures = [setting.put(lambda i=i: ran.append(i) or i * i) for i in range(30)]
    assert setting.queue.wait()
    assert setting.queue.is_done()
    assert sorted(ran) == list(range(30))
    assert [x.output.get() for x in closures] == [i * i for i in range(30)]
    assert (setting.queue.finished.low, setting.queue.finished.above()) == (30, [])
    setting.queue.stop()
    assert all(thread.join(10) for thread in threads)


def test_wait_is_idempotent_and_obeys_its_timeout(setting):
    setting.start(1)
    assert setting.queue.wait()
    assert setting.queue.wait()
    setting.put(lambda: setting.concurrency.sleep(0.3))
    assert not setting.queue.wait(0.01)
    assert setting.queue.wait(30)
    assert setting.queue.wait()


def test_a_closure_that_is_put_back_runs_next(setting):
    first, second = setting.put(), setting.put()
    got = setting.queue.get(0)
    assert got is first
    setting.queue.put_back(got, 0, "worker 0 has died")
    assert not setting.queue.is_done()
    assert setting.queue.get(0) is first
    assert first.retries == ["worker 0 has died"]
    assert setting.queue.get(1) is second
    setting.queue.put_back(second, 1, "again")
    setting.queue.put_back(first, 0, "again")
    assert setting.queue.get(0) is first  # in the order of their numbers
    for closure in (first, setting.queue.get(0)):
        setting.queue.finish(closure, 0, None)
    assert setting.queue.wait()


def test_only_closures_that_never_started_can_be_withdrawn(setting):
    first, second = setting.put(), setting.put()
    assert setting.queue.get(0) is first
    assert not setting.queue.withdraw(first.output)

    def fail(number):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        setting.queue.withdraw(second.output, fail)
    assert not second.output.done()
    recorded = []
    assert setting.queue.withdraw(second.output, recorded.append)
    assert recorded == [1]
    assert second.output.done()
    setting.queue.put_back(first, 0, "its worker has died")
    assert not setting.queue.withdraw(first.output)  # it has begun, and may have had effect
    assert setting.queue.get(0) is first
    setting.queue.finish(first, 0, None)
    assert setting.queue.wait()
    assert setting.queue.finished.low == 2
    with pytest.raises(CancelledError, match="closure 1, .* cancel.. of its RemoteValue"):
        second.output.fetch()
    third = setting.put(lambda: 7)
    assert third.number == 2
    assert not RemoteValue().cancel()  # of no queue


def test_withdrawing_a_closure_frees_its_place():
    setting = Setting(max_size=1, seed=0)
    first = setting.put()
    putting = setting.concurrency.start("schedule", setting.put)
    setting.concurrency.sleep(1.0)
    assert setting.queue.withdraw(first.output)
    assert putting.join(1.0)
    setting.close()


def test_only_running_closures_can_finish(setting):
    closure = setting.closure()
    for leave in (
        lambda: setting.queue.finish(closure, 0, 1),
        lambda: setting.queue.fail(closure, 0, ValueError()),
        lambda: setting.queue.put_back(closure, 0, ""),
    ):
        with pytest.raises(AssertionError, match="There is no closure under way"):
            leave()


@pytest.mark.parametrize("raise_by", ["wait", "is_done", "put"])
def test_an_error_is_raised_once_and_the_queue_is_usable_again(setting, raise_by):
    failing = setting.put(lambda: 1 / 0)
    closure = setting.queue.get(0)
    setting.queue.fail(closure, 0, ZeroDivisionError("of closure 0"))
    action = {"wait": setting.queue.wait, "is_done": setting.queue.is_done, "put": setting.put}
    with pytest.raises(ZeroDivisionError, match="of closure 0"):
        action[raise_by]()
    with pytest.raises(ZeroDivisionError):
        failing.output.get()
    assert setting.queue.wait()
    assert setting.queue.is_done()
    after = setting.put(lambda: 7)
    setting.start(1)
    assert setting.queue.wait()
    assert after.output.fetch() == 7


def test_the_first_error_is_raised_when_no_closure_runs(setting):
    first, second, third = setting.put(), setting.put(), None
    running = [setting.queue.get(i) for i in range(2)]
    assert running == [first, second]
    third = setting.put()
    setting.queue.fail(first, 0, KeyError("the first"))
    with pytest.raises(CancelledError, match="was canceled before it ran: closure 0"):
        third.output.get()
    order = []

    def end():
        setting.concurrency.sleep(0.05)
        order.append("ended")
        setting.queue.fail(second, 1, ValueError("the second"))

    thread = setting.concurrency.start("worker 1", end)
    with pytest.raises(KeyError, match="the first"):
        setting.queue.wait()
    order.append("raised")
    assert thread.join(10)
    assert order == ["ended", "raised"]
    with pytest.raises(ValueError, match="the second"):
        second.output.get()
    assert setting.queue.wait()


def test_a_closure_that_is_put_back_after_an_error_is_cancelled(setting):
    first, second = setting.put(), setting.put()
    for i in range(2):
        setting.queue.get(i)
    setting.queue.fail(first, 0, KeyError("the first"))
    setting.queue.put_back(second, 1, "worker 1 has died")
    with pytest.raises(CancelledError, match="before it ran again: another closure failed"):
        second.output.get()
    with pytest.raises(KeyError):
        setting.queue.is_done()
    assert setting.queue.is_done()


def test_put_waits_for_a_free_place():
    for seed in (None, 0, 1, 2):
        setting = Setting(2, seed)
        put = []

        def schedule(setting=setting, put=put):
            for i in range(5):
                setting.put(lambda i=i: i)
                put.append(i)

        thread = setting.concurrency.start("scheduling", schedule)
        assert not thread.join(0.2)
        assert put == [0, 1]
        setting.start(1)
        assert thread.join(10)
        assert setting.queue.wait()
        setting.close()


def test_a_full_queue_reports_why_it_waits(monkeypatch, caplog):
    monkeypatch.setattr("tpudist.coordinator.condition_wait.REPORT_S", 0.05)
    setting = Setting(1)
    setting.put()
    setting.queue.get(0)
    setting.put()
    thread = setting.concurrency.start("scheduling", setting.put)
    assert not thread.join(0.3)
    setting.start(1)
    assert thread.join(10)
    assert "schedule waits for one of the 1 places in the queue" in caplog.text
    assert "Running: closure 0, 'Setting.<lambda>' (test_closure_queue.py:" in caplog.text
    setting.close()


def test_an_error_ends_put():
    setting = Setting(1, 0)
    setting.put()
    running = setting.queue.get(0)
    setting.put()
    seen = []

    def schedule():
        try:
            setting.put()
        except KeyError as error:
            seen.append(error)

    thread = setting.concurrency.start("scheduling", schedule)
    assert not thread.join(1.0)
    setting.queue.fail(running, 0, KeyError("the first"))
    assert thread.join(10)
    assert len(seen) == 1
    assert setting.queue.is_done()


def test_a_stopped_queue_rejects_put_and_get(setting):
    running, waiting = setting.put(), setting.put()
    assert setting.queue.get(0) is running
    threads = []
    setting.queue.stop()
    assert not setting.queue.wait()  # as long as a closure runs
    setting.queue.put_back(running, 0, "its worker was lost")
    with pytest.raises(CancelledError, match="before it ran again: the run has ended"):
        running.output.get()
    assert setting.queue.wait()
    threads = setting.start(2)
    assert all(thread.join(10) for thread in threads)
    with pytest.raises(CancelledError, match="the run has ended"):
        waiting.output.get()
    with pytest.raises(CancelledError, match="was scheduled after its run ended"):
        setting.put()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_max_staleness_bounds_how_far_workers_run_ahead(staleness):
    for seed in range(10):
        setting = Setting(256, seed, max_staleness=staleness)
        queue, ahead, order = setting.queue, [], []
        chance = setting.concurrency

        def run(i, queue=queue, ahead=ahead, order=order, chance=chance):
            ahead.append(i - queue.finished.low)
            order.append(i)
            chance.sleep(0.1 * ((i * 7) % 3))

        setting.start(4)
        for i in range(24):
            setting.put(lambda i=i, run=run: run(i))
        assert queue.wait()
        assert max(ahead) == staleness
        if not staleness:
            assert order == list(range(24))
        setting.close()


def test_ten_threads_schedule_twenty_closures_each(setting):
    if isinstance(setting.concurrency, SeededConcurrency):
        pytest.skip("with threads of the system")
    setting.start(4)
    lock, ran = threading.Lock(), []

    def run():
        time.sleep(0.0005)
        with lock:
            ran.append(1)

    made = []

    def schedule():
        for _ in range(20):
            with lock:
                closure = setting.closure(run)
            setting.queue.put(closure)
            made.append(closure)

    threads = [threading.Thread(target=schedule) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert setting.queue.wait(60)
    assert len(ran) == len(made) == 200


def test_fetch_replaces_remote_values_in_nested_structures():
    import jax.numpy as jnp
    import numpy as np

    setting = Setting()
    closures = [setting.put(lambda i=i: {"x": jnp.full(2, i)}) for i in range(2)]
    assert "RemoteValue, not computed yet" in repr(closures[0].output)
    setting.start(1)
    found = fetch_all({"a": closures[0].output, "b": [closures[1].output, 7]})
    assert isinstance(found["a"]["x"], np.ndarray)
    assert found["b"][0]["x"].tolist() == [1, 1]
    assert found["b"][1] == 7
    assert "{'x'" in repr(closures[0].output)
    setting.close()
    with pytest.raises(AssertionError, match="needs one RemoteValue per worker"):
        PerWorkerValue([1])
