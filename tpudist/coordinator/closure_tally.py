"""ClosureTally: counts of the closures that each worker ran, their durations and their errors.

`ClosureQueue` updates the counts under its condition. So a thread that holds the condition sees
counts that add up: finished closures returned a result, raised an error, or were canceled.
"""

from __future__ import annotations

import collections
import copy
import dataclasses

NUM_DURATIONS = 32
"""Number of recent closures whose median is a worker's usual duration."""


@dataclasses.dataclass
class WorkerTally:
    """Counts of one worker number, including lost workers that had the same number.

    Attributes:
        done: Number of closures that returned a result.
        failed: Number of closures that raised an error.
        retries: Number of closures that were put back to run again.
        durations_s: Seconds that the last closures with a result took, including their waits.
    """

    done: int = 0
    failed: int = 0
    retries: int = 0
    durations_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=NUM_DURATIONS)
    )


@dataclasses.dataclass
class ClosureTally:
    """Counts of numbered closures in this run of the program.

    Attributes:
        workers: Counts by worker.
        cancelled: Number of closures that were canceled before they ran, or before they ran again.
        retries: Number of repeated starts, by cause.
        errors: Number of closures that raised an error, by type of the error.
    """

    workers: collections.defaultdict[int, WorkerTally] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(WorkerTally)
    )
    cancelled: int = 0
    retries: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def record_result(self, worker: int, duration_s: float) -> None:
        """Counts a closure that returned a result."""
        tally = self.workers[worker]
        tally.done += 1
        tally.durations_s.append(duration_s)

    def record_error(self, worker: int, error: BaseException) -> None:
        """Counts a closure that raised an error."""
        self.workers[worker].failed += 1
        self.errors[type(error).__name__] += 1

    def record_retry(self, worker: int, cause: str) -> None:
        """Counts a closure that will start again."""
        self.workers[worker].retries += 1
        self.retries[cause] += 1

    def copy(self) -> ClosureTally:
        """Returns a copy of all counts."""
        return copy.deepcopy(self)
