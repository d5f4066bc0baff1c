"""Stragglers: the closures that run longer than is usual for their function.

Running one a second time occupies a worker, so it is compared with its own function. The progress
display only marks workers, so it compares them with each other (`progress_sample.is_slow`).
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Hashable

from tpudist.coordinator.closure import Closure
from tpudist.xla import user_code

MIN_S = 1.0
"""Seconds below which a closure is not slow: starting it again would cost more than waiting."""
MIN_DURATIONS = 3
"""Number of known durations of a function before one of its closures can be slow."""
NUM_DURATIONS = 31
"""Number of recent durations of a function whose median is its usual duration."""


class Stragglers:
    """Records how long closures take, and decides which running closures are slow.

    A closure is slow if it takes `factor` times the median of its own function, so a long function
    is not slow because other functions are short.
    """

    def __init__(self, factor: float):
        self._factor = factor
        self._durations_s: dict[Hashable, collections.deque[float]] = {}
        self._medians_s: dict[Hashable, float] = {}
        # By function and number: the closures that may run twice, in the order of their starts. So
        # the first closure of a function becomes slow first, however many run.
        self._running: dict[Hashable, collections.OrderedDict[int, Closure]] = {}

    def record(self, closure: Closure, duration_s: float) -> None:
        """Records the duration of a finished closure."""
        key = _function_key(closure)
        durations_s = self._durations_s.setdefault(key, collections.deque(maxlen=NUM_DURATIONS))
        durations_s.append(duration_s)
        if len(durations_s) >= MIN_DURATIONS:
            self._medians_s[key] = statistics.median(durations_s)

    def update(self, closure: Closure) -> None:
        """Records a change of a closure's workers, or of `is_claimed`."""
        key = _function_key(closure)
        running = self._running.setdefault(key, collections.OrderedDict())
        running.pop(closure.number, None)
        if _may_run_twice(closure):
            newest_s = next(reversed(running.values())).start_s if running else closure.start_s
            running[closure.number] = closure
            # A closure whose second worker was lost comes back among closures that started later.
            if closure.start_s < newest_s:
                in_order = sorted(running.items(), key=lambda pair: pair[1].start_s)
                self._running[key] = collections.OrderedDict(in_order)
        if not running:
            del self._running[key]

    def find_next(self) -> tuple[float, Closure] | None:
        """Returns the running closure that becomes slow first, after the time when it does."""
        first = [next(iter(running.values())) for running in self._running.values()]
        times = [(self._slow_s(x), x) for x in first]
        known = [(slow_s, closure) for slow_s, closure in times if slow_s is not None]
        return min(known, key=lambda pair: pair[0], default=None)

    def _slow_s(self, closure: Closure) -> float | None:
        """Returns the time from which a closure is slow; None if the usual duration is unknown."""
        median_s = self._medians_s.get(_function_key(closure))
        return None if median_s is None else closure.start_s + max(self._factor * median_s, MIN_S)

    def describe(self, closure: Closure, now_s: float) -> str:
        """Compares the duration of a running closure with the usual one, in words."""
        key = _function_key(closure)
        return (
            f"it has run for {now_s - closure.start_s:.3g} s, and {self._medians_s[key]:.3g} s is "
            f"the median of the last {len(self._durations_s[key])} of its function"
        )


def _may_run_twice(closure: Closure) -> bool:
    # A value that differs between workers would make the second run another computation. A claimed
    # closure has its result already, and two runs are enough.
    return len(closure.workers) == 1 and not closure.is_claimed and not closure.per_worker_values


def _function_key(closure: Closure) -> Hashable:
    # The code object, because a program may define the same function again for each call. Users'
    # callables without code, such as partials, are compared by type.
    function = user_code.unwrap(closure.fn)
    return user_code.code_of(function, type(function))
