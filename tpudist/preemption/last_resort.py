"""Ends a program that received a notice and does not reach a boundary where it would save."""

import os
import sys
import threading
import time

from tpudist.preemption.notice import Notice
from tpudist.processes.exit_codes import EXIT_PREEMPTED

NO_BOUNDARY_S = 10.0
"""Seconds for a program that has never reached a boundary: it has nothing to save."""
PATIENCE_S = 60.0
"""Minimum seconds for other programs; they get four times their longest step if that is more."""
_POLL_S = 0.5


class Pace:
    """The times between boundaries of a program; one thread writes, others read.

    Attributes:
        count: Number of boundaries so far.
        mean_s: Mean time between boundaries.
        longest_s: Longest time between boundaries.
        has_acted: Whether the program has reached the boundary after a notice, and has begun to
            save its state there.
    """

    def __init__(self):
        self.count, self.mean_s, self.longest_s = 0, 0.0, 0.0
        self.has_acted = False
        self._last_s = time.monotonic()

    def reach_boundary(self) -> None:
        """Records a boundary."""
        step_s = self.waited_s
        self.count += 1
        self.mean_s += (step_s - self.mean_s) / self.count
        if self.count > 1:  # the time before the first one is the start of the program
            self.longest_s = max(self.longest_s, step_s)
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Excludes the time since the last boundary from the next step."""
        self._last_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the last boundary."""
        return time.monotonic() - self._last_s

    @property
    def limit_s(self) -> float:
        """Seconds after a notice within which the program must reach a boundary."""
        return max(PATIENCE_S, 4 * self.longest_s) if self.count else NO_BOUNDARY_S


class LastResort:
    """A thread that ends this process if the program does not reach a boundary after a notice.

    Args:
        notice: Notice that the run must end.
        pace: Times between boundaries of the program.
    """

    def __init__(self, notice: Notice, pace: Pace):
        self._notice, self._pace = notice, pace
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="preemption, last resort", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()

    def _watch(self) -> None:
        known_s: float | None = None
        while not self._closing.wait(_POLL_S):
            if self._notice.content is None:
                continue
            if self._pace.has_acted:
                # It ends by itself. A grace period is not watched: it is for work of any kind, and
                # the machine ends at its end.
                return
            # From the notice or the last boundary on, whichever is later.
            if known_s is None:
                known_s = time.monotonic()
            waited_s = min(time.monotonic() - known_s, self._pace.waited_s)
            if waited_s > self._pace.limit_s:
                self._end(waited_s)

    def _end(self, waited_s: float) -> None:
        try:
            sys.stderr.write(
                f"{self._notice.content}. For {waited_s:.0f} s the program has not reached a "
                f"boundary between steps, where it would save its state, so it ends now with exit "
                f"code {EXIT_PREEMPTED}. A boundary is each 'next' of a distributed iterator in "
                f"the main thread, and save_checkpoint_if_preempted().\n"
            )
            sys.stderr.flush()
            sys.stdout.flush()
        except Exception:  # closed, so nobody can read a message
            pass
        os._exit(EXIT_PREEMPTED)
