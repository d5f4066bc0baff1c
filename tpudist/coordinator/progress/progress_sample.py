"""ProgressSample: the state of a coordinator's run at one moment, and its slow workers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tpudist.coordinator.closure_tally import WorkerTally
from tpudist.ps.server_figures import ServerFigures

SLOW_FACTOR = 3.0
"""Multiple of the workers' median from which a closure or a worker is slow. `stragglers`, which
starts closures again, compares them with their own function instead."""
MIN_SLOW_S = 1.0
"""Seconds below which a running closure is not slow."""
MIN_DURATIONS = 5
"""Number of closures before a worker's median counts, because the first ones compile."""


@dataclasses.dataclass(frozen=True)
class WorkerFigures:
    """The figures of one worker.

    Attributes:
        worker: Number of the worker.
        state: `runs` a closure; `idle` without a closure; `starts` while it replaces a lost worker;
            or `left` after it was removed.
        done: Number of closures that returned a result. All counts begin with the coordinator.
        failed: Number of closures that raised an error.
        retries: Number of closures that were started again.
        restarts: Number of lost workers with this number.
        per_s: Recent number of finished closures per second; None in a first sample.
        median_s: Median seconds of the last closures; None before the first.
        closure: Number of the current closure, if any.
        function: Function of the current closure, with its place.
        running_s: Seconds since the current closure started.
        is_slow: Whether the current closure, or the worker in general, takes more than
            `SLOW_FACTOR` times the usual time of workers.
    """

    worker: int
    state: str
    done: int = 0
    failed: int = 0
    retries: int = 0
    restarts: int = 0
    per_s: float | None = None
    median_s: float | None = None
    closure: int | None = None
    function: str = ""
    running_s: float | None = None
    is_slow: bool = False


@dataclasses.dataclass(frozen=True)
class ServerProgress:
    """The figures of one server, with rates.

    Attributes:
        figures: Figures that the server reported.
        bytes_in_per_s: Recent bytes of received arrays per second; None in a first sample.
        bytes_out_per_s: Recent bytes of sent arrays per second; None in a first sample.
    """

    figures: ServerFigures
    bytes_in_per_s: float | None
    bytes_out_per_s: float | None


@dataclasses.dataclass(frozen=True)
class ProgressSample:
    """The figures of a run at one moment.

    In this run of the program, every finished closure returned a result, failed, or was
    canceled. *Recent* figures cover the time since the sample ten before this one.

    Attributes:
        time: Time in seconds since 1970.
        elapsed_s: Seconds since the progress display started.
        finished: Number of closures that will not run again, in all runs of this log.
        done: Number of closures that returned a result. This and the following attributes count
            only this run of the program.
        failed: Number of closures that raised an error.
        cancelled: Number of closures that were canceled before they ran.
        per_s: Recent number of finished closures per second; None in a first sample.
        in_flight: Number of unfinished closures on workers.
        waiting: Number of closures that wait for a worker.
        retries: Number of closures that were started again, by cause.
        errors: Number of closures that raised an error, by type of the error.
        staleness: Histogram of update staleness: number of functions between read and update ->
            number of updates.
        staleness_of_late: Recent mean staleness; None without such updates.
        workers: Figures of the workers, in the order of their numbers.
        servers: Figures of the servers, in the order of their numbers.
    """

    time: float
    elapsed_s: float
    finished: int
    done: int
    failed: int
    cancelled: int
    per_s: float | None
    in_flight: int
    waiting: int
    retries: Mapping[str, int]
    errors: Mapping[str, int]
    staleness: Mapping[int, int]
    staleness_of_late: float | None
    workers: tuple[WorkerFigures, ...]
    servers: tuple[ServerProgress, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the sample as an object for a line of JSON."""
        facts = dataclasses.asdict(self)
        facts["staleness"] = {str(ahead): count for ahead, count in self.staleness.items()}
        facts["servers"] = [x.pop("figures") | x for x in facts["servers"]]
        return _round_all(facts)

    def scalars(self) -> dict[str, float]:
        """Returns the known figures to draw over time, by name."""
        scalars: dict[str, float | None] = {
            "closures/done": self.done,
            "closures/per_s": self.per_s,
            "closures/in_flight": self.in_flight,
            "closures/waiting": self.waiting,
            "closures/failed": self.failed,
            "closures/cancelled": self.cancelled,
            "closures/slow_workers": sum(x.is_slow for x in self.workers),
            "retries/all": sum(self.retries.values()),
        }
        scalars |= {f"retries/{cause}".replace(" ", "_"): n for cause, n in self.retries.items()}
        scalars["staleness/of_late"] = self.staleness_of_late
        scalars["staleness/most"] = max(self.staleness, default=None)
        for worker in self.workers:
            scalars[f"worker_{worker.worker}/done"] = worker.done
            scalars[f"worker_{worker.worker}/per_s"] = worker.per_s
            scalars[f"worker_{worker.worker}/median_s"] = worker.median_s
        for server in self.servers:
            name = f"server_{server.figures.server}"
            scalars[f"{name}/bytes_held"] = server.figures.bytes_held
            scalars[f"{name}/bytes_in_per_s"] = server.bytes_in_per_s
            scalars[f"{name}/bytes_out_per_s"] = server.bytes_out_per_s
            scalars[f"{name}/restarts"] = server.figures.restarts
        return {name: float(x) for name, x in scalars.items() if x is not None}


def median_of(tally: WorkerTally) -> float | None:
    """Returns the median seconds of a worker's last closures."""
    return statistics.median(tally.durations_s) if tally.durations_s else None


def median_of_workers(tallies: Iterable[WorkerTally]) -> float | None:
    """Returns the usual seconds of a closure: the median of the workers' medians.

    Of two workers it is the faster one, because the other may be slow.
    """
    medians = [x for x in map(median_of, tallies) if x is not None]
    return statistics.median_low(medians) if medians else None


def is_slow(tally: WorkerTally, running_s: float | None, usual_s: float | None) -> bool:
    """Returns whether a worker or its current closure is slow, if workers take `usual_s`."""
    if usual_s is None:
        return False
    if running_s is not None and running_s > max(SLOW_FACTOR * usual_s, MIN_SLOW_S):
        return True
    median_s = median_of(tally)
    has_several = len(tally.durations_s) >= MIN_DURATIONS
    return has_several and median_s is not None and median_s > SLOW_FACTOR * usual_s


# Microseconds are enough for readers of the file, and shorten its lines.
def _round_all(x: Any) -> Any:  # dicts, lists and numbers of `as_json`
    if isinstance(x, dict):
        return {key: _round_all(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_round_all(value) for value in x]
    return round(x, 6) if isinstance(x, float) else x
