"""RunRecords: the records of finished closures, and the state of the run that new ones receive."""

from __future__ import annotations

import collections
from pathlib import Path

from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.finished_file import FinishedFile
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.worker import Completion, RunStatus
from tpudist.ps.servers import Servers


class RunRecords:
    """Records of one coordinator's run.

    The threads of workers call these methods. Nothing here refers to the coordinator: its garbage
    collection ends the threads, and a reference from them would prevent it.

    Args:
        queue: Queue of the closures. Its ledger continues the one of the file.
        servers: Servers of the strategy, whose folder has the file.
        max_staleness: See `ClosureQueue`.
        first_number: Lowest number that closures may still have. An earlier coordinator of the
            strategy, which is gone, may have run all lower ones.

    Attributes:
        file: Numbers of finished closures.
        staleness: Histogram of update staleness; `queue.changed` guards it.
    """

    def __init__(
        self, queue: ClosureQueue, servers: Servers, max_staleness: int | None, first_number: int
    ):
        self._queue, self._servers, self._max_staleness = queue, servers, max_staleness
        folder: Path | None = servers.folder
        self.file = FinishedFile(None if folder is None else folder / "finished.records")
        self.file.skip_to(first_number)
        queue.finished, queue.withdrawn = self.file.ledger, self.file.withdrawn
        self.staleness: collections.Counter[int] = collections.Counter()

    def describe_run(self) -> RunStatus:
        """Returns the state of the run for a closure that starts."""
        queue = self._queue
        with queue.changed:
            # Without a bound on staleness, a worker may fetch what the next closure reads together
            # with the answer to this closure's updates. That is useful only if a closure waits.
            reads_ahead = self._max_staleness is None and queue.num_waiting > 0
            limit = queue.end_number if reads_ahead else None
            low = queue.finished.low
        # Outside of the condition, because `actors` waits for servers that are replaced.
        return RunStatus(low, self._servers.actors, limit)

    def record_finished(self, closure: Closure, completion: Completion) -> None:
        """Records a completed closure, before its result is visible."""
        if closure.retries:
            # Another worker may still run it and send updates. From here on, servers reject them.
            # `claim` came first, so nobody starts the closure again, and `retries` is final.
            self._servers.seal(closure.number)
        with self._queue.changed:
            self.file.write(closure.number)
            if completion.staleness is not None:
                self.staleness[completion.staleness] += 1


def withdraw(queue: ClosureQueue, file: FinishedFile, output: RemoteValue) -> bool:
    """Cancels the closure with this output if no worker has started it; returns whether it did."""
    # Written first: a program that restarts must not run a function that was reported as canceled.
    return queue.withdraw(output, lambda number: file.write(number, is_withdrawn=True))
