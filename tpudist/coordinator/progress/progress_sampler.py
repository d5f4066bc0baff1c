"""ProgressSampler: takes samples of a coordinator's run, and compares each with earlier ones."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping

from tpudist.coordinator.closure_queue import ClosureQueue
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
"""A rate is of the time since so many samples ago."""


@dataclasses.dataclass(frozen=True)
class _Counts:
    """What rates are made of."""

    now_s: float
    done: Mapping[int, int]
    staleness: tuple[int, int]
    traffic: Mapping[int, tuple[int, int]]


class ProgressSampler:
    """Takes samples, one after the other; holds nothing whose end would end the run."""

    def __init__(
        self,
        queue: ClosureQueue,
        dispatcher: Dispatcher,
        watch: ServerSurvey,
        staleness: Mapping[int, int],
        concurrency: Concurrency,
    ):
        """Has not looked yet.

        Args:
            queue: Of the closures; under its condition all counts are taken, so they add up.
            dispatcher: Of the workers.
            watch: Asks the servers.
            staleness: Counts, which change under the condition of the queue.
            concurrency: Whose time it is.
        """
        self._queue, self._dispatcher, self._watch = queue, dispatcher, watch
        self._staleness, self._concurrency = staleness, concurrency
        self._start_s = concurrency.now_s()
        self._turn = concurrency.condition()  # of threads that want a sample at once
        self._earlier: collections.deque[_Counts] = collections.deque(maxlen=NUM_COMPARED)

    def take(self, timeout_s: float) -> ProgressSample:
        """A sample; waits for servers for so many seconds at most."""
        with self._turn:
            return self._take(self._watch.ask(timeout_s))

    def _take(self, servers: list[ServerFigures]) -> ProgressSample:
        queue = self._queue
        with queue.changed:
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
        workers = []
        for worker in sorted(tally.workers.keys() | restarts.keys() | running.keys()):
            of_worker = tally.workers.get(worker, WorkerTally())
            runs = running.get(worker)
            running_s = None if runs is None else now_s - runs.since_s
            state = "idle" if worker in restarts else "left"
            if worker in starting:
                state = "starts"
            workers.append(
                WorkerFigures(
                    worker,
                    state if runs is None else "runs",
                    done=of_worker.done,
                    failed=of_worker.failed,
                    retries=of_worker.retries,
                    restarts=restarts.get(worker, 0),
                    per_s=rates.of_worker(worker),
                    median_s=median_of(of_worker),
                    closure=None if runs is None else runs.closure.number,
                    function="" if runs is None else runs.closure.function,
                    running_s=running_s,
                    is_slow=is_slow(of_worker, running_s, usual_s),
                )
            )
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
            workers=tuple(workers),
            servers=tuple(ServerProgress(x, *rates.traffic(x.server)) for x in servers),
        )


class _Rates:
    """Of what was counted between two moments; None where nobody knows."""

    def __init__(self, before: _Counts, now: _Counts):
        self._before, self._now = before, now
        self._seconds = now.now_s - before.now_s

    def of_worker(self, worker: int) -> float | None:
        """Closures that a worker has done, in a second."""
        return self._rate(self._now.done.get(worker, 0) - self._before.done.get(worker, 0))

    def of_all(self) -> float | None:
        """Closures that all have done, in a second."""
        return self._rate(sum(self._now.done.values()) - sum(self._before.done.values()))

    def staleness(self) -> float | None:
        """Its mean."""
        count, total = (
            x - y for x, y in zip(self._now.staleness, self._before.staleness, strict=True)
        )
        return total / count if count else None

    def traffic(self, server: int) -> tuple[float | None, float | None]:
        """Bytes in and out, in a second."""
        now, before = self._now.traffic.get(server), self._before.traffic.get(server)
        if now is None or before is None:
            return None, None
        return self._rate(now[0] - before[0]), self._rate(now[1] - before[1])

    def _rate(self, count: float) -> float | None:
        return count / self._seconds if self._seconds > 0 else None
