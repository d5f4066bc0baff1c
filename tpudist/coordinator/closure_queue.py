"""ClosureQueue: what workers are to run, and the first error of those that have run.

One queue for all workers, of a bounded size, and one for each worker of what only that one may
run. An error empties them: what has not begun is cancelled, what is under way is waited for, and
then the error is raised once, by whoever puts, waits or asks next; after that all is as if nothing
had been.

As the queue of `tf.distribute.coordinator.ClusterCoordinator`, whose tests this passes, with some
differences: what is waited for is named, a closure that is put back is the next to be run, how far
workers may be ahead of the oldest closure that has not finished can be bounded, and a worker that
has nothing to do may run what another one is slow at. Then the first to finish counts, and an error
of one counts if nobody else runs the closure: who is slow may still finish it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable

from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_tally import ClosureTally
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.stragglers import Stragglers
from tpudist.engine.concurrency import Concurrency
from tpudist.errors import CancelledError
from tpudist.ps.closure_ledger import ClosureLedger

REPORT_S = 10.0
"""After which it is said for what is waited, and again after twice the time."""
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class RunningClosure:
    """A closure that a worker was given.

    Attributes:
        closure: Which.
        worker: The worker.
        since_s: When, by the clock of the engine.
    """

    closure: Closure
    worker: int
    since_s: float


class ClosureQueue:
    """Closures that wait for workers.

    Attributes:
        changed: The condition of all that is here, and of the RemoteValues.
        finished: The numbers of closures that will not run any more.
        tally: Counts them, by worker.
        withdrawn: Numbers of those that are not to be run when they come.
        num_scheduled: All that have a place have lower numbers.
        is_stopped: Whether nothing more is given to workers.
    """

    def __init__(
        self,
        max_size: int,
        concurrency: Concurrency,
        *,
        max_staleness: int | None = None,
        stragglers: Stragglers | None = None,
    ):
        """Empty.

        Args:
            max_size: How many may wait; `put` waits for a place.
            concurrency: Of the threads that use it.
            max_staleness: A closure is given to a worker only if at most so many older ones have
                not finished; None for any number.
            stragglers: Says which ones another worker runs as well; None for none.
        """
        self.changed = concurrency.condition()
        self.finished = ClosureLedger()
        self.tally = ClosureTally()
        self.withdrawn: set[int] = set()
        self.num_scheduled = 0
        self._concurrency, self._max_size = concurrency, max_size
        self._max_staleness, self._stragglers = max_staleness, stragglers
        self._waiting: collections.deque[Closure] = collections.deque()
        self._of_workers: dict[int, collections.deque[Closure]] = {}
        self._running: dict[int, Closure] = {}  # by `id`
        self._error: BaseException | None = None
        self.is_stopped = False

    # Who schedules.

    def put(self, closure: Closure, next_number: Callable[[], int] | None = None) -> None:
        """Adds a closure, once there is a place for it.

        Args:
            closure: What is to be run.
            next_number: Gives its number when it has a place: of several threads that wait for one
                the first to have it has the lower number, and is run earlier.

        Raises:
            Exception: One before it has failed; see the class.
            CancelledError: The queue was stopped.
        """
        with self.changed:
            if closure.worker is not None:
                self._of_workers.setdefault(closure.worker, collections.deque()).append(closure)
            else:
                self._wait(
                    lambda: len(self._waiting) < self._max_size or self._must_raise(),
                    lambda: f"schedule waits for one of the {self._max_size} places in the queue",
                )
                self._raise_if_error()
                if self.is_stopped:
                    raise CancelledError(f"{closure} was scheduled after its run ended.")
                if next_number is not None:
                    closure.number = next_number()
                self.num_scheduled = max(self.num_scheduled, _number(closure) + 1)
                if closure.number in self.withdrawn:
                    closure.output._is_withdrawn = True
                    self._cancel(closure, "an earlier program with this log canceled it")
                else:
                    self._waiting.append(closure)
            self.changed.notify_all()

    def withdraw(self, output: RemoteValue) -> int | None:
        """Has a closure that waits to be begun for the first time never run.

        Returns:
            Its number; None if no such closure has this output.
        """
        with self.changed:
            found = [x for x in self._waiting if x.output is output and not x.retries]
            for closure in found:
                self._waiting.remove(closure)
                output._is_withdrawn = True
                self._cancel(closure, "cancel() of its RemoteValue was called")
            return _number(found[0]) if found else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all have finished; whether they have, after at most `timeout_s`.

        Raises:
            Exception: One of them has failed; see the class.
        """
        end_s = None if timeout_s is None else self._concurrency.now_s() + timeout_s

        def left_s() -> float | None:
            return None if end_s is None else max(end_s - self._concurrency.now_s(), 0.0)

        with self.changed:
            while self._wait(
                lambda: self._is_done() or self._must_raise(),
                lambda: f"join waits for {len(self._waiting)} closure(s) without a worker",
                left_s(),
            ):
                if self._error is None:
                    return True
                if not self._raise_if_error(left_s()):
                    break
            return False

    def is_done(self) -> bool:
        """Whether all have finished.

        Raises:
            Exception: One of them has failed; see the class.
        """
        with self.changed:
            self._raise_if_error()
            return self._is_done()

    def stop(self) -> None:
        """Workers get nothing more, and what has not begun is cancelled."""
        with self.changed:
            self.is_stopped = True
            self._cancel_waiting("the run has ended")
            self.changed.notify_all()

    # Workers.

    def get(
        self,
        worker: int,
        timeout_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Closure | None:
        """The next closure for a worker.

        None if there is none in time, the queue was stopped, or the worker is not wanted any more
        (`changed` is to be told of that).
        """
        end_s = None if timeout_s is None else self._concurrency.now_s() + timeout_s
        with self.changed:
            while not self.is_stopped and is_wanted():
                closure = self._take(worker)
                now_s = self._concurrency.now_s()
                if closure is not None or (end_s is not None and now_s >= end_s):
                    return closure
                self._wait_for_work(worker, is_wanted, end_s)
            return None

    def claim(self, closure: Closure, worker: int) -> bool:
        """Says that a worker has come to the end of a closure; whether it is the first to.

        It is to say what has become of it then; one that is not the first has nothing more to say.
        """
        with self.changed:
            if closure.is_claimed:
                self._leave(closure, worker, "claim")
                return False
            closure.is_claimed = True
            return True

    def disclaim(self, closure: Closure) -> None:
        """Takes back that a closure has come to its end, since it could not be finished."""
        with self.changed:
            closure.is_claimed = False

    def finish(self, closure: Closure, worker: int, value: object) -> None:
        """Says that a worker has run a closure, and what it gave."""
        with self.changed:
            closure.is_claimed = True
            since_s = closure.workers.get(worker, 0.0)
            self._leave(closure, worker, "finish")
            del self._running[id(closure)]
            took_s = self._concurrency.now_s() - since_s
            if self._stragglers is not None:
                self._stragglers.note(closure, took_s)
            closure.output._set(value)
            if self._note_finished(closure):
                self.tally.finish(worker, took_s)

    def fail(self, closure: Closure, worker: int, error: BaseException) -> None:
        """Says that a closure has raised: the first error is kept, and nothing more is begun.

        Not if another worker runs it, which may finish it, or has.
        """
        with self.changed:
            if not self._leave(closure, worker, "fail"):
                return
            del self._running[id(closure)]
            closure.output._fail(error)
            if self._note_finished(closure):
                self.tally.fail(worker, error)
            if self._error is None:
                self._error = error
            self._cancel_waiting(f"{closure} failed")

    def put_back(self, closure: Closure, worker: int, why: str, cause: str = "put back") -> None:
        """Has a closure run again, before all others; cancelled if another one has failed.

        Not if another worker runs it, which may finish it, or has.

        Args:
            closure: Which.
            worker: Which worker has given it up.
            why: Why, in words.
            cause: Why, in a word or two, as it is counted.
        """
        with self.changed:
            if not self._leave(closure, worker, "put back"):
                return
            del self._running[id(closure)]
            _log.warning("%s runs again. %s", closure, why)
            closure.retries.append(why)
            if closure.worker is not None:
                self._of_workers.setdefault(closure.worker, collections.deque()).appendleft(closure)
            elif self._error is not None or self.is_stopped:
                self._cancel(closure, "another closure failed")
            else:  # in a place of its own: who has run it must not wait for one
                later = (i for i, x in enumerate(self._waiting) if _number(x) > _number(closure))
                self._waiting.insert(next(later, len(self._waiting)), closure)
                self.tally.put_back(worker, cause)
            self.changed.notify_all()

    def clear(self, worker: int) -> None:
        """Forgets what only a worker may run, because it is another one now."""
        with self.changed:
            for closure in self._of_workers.pop(worker, ()):
                self._cancel(closure, f"worker {worker} was replaced")

    # Who looks on, and holds the condition meanwhile.

    @property
    def num_waiting(self) -> int:
        """How many wait for any worker."""
        return len(self._waiting)

    @property
    def running(self) -> list[RunningClosure]:
        """What workers were given and have not finished."""
        return [
            RunningClosure(closure, worker, since_s)
            for closure in self._running.values()
            for worker, since_s in closure.workers.items()
        ]

    # Within; the condition is held.

    def _take(self, worker: int) -> Closure | None:
        source, now_s = self._next_for(worker), self._concurrency.now_s()
        if source is not None:
            closure = source.popleft()
            closure.is_claimed = False
            self._running[id(closure)] = closure
        else:
            closure = self._find_slow(now_s)
            if closure is None:
                return None
            assert self._stragglers is not None
            why = f"it is slow: {self._stragglers.describe(closure, now_s)}"
            _log.warning("%s: worker %d also runs it, because %s", closure, worker, why)
            closure.retries.append(why)
            self.tally.put_back(next(iter(closure.workers)), "slow")
        closure.workers[worker] = now_s
        self.changed.notify_all()
        return closure

    def _wait_for_work(
        self, worker: int, is_wanted: Callable[[], bool], end_s: float | None
    ) -> None:
        """Until there may be some, or it may be that another closure is the next to be slow."""
        slow_s = self._slow_s()
        until_s = min((x for x in (slow_s, end_s) if x is not None), default=None)
        left_s = None if until_s is None else max(until_s - self._concurrency.now_s(), 0.0)
        self.changed.wait_for(
            lambda: (
                self.is_stopped
                or not is_wanted()
                or self._next_for(worker) is not None
                or self._slow_s() != slow_s
            ),
            left_s,
        )

    def _slow_s(self) -> float | None:
        """When the first of those that run is to be run by another worker as well."""
        if self._stragglers is None or self._must_raise():
            return None
        slow = self._stragglers
        times = [slow.slow_s(x) for x in self._running.values() if _may_run_twice(x)]
        return min((x for x in times if x is not None), default=None)

    def _find_slow(self, now_s: float) -> Closure | None:
        slow_s = self._slow_s()
        if slow_s is None or slow_s > now_s:
            return None
        slow = self._stragglers
        assert slow is not None
        running = self._running.values()
        return next(x for x in running if _may_run_twice(x) and slow.slow_s(x) == slow_s)

    def _next_for(self, worker: int) -> collections.deque[Closure] | None:
        own = self._of_workers.get(worker)
        if own:
            return own
        if not self._waiting:
            return None
        ahead = _number(self._waiting[0]) - self.finished.low
        may_begin = self._max_staleness is None or ahead <= self._max_staleness
        return self._waiting if may_begin else None

    def num_unfinished(self) -> int:
        """How many wait or run, of those that any worker may run."""
        with self.changed:
            return len(self._waiting) + sum(x.worker is None for x in self._running.values())

    def _is_done(self) -> bool:
        return not self.num_unfinished()

    def _must_raise(self) -> bool:
        return self._error is not None or self.is_stopped

    def _leave(self, closure: Closure, worker: int, what: str) -> bool:
        """Says that a worker runs a closure no longer; whether that leaves nobody to finish it."""
        if worker not in closure.workers:
            raise AssertionError(f"There is no closure under way to {what}: {closure}.")
        del closure.workers[worker]
        self.changed.notify_all()
        return not closure.workers and not closure.is_claimed

    def _note_finished(self, closure: Closure) -> bool:
        """Whether it is one of those that are counted, and was not among them."""
        return closure.number is not None and self.finished.add(closure.number)

    def _cancel(self, closure: Closure, why: str) -> None:
        closure.output._fail(CancelledError(f"{closure} was canceled before it ran: {why}."))
        if self._note_finished(closure):
            self.tally.cancelled += 1
        self.changed.notify_all()

    def _cancel_waiting(self, why: str) -> None:
        while self._waiting:
            self._cancel(self._waiting.popleft(), why)

    def _raise_if_error(self, timeout_s: float | None = None) -> bool:
        """Raises an error when nothing is under way any more; False if that takes too long."""
        if self._error is None:
            return True
        came = self._wait(
            lambda: (
                self._error is None or not any(x.worker is None for x in self._running.values())
            ),
            lambda: "the error of a closure is raised when no other one runs any more",
            timeout_s,
        )
        if not came:
            return False
        error, self._error = self._error, None
        self.changed.notify_all()
        if error is not None:  # else another thread has raised it
            raise error
        return True

    def _wait(
        self,
        predicate: Callable[[], bool],
        describe: Callable[[], str],
        timeout_s: float | None = None,
    ) -> bool:
        """As `wait_for`, and says now and then for what is waited, and who runs what."""
        start_s, report_s = self._concurrency.now_s(), REPORT_S
        while True:
            waited_s = self._concurrency.now_s() - start_s
            left_s = report_s - waited_s
            if timeout_s is not None:
                left_s = min(left_s, timeout_s - waited_s)
            if self.changed.wait_for(predicate, max(left_s, 0.0)):
                return True
            waited_s = self._concurrency.now_s() - start_s
            if timeout_s is not None and waited_s >= timeout_s:
                return False
            if waited_s >= report_s:
                report_s = 2 * waited_s
                running = "; ".join(map(str, self._running.values())) or "none"
                _log.warning("%s: %.0f s. Running: %s.", describe(), waited_s, running)


def _may_run_twice(closure: Closure) -> bool:
    """Whether a second worker may run it: what it sees is the same there, and it is the second."""
    return len(closure.workers) == 1 and not closure.is_claimed and not closure.held


def _number(closure: Closure) -> int:
    assert closure.number is not None, "only those of one worker have none"
    return closure.number
