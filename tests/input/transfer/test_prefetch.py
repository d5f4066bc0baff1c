"""A thread prepares items ahead, or an otherwise idle loop does; never both."""

import contextvars
import itertools
import threading
import time
import weakref

import pytest

from tpudist.input.transfer.prefetch import Prefetcher


class Numbers:
    """Yields 0, 1, 2, ...; records the thread of each item, and whether two ran at once."""

    def __init__(self, end=None):
        self.made_by = []
        self.at_once = False
        self._busy = threading.Lock()
        self._numbers = itertools.count() if end is None else iter(range(end))

    def __iter__(self):
        return self

    def __next__(self):
        if not self._busy.acquire(blocking=False):
            self.at_once = True
        try:
            number = next(self._numbers)
            self.made_by.append(threading.get_ident())
            return number
        finally:
            self._busy.release()


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_idle_loop_prepares_its_items():
    numbers = Numbers(2000)
    assert list(Prefetcher(numbers, 2, may_run_in_loop=True)) == list(range(2000))
    assert numbers.made_by.count(threading.get_ident()) > 1000
    assert not numbers.at_once


def test_an_iterator_that_belongs_to_one_thread_stays_in_it():
    numbers = Numbers(2000)
    assert list(Prefetcher(numbers, 2)) == list(range(2000))
    assert len(set(numbers.made_by)) == 1
    assert threading.get_ident() not in numbers.made_by


def test_the_thread_prepares_items_while_the_loop_is_busy():
    """This includes a loop that prepared all items so far. The buffer size is never exceeded."""
    numbers = Numbers()
    prefetcher = Prefetcher(numbers, 2, may_run_in_loop=True)
    for number in range(200):
        assert next(prefetcher) == number
    wait_until(lambda: len(numbers.made_by) == 202)
    time.sleep(0.02)
    assert len(numbers.made_by) == 202
    assert threading.get_ident() not in numbers.made_by[-2:]
    prefetcher.close()


def test_slow_steps_find_items_ready():
    numbers = Numbers()
    prefetcher = Prefetcher(numbers, 2, may_run_in_loop=True)
    for number in range(20):
        assert next(prefetcher) == number
        wait_until(lambda number=number: len(numbers.made_by) == number + 3)
    assert threading.get_ident() not in numbers.made_by[1:]
    prefetcher.close()


@pytest.mark.parametrize("pauses", [(0,), (0, 0.003), (0, 0, 0.0002), (0.0001,), (0.003,)])
def test_no_item_is_lost_or_prepared_twice_for_any_timing_of_the_loop(pauses):
    numbers = Numbers(400)
    seen = []
    for number, pause_s in zip(
        Prefetcher(numbers, 2, may_run_in_loop=True), itertools.cycle(pauses), strict=False
    ):
        seen.append(number)
        if pause_s:
            time.sleep(pause_s)
    assert seen == list(range(400))
    assert not numbers.at_once


def test_an_error_of_an_iterator_is_raised_once_from_the_thread_or_the_loop():
    def items():
        yield from range(100)
        raise KeyError("in the source")

    for may_run_in_loop in (False, True):
        prefetcher = Prefetcher(items(), 2, may_run_in_loop=may_run_in_loop)
        with pytest.raises(KeyError, match="in the source") as info:
            list(prefetcher)
        assert any(entry.name == "items" for entry in info.traceback)
        assert list(prefetcher) == []


def test_items_are_prepared_in_the_context_of_the_start_of_the_pass():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    prefetcher = Prefetcher((variable.get() for _ in range(50)), 1, may_run_in_loop=True)
    variable.set(8)
    assert list(prefetcher) == [7] * 50


def test_several_loops_may_share_one_prefetcher():
    numbers = Numbers(2000)
    prefetcher = Prefetcher(numbers, 2, may_run_in_loop=True)
    taken = [[] for _ in range(3)]
    threads = [threading.Thread(target=lambda x=x: x.extend(prefetcher)) for x in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(itertools.chain(*taken)) == list(range(2000))
    assert not numbers.at_once


def test_an_unreferenced_prefetcher_ends_its_thread():
    """This includes a prefetcher whose loop prepared all items."""
    before = threading.active_count()
    prefetcher = Prefetcher(Numbers(), 2, may_run_in_loop=True)
    for _ in range(100):
        next(prefetcher)
    gone = weakref.ref(prefetcher)
    del prefetcher
    assert gone() is None
    wait_until(lambda: threading.active_count() <= before)


def test_items_have_a_limit_of_bytes():
    """Items may become larger than the first one."""
    made = []

    def items():
        for i in range(20):
            made.append(i)
            yield bytes(1 if i < 4 else 100)

    prefetcher = Prefetcher(items(), 8, max_bytes=150, count_bytes=len)
    most = 0
    for number, _ in enumerate(prefetcher, 1):
        # Those that wait, and one that is being made.
        most = max(most, sum(1 if i < 4 else 100 for i in made[number:]))
    assert len(made) == 20
    assert 0 < most <= 150 + 2 * 100
