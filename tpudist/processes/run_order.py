"""The order in which a process has begun what it does together with others, and where two differ.

A program counts when it is dispatched, and an agreement when it is asked for. Both have numbers
that are the same in all processes (`process_agreement`), so that orders can be compared by them.
"""

import collections
import itertools
from collections.abc import Sequence

Run = tuple[int, int, int]
"""What was begun, at which position first, and how many times in a row."""

MAX_RUNS = 64  # that are remembered: others lag by a few programs, not by so many changes


class RunOrder:
    """What one process has begun; one thread adds, and any may read."""

    def __init__(self):
        """Nothing yet."""
        self._runs: collections.deque[list[int]] = collections.deque(maxlen=MAX_RUNS)

    def add(self, number: int) -> None:
        """Something is begun."""
        runs = self._runs
        if not runs:
            runs.append([number, 0, 1])
            return
        last = runs[-1]
        if last[0] == number:
            last[2] += 1
        else:
            runs.append([number, last[1] + last[2], 1])

    def last_runs(self) -> list[Run]:
        """The latest ones, oldest first."""
        return [(number, start, times) for number, start, times in self._runs.copy()]


def length(runs: Sequence[Run]) -> int:
    """How many things have been begun."""
    return runs[-1][1] + runs[-1][2] if runs else 0


def first_difference(one: Sequence[Run], other: Sequence[Run]) -> tuple[int, int, int] | None:
    """The first position that both remember, and where they differ; with what each has there."""
    for (a, a_start, a_times), (b, b_start, b_times) in itertools.product(one, other):
        start = max(a_start, b_start)
        if a != b and start < min(a_start + a_times, b_start + b_times):
            return start, a, b
    return None
