"""At which boundary all processes act on a notice.

Processes count the boundaries that they come to. When a notice is known, each posts its count and
waits at its next boundary until process 0 has seen all counts and posted the largest plus one: no
process has passed that boundary, and all will come to it. A process that has ended its loops says
so instead of a count, and then nobody acts: the others are about to end too.

JAX has such a protocol (`multihost_utils.reached_preemption_sync_point`), with one counter and one
notice in a run. Orbax asks it with other numbers, those of training steps, so it cannot be shared.
"""

import json
import logging
import threading
import time

import jax

from tpudist.preemption.notice import Notice

_log = logging.getLogger("tpudist.preemption")
_PATIENCE_S = 120.0
_PAUSE_S = 0.01
_CLOSED = "closed"


class Agreement:
    """Says at one boundary, the same in all processes, that it is time to act on the notice."""

    def __init__(self, name: str):
        """All processes must make theirs at the same boundary and with the same name."""
        self._lock = threading.Lock()
        self._num_boundaries = 0
        self._act_at: int | None = None
        self.notice = Notice(name, self._settle)

    def reach_boundary(self) -> bool:
        """Counts a boundary, and says whether it is the one. In one process: after the notice."""
        if self.notice.board.num_processes == 1:
            return self.notice.content is not None
        with self._lock:  # held while a boundary is being agreed on
            self._num_boundaries += 1
            return self._num_boundaries == self._act_at

    def close(self) -> None:
        """Says that this process comes to no more boundaries."""
        self.notice.close()
        if self.notice.board.num_processes > 1:
            try:
                self._post_count(_CLOSED)
                if jax.process_index() == 0:
                    self._decide(None, "process 0 has finished its loops")
            except ConnectionError:
                pass

    def _settle(self, is_closing: threading.Event) -> None:
        # Held from before the count is posted until the decision is known: the loop stands at its
        # next boundary meanwhile, so no process passes the one that is chosen, the largest plus 1.
        with self._lock:
            while not is_closing.is_set():
                try:
                    if self._has_settled(is_closing):
                        return
                except ConnectionError:  # not to be let go of: the count has been posted
                    pass
                time.sleep(_PAUSE_S)

    def _has_settled(self, is_closing: threading.Event) -> bool:
        # A text is written once, so this may be tried again: the count has not changed either.
        self._post_count(str(self._num_boundaries))
        if jax.process_index() == 0:
            self._gather(is_closing)
        text = self.notice.board.read("decision")
        if text is None:
            return False
        self._act_at, why = json.loads(text)
        if why:
            _log.warning("%s. No checkpoint is saved: %s.", self.notice.content, why)
        return True

    def _gather(self, is_closing: threading.Event) -> None:
        num_processes = self.notice.board.num_processes
        deadline = time.monotonic() + _PATIENCE_S
        while not is_closing.is_set():
            counts = self.notice.board.read_all("counts")
            ended = sorted(int(i) for i, count in counts.items() if count == _CLOSED)
            if ended:
                why = f"process {_format_numbers(ended)} has finished its loops"
                return self._decide(None, why)
            if len(counts) == num_processes:
                return self._decide(max(map(int, counts.values())) + 1)
            if time.monotonic() > deadline:
                absent = [i for i in range(num_processes) if str(i) not in counts]
                late = f"process {_format_numbers(absent)} did not answer within {_PATIENCE_S:g} s"
                return self._decide(None, late)
            time.sleep(_PAUSE_S)

    def _post_count(self, count: str) -> None:
        self.notice.board.post(f"counts/{jax.process_index()}", count)

    def _decide(self, act_at: int | None, why_not: str = "") -> None:
        # The first decision stands, on the board and so in all processes.
        self.notice.board.post("decision", json.dumps([act_at, why_not]))


def _format_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
