"""SeededConcurrency: races that are replayed from a seed."""

import threading
from collections import Counter

import pytest

from tpudist.engine.seeded_concurrency import MIN_WAIT_S, AllWait, SeededConcurrency
from tpudist.engine.thread_engine import ThreadEngine


class Cell:
    """A number that is read and written in two calls, so that an addition may be lost."""

    def __init__(self):
        self.value = 0

    def read(self):
        return self.value

    def write(self, value):
        self.value = value
        return value


class Adder:
    def __init__(self, engine, cell):
        self.engine, self.cell = engine, cell

    def add(self, count):
        for _ in range(count):
            value = self.engine.result(self.engine.call(self.cell, "read"))
            self.engine.result(self.engine.call(self.cell, "write", value + 1))


def race(seed, count=20):
    """Returns the result of two workers that add to a cell, and the order of all events."""
    engine = ThreadEngine(seed)
    cell = engine.spawn("ps", 0, Cell)
    workers = [engine.spawn("worker", i, Adder, engine, cell) for i in range(2)]
    for future in [engine.call(x, "add", count) for x in workers]:
        engine.result(future)
    value = engine.result(engine.call(cell, "read"))
    engine.shutdown()
    return value, list(engine.concurrency.history)


def test_one_seed_gives_one_order_of_a_thousand_events():
    value, history = race(7, count=130)
    assert len(history) > 1000
    for _ in range(3):
        assert race(7, count=130) == (value, history)


def test_a_hundred_seeds_give_many_orders_of_events():
    found = [race(seed, count=4) for seed in range(100)]
    assert len({tuple(history) for _, history in found}) > 90
    values = Counter(value for value, _ in found)
    assert min(values) < 8  # an addition was lost
    assert len(values) > 2
    assert all(race(seed, count=4) == found[seed] for seed in range(0, 100, 10))


def test_time_passes_only_when_all_threads_wait():
    concurrency = SeededConcurrency(0)
    condition = concurrency.condition()
    events = []

    def wait():
        with condition:
            came = condition.wait_for(lambda: "told" in events, 1000.0)
        events.append(("waited", came, concurrency.now_s()))

    def tell():
        concurrency.sleep(600.0)
        with condition:
            events.append("told")
            condition.notify_all()

    threads = [concurrency.start("waiting", wait), concurrency.start("telling", tell)]
    assert threads[0].join(2000.0)
    assert events == ["told", ("waited", True, 600.0)]
    assert threads[1].join()
    with condition:
        assert not condition.wait_for(lambda: False, 50.0)
    assert concurrency.now_s() == 650.0


def test_a_condition_excludes_other_threads():
    for seed in range(20):
        concurrency = SeededConcurrency(seed)
        condition = concurrency.condition()
        inside, most = [], []

        def work(concurrency=concurrency, condition=condition, inside=inside, most=most):
            for _ in range(3):
                with condition, condition:  # again, as a lock that may be entered twice
                    inside.append(1)
                    concurrency.sleep(0.01)
                    most.append(len(inside))
                    inside.pop()

        threads = [concurrency.start(f"thread {i}", work) for i in range(3)]
        assert all(thread.join() for thread in threads)
        assert most == [1] * 9


def test_each_notification_of_one_wakes_another_waiting_thread():
    for seed in range(20):
        concurrency = SeededConcurrency(seed)
        condition = concurrency.condition()
        waiting, changes, woken = condition.branch(), [], []

        def wait(i, waiting=waiting, changes=changes, woken=woken):
            with waiting:
                waiting.wait_for(lambda: bool(changes))
                woken.append(i)

        for i in range(4):
            concurrency.start(f"thread {i}", lambda i=i, wait=wait: wait(i))
        concurrency.sleep(1.0)
        with condition:
            changes.append(1)
            condition.notify_all()  # nobody waits for it
        concurrency.sleep(1.0)
        assert not woken
        for count in (1, 2):
            with waiting:
                waiting.notify_one()
            concurrency.sleep(1.0)
            assert len(woken) == count
        with condition:
            waiting.notify_all()
        concurrency.sleep(1.0)
        assert sorted(woken) == [0, 1, 2, 3]


def test_a_deadlock_is_raised_in_the_main_thread():
    concurrency = SeededConcurrency(0)
    first = concurrency.condition()

    def wait():
        with first:
            first.wait_for(lambda: False)

    thread = concurrency.start("one", wait)
    with pytest.raises(AllWait, match="main waits for the end of one; one waits for a change"):
        thread.join()
    with first, pytest.raises(AllWait):
        first.wait_for(lambda: False)


def test_foreign_threads_raise_an_error():
    concurrency = SeededConcurrency(0)
    found = []

    def use():
        try:
            concurrency.sleep(1)
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=use, name="of somebody")
    thread.start()
    thread.join()
    assert "The thread 'of somebody' uses objects that are replayed from a seed" in found[0]


def test_waits_until_a_moment_end_despite_rounding():
    """Otherwise `while now < end: wait(end - now)` would never end, because no time passes."""
    concurrency = SeededConcurrency(0)
    concurrency.sleep(1e9)
    changed, began_s = concurrency.condition(), concurrency.now_s()
    with changed:
        assert not changed.wait_for(lambda: False, 1e-9)
        assert concurrency.now_s() > began_s
        assert not changed.wait_for(lambda: False, 0.0)
    concurrency.sleep(0.0)
    assert concurrency.now_s() == pytest.approx(began_s + MIN_WAIT_S, abs=1e-6)
