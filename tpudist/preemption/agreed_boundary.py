"""Agreement of all processes on the boundary between steps at which they act on a notice.

Each process counts the boundaries that it reaches. When a notice is known:

1. Each process posts its count on the board, and waits at its next boundary.
2. Process 0 reads all counts and posts the decision: the largest count plus one. No process has
   passed that boundary, and all will reach it.
3. All read the decision, and act at that boundary.

A process that has finished its loops posts "closed" instead of a count. Then nobody acts, because
the others are about to finish, too. Process 0 waits at most `_PATIENCE_S` for the counts, and then
decides that nobody acts. The others wait for its decision without a limit: if it hangs, the watch
of the processes (`process_watch`) ends them.

JAX has such a protocol (`multihost_utils.reached_preemption_sync_point`), with one counter and one
notice per run. Orbax calls it with the numbers of training steps, so it cannot be shared.
"""

import json
import logging

from tpudist.options.member_names import format_members
from tpudist.preemption.notice import Notice, look_interval_s
from tpudist.processes.host import Event, this_host

_log = logging.getLogger("tpudist.preemption")
_PATIENCE_S = 120.0  # for which process 0 waits for the counts of the others
_PAUSE_S = 0.01
_COUNT_S = 0.1  # for one count: a process may announce meanwhile that it has closed
_CLOSED = "closed"


class BoundaryAgreement:
    """Determines one boundary, the same in all processes, at which to act on a notice.

    All processes must create it at the same boundary.

    Args:
        name: Name of the agreement, the same in all processes and unique in the run.

    Attributes:
        notice: The notice.
    """

    def __init__(self, name: str):
        self._lock = this_host().lock()
        self._num_boundaries = 0
        self._act_at: int | None = None
        self.notice = Notice(name, self._settle)

    def reach_boundary(self) -> bool:
        """Counts a boundary; returns whether to act at it. One process acts as soon as possible."""
        if self.notice.board.num_processes == 1:
            return self.notice.content is not None
        with self._lock:  # waits while `_settle` holds it
            self._num_boundaries += 1
            return self._num_boundaries == self._act_at

    def close(self) -> None:
        """Announces that this process reaches no more boundaries."""
        self.notice.close()
        if self.notice.board.num_processes > 1:
            try:
                self._post_count(_CLOSED)
                if this_host().process_index() == 0:
                    self._decide(None, "process 0 has finished its loops")
            except ConnectionError:
                pass

    def _settle(self, is_closing: Event) -> None:
        # Runs in the thread of the notice. The lock is held from before the count is posted until
        # the decision is known: the program waits at its next boundary meanwhile, which is at most
        # the chosen one, the largest count plus 1.
        with self._lock:
            while not is_closing.is_set():
                try:
                    if self._try_to_settle(is_closing):
                        return
                except ConnectionError:  # try again: the count is posted, so the others rely on it
                    pass
                this_host().sleep(_PAUSE_S)

    def _try_to_settle(self, is_closing: Event) -> bool:
        """Posts the count, in process 0 also the decision; returns whether there is one."""
        # May be repeated: a text is written once, and the count does not change under the lock.
        self._post_count(str(self._num_boundaries))
        if this_host().process_index() == 0:
            self._gather(is_closing)
        # Others may learn of the notice a look later, and until then nothing is decided.
        slice_s = look_interval_s(self.notice.board.num_processes)
        text = self.notice.board.wait_for("decision", slice_s)
        if text is None:
            return False
        self._act_at, why = json.loads(text)
        if why:
            _log.warning("%s. No checkpoint is saved: %s.", self.notice.content, why)
        return True

    def _gather(self, is_closing: Event) -> None:
        num_processes = self.notice.board.num_processes
        deadline = this_host().monotonic() + _PATIENCE_S
        while not is_closing.is_set():
            counts = self.notice.board.read_all("counts")
            ended = sorted(int(i) for i, count in counts.items() if count == _CLOSED)
            if ended:
                why = f"{format_members('process', ended)} finished the loops"
                return self._decide(None, why)
            if len(counts) == num_processes:
                return self._decide(max(map(int, counts.values())) + 1)
            if this_host().monotonic() > deadline:
                absent = [i for i in range(num_processes) if str(i) not in counts]
                late = format_members("process", absent)
                return self._decide(None, f"{late} did not answer within {_PATIENCE_S:g} s")
            # A look returns all counts so far. After these three have arrived, few are missing.
            missing = [i for i in range(num_processes) if str(i) not in counts]
            for i in {missing[0], missing[len(missing) // 2], missing[-1]}:
                self.notice.board.wait_for(f"counts/{i}", _COUNT_S)

    def _post_count(self, count: str) -> None:
        self.notice.board.post(f"counts/{this_host().process_index()}", count)

    def _decide(self, act_at: int | None, why_not: str = "") -> None:
        # The board keeps the first decision, so all processes read the same one.
        self.notice.board.post("decision", json.dumps([act_at, why_not]))
