"""ClosureTally: how many closures each worker has run, how long they took, and what went wrong.

The queue counts here, under its condition, where closures come and go anyway. So at each moment
when somebody holds the condition the numbers add up: what workers have done and what was cancelled
are all that has finished.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

NUM_DURATIONS = 32
"""Of how many of its last closures a worker's median is taken."""


@dataclasses.dataclass
class WorkerTally:
    """What has become of the closures that one worker, and those before in its place, were given.

    Attributes:
        done: How many have given a result.
        failed: How many have raised.
        retries: How many were put back, to be begun again.
        durations_s: How long the last ones took that were done, with what they waited for.
    """

    done: int = 0
    failed: int = 0
    retries: int = 0
    durations_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=NUM_DURATIONS)
    )


class ClosureTally:
    """Counts closures that have a number, in this run of the program.

    Attributes:
        workers: By the worker that ran them.
        cancelled: How many were cancelled before they ran.
        retries: How many were begun again, by the cause.
        errors: How many have raised, by the type of the error.
    """

    def __init__(self):
        """None yet."""
        self.workers: collections.defaultdict[int, WorkerTally] = collections.defaultdict(
            WorkerTally
        )
        self.cancelled = 0
        self.retries: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()

    def finish(self, worker: int, duration_s: float) -> None:
        """Counts one that has given a result."""
        tally = self.workers[worker]
        tally.done += 1
        tally.durations_s.append(duration_s)

    def fail(self, worker: int, error: BaseException) -> None:
        """Counts one that has raised."""
        self.workers[worker].failed += 1
        self.errors[type(error).__name__] += 1

    def put_back(self, worker: int, cause: str) -> None:
        """Counts one that is to be begun again."""
        self.workers[worker].retries += 1
        self.retries[cause] += 1

    def copy(self) -> ClosureTally:
        """As it is now."""
        made = ClosureTally()
        made.cancelled = self.cancelled
        made.retries, made.errors = self.retries.copy(), self.errors.copy()
        made.workers.update(_copy_all(self.workers))
        return made


def _copy_all(workers: Mapping[int, WorkerTally]) -> dict[int, WorkerTally]:
    return {
        worker: dataclasses.replace(tally, durations_s=tally.durations_s.copy())
        for worker, tally in workers.items()
    }
