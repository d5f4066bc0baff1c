"""SystemConcurrency: conditions of real threads."""

import signal
import threading
import time

import pytest

from tpudist.engine import concurrency
from tpudist.engine.concurrency import SystemConcurrency


def start_waiting(condition, predicate):
    """Starts a thread that waits; returns it, and a list for its outcome."""
    waits, outcome = threading.Event(), []

    def evaluate():
        waits.set()
        return predicate()

    def run():
        with condition:
            try:
                outcome.append(condition.wait_for(evaluate))
            except ZeroDivisionError as error:
                outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    waits.wait()
    with condition:  # only free when the thread waits
        pass
    return thread, outcome


def test_a_notification_wakes_only_threads_whose_predicate_holds():
    """Waking another thread would cost two switches of threads."""
    condition, ready, evaluated_in = SystemConcurrency().condition(), [], []

    def is_ready():
        evaluated_in.append(threading.current_thread())
        return bool(ready)

    thread, outcome = start_waiting(condition, is_ready)
    for _ in range(10):
        with condition:
            condition.notify_all()
    assert evaluated_in == [thread, *[threading.current_thread()] * 10]
    with condition:
        ready.append(True)
        condition.notify_all()
    thread.join()
    assert outcome == [True]
    assert evaluated_in.count(thread) == 2


def test_changes_after_a_notification_in_the_same_block_count():
    condition, ready = SystemConcurrency().condition(), []
    thread, outcome = start_waiting(condition, lambda: bool(ready))
    with condition, condition:
        condition.notify_all()
        ready.append(True)
    thread.join()
    assert outcome == [True]


def test_a_thread_that_begins_to_wait_wakes_those_it_has_notified():
    condition, ready = SystemConcurrency().condition(), []
    thread, outcome = start_waiting(condition, lambda: bool(ready))
    with condition, condition:
        ready.append(True)
        condition.notify_all()
        assert not condition.wait_for(lambda: not ready, 0.01)
    thread.join()
    assert outcome == [True]


def test_an_error_of_a_predicate_is_raised_in_the_thread_that_waits():
    condition, divisor = SystemConcurrency().condition(), [1]
    thread, outcome = start_waiting(condition, lambda: 1 // divisor[0] > 1)
    with condition:
        divisor[0] = 0
        condition.notify_all()
    thread.join()
    assert isinstance(outcome[0], ZeroDivisionError)


def test_each_notification_of_one_wakes_another_thread():
    """Also before the first thread has run: each of them handles one change."""
    condition, changes = SystemConcurrency().condition(), []
    threads = [start_waiting(condition, lambda: bool(changes))[0] for _ in range(4)]
    with condition:
        changes += [1, 2]
        condition.notify_one()
        condition.notify_one()
    for thread in threads[:2]:
        thread.join()
    assert [x.is_alive() for x in threads] == [False, False, True, True]
    with condition:
        condition.notify_all()
    for thread in threads:
        thread.join()


def test_a_notification_between_two_lines_of_another_one_is_not_lost():
    """A finalizer may notify at any time, in the thread that wakes others."""
    condition, woken = SystemConcurrency().condition(), []
    lock, waiting = condition._lock, condition._waiting
    for i in range(3):
        waiting.add(Turn(lambda i=i: woken.append(i)), lambda: True)

    class Interrupted(type(waiting._counts)):
        def popleft(self):
            count = super().popleft()
            if interruptions:
                interruptions.pop()()
            return count

    waiting._counts = Interrupted()
    interruptions = [waiting.notify_one]
    waiting.notify_one()
    lock.wake_notified()
    assert woken == [0, 1]
    waiting.notify_all()
    lock.wake_notified()
    assert woken == [0, 1, 2]


class Turn:
    def __init__(self, release):
        self.release = release


def test_a_turn_that_was_given_too_late_is_not_given_again(monkeypatch):
    """The wait had ended by its timeout, and the predicate did not hold any more."""
    condition, ready = SystemConcurrency().condition(), []
    times = iter([0.0, 0.0, 0.0, 1e9])  # the first timeout comes a little early

    def add(turn, predicate):
        turns.append(turn)
        add_before(turn, predicate)

    turns, add_before = [], condition._waiting.add
    monkeypatch.setattr(condition._waiting, "add", add)
    monkeypatch.setattr(concurrency.time, "monotonic", lambda: next(times))

    def return_to(entered):
        return_before(entered)
        if len(turns) == 1:
            ready.append(1)
            condition.notify_all()
            condition._lock.wake_notified()  # as another thread does it at this moment
            condition._lock.depth = entered[0]
            ready.clear()

    return_before = condition._lock.return_to
    monkeypatch.setattr(condition._lock, "return_to", return_to)
    with condition:
        assert not condition.wait_for(lambda: bool(ready), 0.001)
    assert len(turns) >= 2
    assert len(set(map(id, turns))) == len(turns)


def test_branches_share_a_lock_but_not_notifications():
    condition = SystemConcurrency().condition()
    branch, evaluated, ready = condition.branch(), [], []
    thread, outcome = start_waiting(branch, lambda: evaluated.append(1) or bool(ready))
    with condition:
        ready.append(1)
        condition.notify_all()
        assert len(evaluated) == 1
    assert len(evaluated) == 1
    with condition, branch:
        branch.notify_one()
    thread.join()
    assert outcome == [True]


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_a_wait_ends_after_its_timeout(timeout_s):
    condition = SystemConcurrency().condition()
    with condition, condition:
        assert not condition.wait_for(lambda: False, timeout_s)
        assert condition.wait_for(lambda: True, timeout_s)
    with condition:  # it is free: another thread can enter
        pass
    thread, outcome = start_waiting(condition, lambda: True)
    thread.join()
    assert outcome == [True]


def test_an_interrupt_while_another_thread_has_the_lock_breaks_nothing():
    """Ctrl-C in a wait: later threads that wait for the condition must still be woken."""
    condition, is_waiting = SystemConcurrency().condition(), threading.Event()
    waiting = threading.main_thread()

    def keep_lock():
        is_waiting.wait()
        with condition:  # free when the main thread waits, whose time is then over
            time.sleep(0.05)
            signal.pthread_kill(waiting.ident, signal.SIGINT)
            time.sleep(0.05)

    thread = threading.Thread(target=keep_lock)
    thread.start()

    def wait():
        with condition:
            is_waiting.set()
            condition.wait_for(lambda: False, 0.02)

    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join()
    ready = []
    thread, outcome = start_waiting(condition, lambda: bool(ready))
    with condition:
        ready.append(0)
        condition.notify_all()
    thread.join(20)
    assert outcome == [True]
