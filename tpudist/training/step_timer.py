"""How long steps take, and how long those that are left."""

from __future__ import annotations

import statistics
import time
from collections import deque

from tpudist.training.history import History


class StepTimer:
    """Times steps by when they end; the first after a pause waited for something else."""

    def __init__(self, history: History, num_steps: int):
        """Of a run of so many steps."""
        self._history = history
        self._num_steps = num_steps
        self._last: float | None = None
        self._recent_s: deque[float] = deque(maxlen=20)

    def end_step(self) -> tuple[float | None, float | None]:
        """Seconds since the step before, if that is what it took; and the mean of recent ones."""
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last = now
        if seconds is not None:
            self._recent_s.append(seconds)
            self._history.seconds.append(seconds)
        return seconds, statistics.fmean(self._recent_s) if self._recent_s else None

    def pause(self) -> None:
        """The next step will wait for something else."""
        self._last = None

    @property
    def left_s(self) -> float | None:
        """About how many seconds the steps that are left take, if it is known."""
        if not self._recent_s:
            return None
        return statistics.fmean(self._recent_s) * (self._num_steps - self._history.num_steps)
