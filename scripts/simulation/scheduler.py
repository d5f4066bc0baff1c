"""Scheduler: runs tasks one at a time on virtual time, in an order that a seed determines.

A task is a greenlet, which costs a few kilobytes and a microsecond per switch: 4,096 processes have
25,000 of them. It runs until it waits. Events are a heap, ordered by time; a random number orders
events of the same time. So one seed gives one run, whatever the machine does.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

import greenlet


class Scheduler:
    """Virtual time, and what happens at each of its moments.

    Attributes:
        measures_cpu: Whether to measure the CPU time of tasks: that costs more than a switch.
        random: All randomness of the run.
        now_s: Virtual time.
        num_events: Number of events so far: a fingerprint of the run.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.now_s, self.num_events = 0.0, 0
        self.measures_cpu = False
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls `call` after some seconds."""
        self.at(self.now_s + seconds, call)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Calls `call` at a time."""
        self._number += 1
        event = max(when_s, self.now_s), self.random.random(), self._number, call
        heapq.heappush(self._events, event)

    def run(self, is_over: Callable[[], bool], until_s: float) -> bool:
        """Runs until `is_over()`, or until a time; returns whether it is over."""
        while not is_over():
            if not self._events or self._events[0][0] > until_s:
                return False
            self.now_s, _, _, call = heapq.heappop(self._events)
            self.num_events += 1
            call()
        return True


Waker = Callable[[float], None]


class Killed(greenlet.GreenletExit):
    """The process of a task has ended."""


class _Greenlet(greenlet.greenlet):
    task: Task


def current_task() -> Task:
    """Returns the task that runs now."""
    running = greenlet.getcurrent()
    assert isinstance(running, _Greenlet), "only a task can wait"
    return running.task


class Task:
    """A thread of a simulated process.

    Args:
        scheduler: Where it waits.
        run: What it does.
        defer: Called before it continues, with a function that lets it continue; returns whether it
            keeps that function for later, because the process is frozen.

    Attributes:
        cpu_ns: CPU time so far.
        has_ended: Whether it has returned, or was killed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        run: Callable[[], None],
        defer: Callable[[Callable[[], None]], bool],
    ):
        self.cpu_ns, self.has_ended = 0, False
        self._scheduler, self._defer = scheduler, defer
        self._greenlet = _Greenlet(run)
        self._greenlet.task = self
        # Each wait has a number, so that a late event of an earlier wait changes nothing.
        self._wait_number = 0
        self._waiting_for_end: list[Waker] = []
        self.waker()(0.0)

    def waker(self) -> Waker:
        """Returns a function that ends the next wait, after some seconds, and no later one."""
        number = self._wait_number
        return lambda after_s: self._scheduler.after(
            after_s, lambda: self._continue(number, woken=True)
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits, as this task, for a call of `waker()`; returns False after the timeout.

        Raises:
            Killed: If the process has ended meanwhile.
        """
        if self.has_ended:  # code that cleans up, after the end
            raise Killed
        if timeout_s is not None:
            number = self._wait_number
            self._scheduler.after(max(timeout_s, 1e-6), lambda: self._continue(number, woken=False))
        return self._scheduler_greenlet().switch()

    def kill(self) -> None:
        """Ends the task where it waits."""
        if self.has_ended:
            return
        self.has_ended = True
        if greenlet.getcurrent() is self._greenlet:
            return  # its caller raises
        if self._greenlet:  # it has begun
            self._greenlet.parent = greenlet.getcurrent()
            self._greenlet.throw(Killed)
        self._end()

    def join(self, other: Task, timeout_s: float | None) -> None:
        """Waits, as this task, for the end of another one."""
        if not other.has_ended:
            other._waiting_for_end.append(self.waker())
            self.wait(timeout_s)

    def _scheduler_greenlet(self) -> greenlet.greenlet:
        parent = self._greenlet.parent
        assert parent is not None
        return parent

    def _continue(self, number: int, woken: bool) -> None:
        if self.has_ended or number != self._wait_number:
            return
        if self._defer(lambda: self._continue(number, woken)):
            return
        self._wait_number += 1
        self._greenlet.parent = greenlet.getcurrent()
        start = time.thread_time_ns() if self._scheduler.measures_cpu else 0
        self._greenlet.switch(*([] if self._wait_number == 1 else [woken]))
        if self._scheduler.measures_cpu:
            self.cpu_ns += time.thread_time_ns() - start
        if self._greenlet.dead:
            self._end()

    def _end(self) -> None:
        self.has_ended = True
        waiting, self._waiting_for_end = self._waiting_for_end, []
        for wake in waiting:
            wake(0.0)
