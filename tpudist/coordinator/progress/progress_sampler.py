"""ProgressSampler: takes samples of a run, and computes rates since earlier samples."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping

from tpudist.coordinator.closure_queue import ClosureQueue, RunningClosure
from tpudist.coordinator.closure_tally import WorkerTally
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
"""Number of samples over which rates are computed."""


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Totals at one moment. A rate is the difference of two totals."""

    now_s: float
    done: Mapping[int, int]
    staleness: tuple[int, int]
    traffic: Mapping[int, tuple[int, int]]


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
        self._turn = (
            concurrency.condition()
        )  # held while a sample is taken: any thread may ask for one
        self._earlier: collections.deque[_Counts] = collections.deque(maxlen=NUM_COMPARED)

    def take(self, timeout_s: float) -> ProgressSample:
        """Returns a sample; waits at most `timeout_s` for servers."""
        with self._turn:
            return self._take(self._survey.ask(timeout_s))

    def _take(self, servers: list[ServerFigures]) -> ProgressSample:
        queue = self._queue
        with queue.changed:  # reentrant: the dispatcher's properties take it too
            now_s = self._concurrency.now_s()
            tally, finished, waiting = queue.tally.copy(), len(queue.finished), queue.num_waiting
            running = {x.worker: x for x in queue.running}
            restarts, starting = self._dispatcher.restarts, self._dispatcher.starting
            staleness = dict(sorted(self._staleness.items()))
        counts = _Counts(
            now_s,
            {worker: x.done for worker, x in tally.workers.items()},
            (sum(staleness.values()), sum(ahead * n for ahead, n in staleness.items())),
            {x.server: (x.bytes_in, x.bytes_out) for x in servers if x.age_s is not None},
        )
        rates = _Rates(self._earlier[0] if self._earlier else counts, counts)
        self._earlier.append(counts)
        usual_s = median_of_workers(tally.workers.values())

        def make_figures(worker: int) -> WorkerFigures:
            state = "idle" if worker in restarts else "left"
            if worker in starting:
                state = "starts"
            figures = _make_figures(
                worker,
                state,
                tally.workers.get(worker, WorkerTally()),
                running.get(worker),
                now_s,
                usual_s,
            )
            return dataclasses.replace(
                figures, restarts=restarts.get(worker, 0), per_s=rates.of_worker(worker)
            )

        workers = sorted(tally.workers.keys() | restarts.keys() | running.keys())
        return ProgressSample(
            time=time.time(),
            elapsed_s=now_s - self._start_s,
            finished=finished,
            done=sum(x.done for x in tally.workers.values()),
            failed=sum(x.failed for x in tally.workers.values()),
            cancelled=tally.cancelled,
            per_s=rates.of_all(),
            in_flight=len(running),
            waiting=waiting,
            retries=dict(sorted(tally.retries.items())),
            errors=dict(sorted(tally.errors.items())),
            staleness=staleness,
            staleness_of_late=rates.staleness(),
            workers=tuple(map(make_figures, workers)),
            servers=tuple(ServerProgress(x, *rates.traffic(x.server)) for x in servers),
        )


def _make_figures(
    worker: int,
    idle_state: str,
    tally: WorkerTally,
    running: RunningClosure | None,
    now_s: float,
    usual_s: float | None,
) -> WorkerFigures:
    running_s = None if running is None else now_s - running.since_s
    return WorkerFigures(
        worker,
        idle_state if running is None else "runs",
        done=tally.done,
        failed=tally.failed,
        retries=tally.retries,
        median_s=median_of(tally),
        closure=None if running is None else running.closure.number,
        function="" if running is None else running.closure.function,
        running_s=running_s,
        is_slow=is_slow(tally, running_s, usual_s),
    )


class _Rates:
    """Rates between two moments; None if they are unknown."""

    def __init__(self, before: _Counts, now: _Counts):
        self._before, self._now = before, now
        self._seconds = now.now_s - before.now_s

    def of_worker(self, worker: int) -> float | None:
        """Returns the closures per second of a worker."""
        return self._rate(self._now.done.get(worker, 0) - self._before.done.get(worker, 0))

    def of_all(self) -> float | None:
        """Returns the closures per second of all workers."""
        return self._rate(sum(self._now.done.values()) - sum(self._before.done.values()))

    def staleness(self) -> float | None:
        """Returns the mean staleness."""
        count, total = (
            x - y for x, y in zip(self._now.staleness, self._before.staleness, strict=True)
        )
        return total / count if count else None

    def traffic(self, server: int) -> tuple[float | None, float | None]:
        """Returns the bytes in and out per second of a server."""
        now, before = self._now.traffic.get(server), self._before.traffic.get(server)
        if now is None or before is None:
            return None, None
        return self._rate(now[0] - before[0]), self._rate(now[1] - before[1])

    def _rate(self, count: float) -> float | None:
        return count / self._seconds if self._seconds > 0 else None
