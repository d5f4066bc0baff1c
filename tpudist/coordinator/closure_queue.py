"""ClosureQueue: the closures that wait for workers, and the first error.

There is one bounded queue for all workers. An error empties it: waiting closures are canceled and
running ones finish. Then the next `put`, `wait` or `is_done` raises the error, once, and the queue
is usable again.

Mirrors the queue of `tf.distribute.coordinator.ClusterCoordinator` and passes its tests. In
addition it reports long waits, runs a closure that was put back before all waiting ones, bounds how
far workers run ahead of the oldest unfinished closure, and starts slow closures a second time.
"""

# States of a closure; `changed` guards all of them:
#
#     put -> waiting -> running -> finished (result, error or canceled)
#               ^          |
#               +----------+  put_back: its worker or a server was lost
#
# A closure runs on one worker, or on two if it was slow. `claim` decides which of the two results
# counts, before anything about the result is recorded. An error or a loss on one worker counts only
# if no other worker runs the closure (`_leave`), because that one may still complete it.
#
# Lock order: `changed` is taken first. `RemoteValue`s share it, so a result and the queue change at
# the same moment. Callbacks under it (`next_number`, `is_wanted`) must not wait. The condition is
# reentrant, because `RemoteValue.cancel` and observers hold it while they call methods that take it
# again.

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

from tpudist.coordinator.closure import Closure, RunningClosure
from tpudist.coordinator.closure_tally import ClosureTally
from tpudist.coordinator.condition_wait import wait_and_report
from tpudist.coordinator.idle_workers import IdleWorkers
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.stragglers import Stragglers
from tpudist.engine.concurrency import Concurrency
from tpudist.errors import CancelledError
from tpudist.ps.closure_ledger import ClosureLedger

_log = logging.getLogger("tpudist")


