"""RunRecords: what a coordinator records about finished closures, and tells new ones."""

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
            reads_ahead = self._max_staleness is None and queue.num_waiting
            num_scheduled = queue.num_scheduled if reads_ahead else 0
            low = queue.finished.low
        return RunStatus(low, self._servers.actors, num_scheduled)

    def record_finished(self, closure: Closure, completion: Completion) -> None:
        """Records a completed closure, before its result is visible."""
        if closure.retries:
            # Another worker may still run it and send updates. From here on, servers reject them.
            self._servers.seal(closure.number)
        with self._queue.changed:
            self.file.write(closure.number)
            if completion.staleness is not None:
                self.staleness[completion.staleness] += 1


def withdraw(queue: ClosureQueue, file: FinishedFile, output: RemoteValue) -> bool:
    """Cancels the closure with this output if no worker has started it; returns whether it did."""
    with queue.changed:
        number = queue.withdraw(output)
        if number is not None:
            file.write(number, is_withdrawn=True)
    return number is not None
