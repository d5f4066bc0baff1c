"""Stragglers: which closures run longer than is usual for their function."""

from __future__ import annotations

import collections
import statistics
from typing import Any

from tpudist.coordinator.closure import Closure

MIN_S = 1.0
"""Below this many seconds a closure is not slow."""
MIN_COUNT = 3
"""Of how many closures of a function it is known how long they took, before one is slow."""
MAX_COUNT = 31
"""Of how many the median is taken: of the last ones."""


class Stragglers:
    """Knows how long closures took, by function.

    A closure is slow after so many times the median of those of its function, of which the last are
    known; so a long one is not slow because others are short.
    """

    def __init__(self, factor: float):
        """Of how many times the median."""
        self._factor = factor
        self._times_s: dict[Any, collections.deque[float]] = {}
        self._medians_s: dict[Any, float] = {}

    def note(self, closure: Closure, seconds: float) -> None:
        """Says how long a closure took."""
        key = _key_of(closure)
        times_s = self._times_s.setdefault(key, collections.deque(maxlen=MAX_COUNT))
        times_s.append(seconds)
        if len(times_s) >= MIN_COUNT:
            self._medians_s[key] = statistics.median(times_s)

    def slow_s(self, closure: Closure) -> float | None:
        """From when on a closure is slow; None if it is not known how long others took."""
        median_s = self._medians_s.get(_key_of(closure))
        return None if median_s is None else closure.begun_s + max(self._factor * median_s, MIN_S)

    def describe(self, closure: Closure, now_s: float) -> str:
        """How long a closure has run, and others have."""
        key = _key_of(closure)
        return (
            f"it has run for {now_s - closure.begun_s:.3g} s, and {self._medians_s[key]:.3g} s is "
            f"the median of the last {len(self._times_s[key])} of its function"
        )


def _key_of(closure: Closure) -> Any:
    """By what a function is known again: another object of one definition takes as long."""
    function = getattr(closure.fn, "__wrapped__", closure.fn)
    return getattr(function, "__code__", type(function))