class ClosureQueue:
    """Closures that wait for workers.

    Args:
        max_size: Maximum number of waiting closures; `put` waits for a free place.
        concurrency: Provides the condition and the clock.
        max_staleness: Maximum number of older closures that may be unfinished when a closure
            starts; None for any number.
        stragglers: Chooses slow closures for a second worker; None never does.

    Attributes:
        changed: Condition that guards the queue and its RemoteValues. It is notified when a closure
            starts or ends, for the threads of the program, but not for workers and RemoteValues,
            whose number grows.
        idle_workers: Workers that wait in `get`.
        finished: Numbers of closures that will not run again.
        tally: Counts of closures, by worker.
        withdrawn: Numbers of closures that are canceled as soon as they are put.
        end_number: Every closure that was put has a lower number.
        is_stopped: Whether workers receive no more closures.
    """

    def __init__(
        self,
        max_size: int,
        concurrency: Concurrency,
        *,
        max_staleness: int | None = None,
        stragglers: Stragglers | None = None,
    ):
        self.changed = concurrency.condition()
        self.finished = ClosureLedger()
        self.tally = ClosureTally()
        self.withdrawn: set[int] = set()
        self.end_number = 0
        self._concurrency, self._max_size = concurrency, max_size
        self._max_staleness, self._stragglers = max_staleness, stragglers
        self.idle_workers = IdleWorkers(
            self.changed, concurrency, None if stragglers is None else self._next_slow
        )
        self._waiting: collections.deque[Closure] = collections.deque()
        self._running: dict[int, Closure] = {}  # by number
        self._error: BaseException | None = None
        self.is_stopped = False

    # For threads that schedule closures.

    def put(self, closure: Closure, next_number: Callable[[], int] | None = None) -> None:
        """Adds a closure, as soon as the queue has a free place.

        Args:
            closure: Closure to run.
            next_number: Called for the number of the closure once it has a place. If several
                threads wait for places, the first to get one has the lowest number and runs first.

        Raises:
            Exception: If an earlier closure failed; see the module.
            CancelledError: If the queue was stopped.
        """
        with self.changed:
            self._wait(
                lambda: len(self._waiting) < self._max_size or self._is_interrupted(),
                lambda: f"schedule waits for one of the {self._max_size} places in the queue",
            )
            self._raise_if_error()
            if self.is_stopped:
                raise CancelledError(f"{closure} was scheduled after its run ended.")
            if next_number is not None:
                closure.number = next_number()
            self.end_number = max(self.end_number, closure.number + 1)
            if closure.number in self.withdrawn:
                self._withdraw(closure, "an earlier program with this log canceled it")
            else:
                self._waiting.append(closure)
                self.idle_workers.wake_one()

    def withdraw(
        self, output: RemoteValue, record: Callable[[int], None] = lambda number: None
    ) -> bool:
        """Cancels the waiting closure with this output, unless a worker has ever started it.

        Args:
            output: Output of the closure.
            record: Called with its number before it is canceled. If it raises, the closure stays.

        Returns:
            Whether the closure was canceled.
        """
        with self.changed:
            # A closure with retries has run, and a server may have applied some of its updates.
            for closure in self._waiting:
                if closure.output is output and not closure.retries:
                    record(closure.number)
                    self._waiting.remove(closure)
                    self._withdraw(closure, "cancel() of its RemoteValue was called")
                    return True
            return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` until all closures have finished; returns whether they have.

        It does not wait any longer after the queue was stopped.

        Raises:
            Exception: If a closure failed; see the module.
        """
        end_s = None if timeout_s is None else self._concurrency.now_s() + timeout_s
        with self.changed:
            while self._wait(
                lambda: self._is_done() or self._is_interrupted(),
                lambda: f"join waits for {len(self._waiting)} closure(s) without a worker",
                self._left_s(end_s),
            ):
                if self._error is None:
                    return self._is_done()
                if not self._raise_if_error(self._left_s(end_s)):
                    break
            return False

    def is_done(self) -> bool:
        """Returns whether all closures have finished.

        Raises:
            Exception: If a closure failed; see the module.
        """
        with self.changed:
            self._raise_if_error()
            return self._is_done()

    def stop(self) -> None:
        """Cancels all waiting closures, and gives workers no more."""
        with self.changed:
            self.is_stopped = True
            self._cancel_waiting("the run has ended")
            self.changed.notify_all()
            self.idle_workers.wake_all()

    # For the threads of workers.

    def get(
        self,
        worker: int,
        timeout_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Closure | None:
        """Waits for the next closure of a worker.

        Args:
            worker: Number of the worker.
            timeout_s: Maximum seconds to wait; None for no limit.
            is_wanted: Called to ask whether the worker still needs a closure. Call
                `idle_workers.wake_all` when the answer changes.

        Returns:
            The closure. None after the timeout, if the queue was stopped, or if the worker is no
            longer wanted.
        """
        end_s = None if timeout_s is None else self._concurrency.now_s() + timeout_s
        with self.changed:
            closure = None
            while not self.is_stopped and is_wanted():
                closure = self._take(worker)
                is_late = end_s is not None and self._concurrency.now_s() >= end_s
                if closure is not None or is_late:
                    break
                self.idle_workers.wait(
                    lambda: self.is_stopped or not is_wanted() or self._may_start(), end_s
                )
            # One finished closure may have let several start, or this worker was the watcher.
            if self._max_staleness is not None or self._stragglers is not None:
                self.idle_workers.wake_one()
            return closure

    def claim(self, closure: Closure, worker: int) -> bool:
        """Records that a worker completed a closure; returns whether it is the first to do so.

        The first must call `finish` next, or `disclaim`. The other result is dropped.
        """
        with self.changed:
            if closure.is_claimed:
                self._leave(closure, worker, "claim")
                return False
            closure.is_claimed = True
            self._update_stragglers(closure)
            return True

    def disclaim(self, closure: Closure) -> None:
        """Undoes `claim`, because the result could not be recorded."""
        # If another worker completed the closure meanwhile, its result was dropped: then the
        # caller's `fail` or `put_back` decides.
        with self.changed:
            closure.is_claimed = False
            self._update_stragglers(closure)

    def finish(self, closure: Closure, worker: int, value: object) -> None:
        """Stores the result of a closure."""
        with self.changed:
            closure.is_claimed = True
            since_s = closure.workers.get(worker, 0.0)  # `_leave` raises an error if it is missing
            self._leave(closure, worker, "finish")
            del self._running[closure.number]
            duration_s = self._concurrency.now_s() - since_s
            if self._stragglers is not None:
                self._stragglers.record(closure, duration_s)
            closure.output._set(value)
            if self._add_finished(closure):
                self.tally.record_result(worker, duration_s)

    def fail(self, closure: Closure, worker: int, error: BaseException) -> None:
        """Stores the error of a closure, and cancels all waiting closures.

        Has no effect if another worker runs the closure, or has completed it.
        """
        with self.changed:
            if not self._leave(closure, worker, "fail"):
                return
            del self._running[closure.number]
            closure.output._fail(error)
            if self._add_finished(closure):
                self.tally.record_error(worker, error)
            if self._error is None:
                self._error = error
            self._cancel_waiting(f"{closure} failed")

    def put_back(self, closure: Closure, worker: int, why: str, cause: str = "put back") -> None:
        """Puts a closure back to run before all later ones; cancels it after an error.

        Has no effect if another worker runs the closure, or has completed it.

        Args:
            closure: Closure that runs on `worker`.
            worker: Worker that gave it up.
            why: Reason, as a sentence.
            cause: Reason in a word or two, for the counts.
        """
        with self.changed:
            if not self._leave(closure, worker, "put back"):
                return
            del self._running[closure.number]
            _log.warning("%s runs again. %s", closure, why)
            closure.retries.append(why)
            if self._is_interrupted():
                cause = "the run has ended" if self._error is None else "another closure failed"
                self._cancel(closure, cause, "before it ran again")
            else:
                # `_waiting` stays sorted by number, so that its head is the oldest unfinished
                # closure (`_may_start`). This exceeds `max_size` by at most the number of workers;
                # to wait for a place here would deadlock the only threads that free places.
                later = (i for i, x in enumerate(self._waiting) if x.number > closure.number)
                self._waiting.insert(next(later, len(self._waiting)), closure)
                self.tally.record_retry(worker, cause)
                self.idle_workers.wake_one()

    # For observers; they hold `changed`.

    @property
    def num_waiting(self) -> int:
        """Number of closures that wait for any worker."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running closures."""
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> list[RunningClosure]:
        """Closures that workers run now. A closure with two workers appears twice."""
        return [
            RunningClosure(closure, worker, since_s)
            for closure in self._running.values()
            for worker, since_s in closure.workers.items()
        ]

    # The methods below run under `changed`.

    def _take(self, worker: int) -> Closure | None:
        now_s = self._concurrency.now_s()
        if self._may_start():
            closure = self._waiting.popleft()
            self._running[closure.number] = closure
        else:
            slow = self._next_slow()
            if slow is None or slow[0] > now_s:
                return None
            closure = slow[1]
            assert self._stragglers is not None
            why = f"it is slow: {self._stragglers.describe(closure, now_s)}"
            _log.warning("%s: worker %d also runs it, because %s", closure, worker, why)
            closure.retries.append(why)
            self.tally.record_retry(next(iter(closure.workers)), "slow")
        closure.workers[worker] = now_s
        self._update_stragglers(closure)
        self.changed.notify_all()
        return closure

    def _left_s(self, end_s: float | None) -> float | None:
        return None if end_s is None else max(end_s - self._concurrency.now_s(), 0.0)

    def _next_slow(self) -> tuple[float, Closure] | None:
        if self._stragglers is None or self._is_interrupted():
            return None
        return self._stragglers.find_next()

    def _update_stragglers(self, closure: Closure) -> None:
        if self._stragglers is not None:
            self._stragglers.update(closure)
            self.idle_workers.set_timer()

    def _add_finished(self, closure: Closure) -> bool:
        if self._max_staleness is not None:  # other closures may start now
            self.idle_workers.wake_one()
        return self.finished.add(closure.number)

    def _may_start(self) -> bool:
        """Returns whether a worker may start the next closure."""
        if not self._waiting:
            return False
        # The head of the queue has the lowest waiting number. All numbers below `finished.low` have
        # finished, so at most `ahead` older closures are unfinished. `max_staleness=0` runs one
        # closure at a time; no bound can deadlock, because the oldest one has `ahead == 0`.
        ahead = self._waiting[0].number - self.finished.low
        return self._max_staleness is None or ahead <= self._max_staleness

    def _is_done(self) -> bool:
        return not self.num_unfinished

    def _is_interrupted(self) -> bool:
        """Returns whether an error or `stop` keeps waiting closures from running."""
        return self._error is not None or self.is_stopped

    def _leave(self, closure: Closure, worker: int, action: str) -> bool:
        """Removes a worker from a closure; returns whether no worker can complete it any more."""
        if worker not in closure.workers:
            raise AssertionError(f"There is no closure under way to {action}: {closure}.")
        del closure.workers[worker]
        self._update_stragglers(closure)
        self.changed.notify_all()
        return not closure.workers and not closure.is_claimed

    def _withdraw(self, closure: Closure, why: str) -> None:
        closure.output._is_withdrawn = True
        self._cancel(closure, why)

    def _cancel(self, closure: Closure, why: str, when: str = "before it ran") -> None:
        closure.output._fail(CancelledError(f"{closure} was canceled {when}: {why}."))
        if self._add_finished(closure):
            self.tally.cancelled += 1
        self.changed.notify_all()

    def _cancel_waiting(self, why: str) -> None:
        while self._waiting:
            self._cancel(self._waiting.popleft(), why)

    def _raise_if_error(self, timeout_s: float | None = None) -> bool:
        """Raises the error once no closure runs any more; returns False after the timeout.

        As in TensorFlow, nothing is in flight when an error is raised, so the caller may change
        variables. Several threads may wait here: the first clears the error and raises it.
        """
        if self._error is None:
            return True
        is_idle = self._wait(
            lambda: self._error is None or not self._running,
            lambda: "the error of a closure is raised when no other one runs any more",
            timeout_s,
        )
        if not is_idle:
            return False
        error, self._error = self._error, None
        self.changed.notify_all()
        if error is not None:
            raise error
        return True

    def _wait(
        self,
        predicate: Callable[[], bool],
        describe: Callable[[], str],
        timeout_s: float | None = None,
    ) -> bool:
        def report(waited_s: float) -> str:
            running = "; ".join(map(str, self._running.values())) or "none"
            return f"{describe()}: {waited_s:.0f} s. Running: {running}."

        return wait_and_report(self.changed, self._concurrency, predicate, report, timeout_s)
