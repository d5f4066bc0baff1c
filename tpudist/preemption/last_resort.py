"""The end of a program that was asked to end, and does not come to where it would save."""

import os
import sys
import threading
import time

from tpudist.preemption.notice import Notice
from tpudist.processes.exit_codes import EXIT_PREEMPTED

WITHOUT_STEPS_S = 10.0
"""How long a program may take that has not come to a boundary yet: it has nothing to lose."""
PATIENCE_S = 60.0
"""How long others may take at least; else four times their longest step."""
_POLL_S = 0.5


class Pace:
    """How a program comes to boundaries between steps; one thread writes, others read.

    Attributes:
        count: How many it has come to.
        mean_s: Seconds between them.
        longest_s: The longest of these.
        is_saving: Whether it is at one, and has to do there.
    """

    def __init__(self):
        """None yet."""
        self.count, self.mean_s, self.longest_s = 0, 0.0, 0.0
        self.is_saving = False
        self._last_s = time.monotonic()

    def reach_boundary(self) -> None:
        """Notes one."""
        step_s = self.waited_s
        self.count += 1
        self.mean_s += (step_s - self.mean_s) / self.count
        if self.count > 1:  # before the first one the program begins
            self.longest_s = max(self.longest_s, step_s)
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """What has happened since the last boundary is no part of a step."""
        self._last_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the last boundary."""
        return time.monotonic() - self._last_s

    @property
    def limit_s(self) -> float:
        """How long it may take to come to the next boundary, from a notice on."""
        return max(PATIENCE_S, 4 * self.longest_s) if self.count else WITHOUT_STEPS_S


class LastResort:
    """Ends this process where a notice is known and its program comes to no boundary."""

    def __init__(self, notice: Notice, pace: Pace):
        """Begins to watch, in a thread.

        Args:
            notice: That the run is to end.
            pace: Of the program.
        """
        self._notice, self._pace = notice, pace
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="preemption, last resort", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()

    def _watch(self) -> None:
        known_s = 0.0
        while not self._closing.wait(_POLL_S):
            if self._notice.content is None:
                continue
            if self._pace.is_saving:
                return  # from here on it ends by itself
            known_s = known_s or time.monotonic()
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
        except Exception:  # closed: there is nobody to tell
            pass
        os._exit(EXIT_PREEMPTED)
