"""Times of steps, and an estimate for the remaining ones."""

from __future__ import annotations

import statistics
import time
from collections import deque

from tpudist.training.history import History

NUM_RECENT = 20
"""Number of steps whose mean predicts the next ones; a change of speed shows within as many."""


class StepTimer:
    """Times a step from the end of the previous one, or from its start after a pause.

    Steps overlap, so their speed is the rate of their ends: between two pauses the times
    of the steps add up to the time that they took together. The first step of a run is not timed,
    because it waits for compilation.

    Args:
        history: History that gets the seconds of each step.
        num_steps: Total number of steps of the run.
    """

    def __init__(self, history: History, num_steps: int):
        self._history = history
        self._num_steps = num_steps
        # End of the previous step, or start of this one after a pause; None during a pause.
        self._clock_start: float | None = None
        self._is_compiled = False
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    def begin_step(self) -> None:
        """Marks the start of a step."""
        # After a pause, the first step starts the clock. Before the first end, only compilation
        # would be measured.
        if self._clock_start is None and self._is_compiled:
            self._clock_start = time.perf_counter()

    def end_step(self) -> tuple[float | None, float | None]:
        """Marks the end of the oldest step; returns its seconds and the mean of recent steps.

        A number that is still unknown is None.
        """
        now = time.perf_counter()
        seconds = None if self._clock_start is None else now - self._clock_start
        self._clock_start, self._is_compiled = now, True
        if seconds is not None:
            self._recent_s.append(seconds)
            self._history.add_seconds(seconds)
        return seconds, statistics.fmean(self._recent_s) if self._recent_s else None

    def pause(self) -> None:
        """Marks that no step runs, and that other work precedes the next one."""
        self._clock_start = None

    @property
    def left_s(self) -> float | None:
        """Estimated seconds of the remaining steps; None before a step was timed."""
        if not self._recent_s:
            return None
        return statistics.fmean(self._recent_s) * (self._num_steps - self._history.num_steps)
