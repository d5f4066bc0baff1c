"""How long steps take, and how long those that are left."""

from __future__ import annotations

import statistics
import time
from collections import deque

from tpudist.training.history import History


class StepTimer:
    """Times steps by when they end, and the first after a pause from its start.

    The very first is not timed: it waits for compilation. All steps between two pauses are done
    by the second, so that their times add up to what they took together.
    """

    def __init__(self, history: History, num_steps: int):
        """Of a run of so many steps."""
        self._history = history
        self._num_steps = num_steps
        self._last: float | None = None
        self._is_compiled = False
        self._recent_s: deque[float] = deque(maxlen=20)

    def begin_step(self) -> None:
        """A step is about to be started."""
        if self._last is None and self._is_compiled:
            self._last = time.perf_counter()

    def end_step(self) -> tuple[float | None, float | None]:
        """Seconds since the step before, None of the first; and the mean of recent ones."""
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last, self._is_compiled = now, True
        if seconds is not None:
            self._recent_s.append(seconds)
            self._history.seconds.append(seconds)
        return seconds, statistics.fmean(self._recent_s) if self._recent_s else None

    def pause(self) -> None:
        """All steps are done, and something else comes before the next one."""
        self._last = None

    @property
    def left_s(self) -> float | None:
        """About how many seconds the steps that are left take, if it is known."""
        if not self._recent_s:
            return None
        return statistics.fmean(self._recent_s) * (self._num_steps - self._history.num_steps)
