"""ProgressSampler: takes samples of a run, and computes rates since earlier samples."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence, Set

from tpudist.coordinator.closure import RunningClosure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.closure_tally import ClosureTally, WorkerTally
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.progress.progress_sample import (
    ProgressSample,
    ServerProgress,
    WorkerFigures,
    is_slow,
    median_of,
    median_of_workers,
)
from tpudist.engine.concurrency import Concurrency
from tpudist.ps.server_figures import ServerFigures, ServerSurvey

NUM_COMPARED = 10
"""Number of samples over which rates are computed: the *recent* figures of `ProgressSample`."""


@dataclasses.dataclass(frozen=True)
class _Moment:
    """All counts at one moment. A rate is the difference of two moments."""

    now_s: float
    tally: ClosureTally
    num_finished: int
    num_waiting: int
    running: Mapping[int, RunningClosure]  # by worker
    restarts: Mapping[int, int]  # by worker, without removed ones
    starting: Set[int]
    staleness: Mapping[int, int]
    servers: Sequence[ServerFigures]


class ProgressSampler:
    """Takes samples, one after the other.

    It has no reference to the coordinator, whose garbage collection ends the run.

    Args:
        queue: The closures. All counts are taken under its condition, so they add up.
        dispatcher: The workers.
        survey: Asks the servers for their figures.
        staleness: Histogram that changes under the condition of the queue.
        concurrency: Provides the clock.
    """

    def __init__(
        self,
        queue: ClosureQueue,
        dispatcher: Dispatcher,
        survey: ServerSurvey,
        staleness: Mapping[int, int],
        concurrency: Concurrency,
    ):
        self._queue, self._dispatcher, self._survey = queue, dispatcher, survey
        self._staleness, self._concurrency = staleness, concurrency
        self._start_s = concurrency.now_s()
        # Lock order: `_turn`, then the condition of the queue. `_turn` is held while servers are
        # asked, so that several threads may take samples.
        self._turn = concurrency.condition()
        self._earlier: collections.deque[_Moment] = collections.deque(maxlen=NUM_COMPARED)

    def take(self, timeout_s: float) -> ProgressSample:
        """Returns a sample; waits at most `timeout_s` for servers."""
        with self._turn:
            # Servers are asked first, so their counts are up to `timeout_s` older than `now_s`.
            now = self._look(self._survey.ask(timeout_s))
            # The first sample has no rates, because no time has passed.
            rates = _Rates(self._earlier[0] if self._earlier else now, now)
            self._earlier.append(now)
        workers = now.tally.workers
        usual_s = median_of_workers(workers.values())
        numbers = sorted(workers.keys() | now.restarts.keys() | now.running.keys())
        return ProgressSample(
            time=time.time(),
            elapsed_s=now.now_s - self._start_s,
            finished=now.num_finished,
            done=sum(x.done for x in workers.values()),
            failed=sum(x.failed for x in workers.values()),
            cancelled=now.tally.cancelled,
            per_s=rates.of_all(),
            in_flight=len(now.running),
            waiting=now.num_waiting,
            retries=dict(sorted(now.tally.retries.items())),
            errors=dict(sorted(now.tally.errors.items())),
            staleness=now.staleness,
            staleness_of_late=rates.staleness(),
            workers=tuple(_make_figures(x, now, rates, usual_s) for x in numbers),
            servers=tuple(ServerProgress(x, *rates.traffic(x.server)) for x in now.servers),
        )

    def _look(self, servers: Sequence[ServerFigures]) -> _Moment:
        queue = self._queue
        with queue.changed:  # reentrant: the dispatcher's properties take it too
            return _Moment(
                self._concurrency.now_s(),
                queue.tally.copy(),
                len(queue.finished),
                queue.num_waiting,
                {x.worker: x for x in queue.running},
                self._dispatcher.restarts,
                self._dispatcher.starting,
                dict(sorted(self._staleness.items())),
                servers,
            )


def _make_figures(worker: int, now: _Moment, rates: _Rates, usual_s: float | None) -> WorkerFigures:
    tally, running = now.tally.workers.get(worker, WorkerTally()), now.running.get(worker)
    running_s = None if running is None else now.now_s - running.since_s
    if worker in now.starting:
        state = "starts"
    else:
        state = "idle" if worker in now.restarts else "left"
    return WorkerFigures(
        worker,
        state if running is None else "runs",
        done=tally.done,
        failed=tally.failed,
        retries=tally.retries,
        restarts=now.restarts.get(worker, 0),
        per_s=rates.of_worker(worker),
        median_s=median_of(tally),
        closure=None if running is None else running.closure.number,
        function="" if running is None else running.closure.function,
        running_s=running_s,
        is_slow=is_slow(tally, running_s, usual_s),
    )


class _Rates:
    """Rates between two moments; None if they are unknown."""

    def __init__(self, before: _Moment, now: _Moment):
        self._before, self._now = before, now

    def of_worker(self, worker: int) -> float | None:
        """Returns the closures per second of a worker."""
        none = WorkerTally()
        counts = (x.tally.workers.get(worker, none).done for x in (self._before, self._now))
        return self._rate(*counts)

    def of_all(self) -> float | None:
        """Returns the closures per second of all workers."""
        moments = (self._before, self._now)
        return self._rate(*(sum(w.done for w in x.tally.workers.values()) for x in moments))

    def staleness(self) -> float | None:
        """Returns the mean staleness."""
        before, now = self._before.staleness, self._now.staleness
        counts = {ahead: count - before.get(ahead, 0) for ahead, count in now.items()}
        num_updates = sum(counts.values())
        total = sum(ahead * count for ahead, count in counts.items())
        return total / num_updates if num_updates else None

    def traffic(self, server: int) -> tuple[float | None, float | None]:
        """Returns the bytes in and out per second of a server."""
        before, now = self._before.servers[server], self._now.servers[server]
        if before.age_s is None or now.age_s is None:  # it has not answered by then
            return None, None
        return (
            self._rate(before.bytes_in, now.bytes_in),
            self._rate(before.bytes_out, now.bytes_out),
        )

    def _rate(self, before: int, now: int) -> float | None:
        seconds = self._now.now_s - self._before.now_s
        return (now - before) / seconds if seconds > 0 else None
