"""Records the order of a process's shared calls, and finds where the orders of two differ.

A shared call is a program that all processes run, counted when it is dispatched, or an agreement,
counted when it is requested. Each has a number that is the same in all processes
(`process_agreement`), so orders can be compared by number.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence

Run = tuple[int, int, int]
"""Number of a shared call, position of its first call, and number of calls in a row."""

# Number of runs that are remembered. A loop of one program is one run, however long, and processes
# lag by a few calls, so two memories overlap in practice. Where they do not, nothing is compared.
MAX_RUNS = 64

STARTING = 0
"""The number of a call that is being dispatched: its program is known when the dispatch returns."""


class RunOrder:
    """The order of one process. One thread adds to it, and any thread may read it.

    Attributes:
        starting: Description of the last call that `start_next` has reported.
    """

    def __init__(self):
        # Lists rather than tuples: `add`, which each step calls, changes the last one in place.
        self._runs: collections.deque[list[int]] = collections.deque(maxlen=MAX_RUNS)
        self._is_starting, self.starting = False, ""

    def add(self, number: int) -> None:
        """Records the start of a shared call."""
        self._is_starting = False
        runs = self._runs
        if not runs:
            runs.append([number, 0, 1])
            return
        last = runs[-1]
        if last[0] == number:
            last[2] += 1
        else:
            runs.append([number, last[1] + last[2], 1])

    @contextlib.contextmanager
    def start_next(self, description: str) -> Iterator[None]:
        """Reports one more call in the `with` block, which dispatches a program."""
        # With one CPU device per process, the dispatch itself waits for the other processes. An
        # agreement in the block ends the report, because the program is compiled then: a process
        # that hangs in the compiler must not count as one that has started.
        self.starting, self._is_starting = description, True
        try:
            yield
        finally:
            self._is_starting = False

    def last_runs(self) -> list[Run]:
        """Returns the latest runs, oldest first."""
        # `copy` is one operation under the GIL, so no run appears or vanishes meanwhile. Only the
        # last one may grow.
        runs = [(number, start, times) for number, start, times in self._runs.copy()]
        return [*runs, (STARTING, length(runs), 1)] if self._is_starting else runs


def length(runs: Sequence[Run]) -> int:
    """Returns the number of shared calls that have begun."""
    return runs[-1][1] + runs[-1][2] if runs else 0


def first_difference(runs: Sequence[Run], others: Sequence[Run]) -> tuple[int, int, int] | None:
    """Returns the first position that both remember and where they differ, with both numbers."""
    # Both are in order of position. Each turn compares the two runs at one place, and goes past the
    # run that ends first, so the first pair that overlaps and differs is the earliest.
    i = j = 0
    while i < len(runs) and j < len(others):
        (number, start, times), (other_number, other_start, other_times) = runs[i], others[j]
        end, other_end = start + times, other_start + other_times
        position = max(start, other_start)
        is_known = STARTING not in (number, other_number)
        if is_known and number != other_number and position < min(end, other_end):
            return position, number, other_number
        if end <= other_end:
            i += 1
        if other_end <= end:
            j += 1
    return None
