"""RowTouches: when and how often each row of a table was touched, and which rows go first."""

import enum

import numpy as np


class Eviction(enum.Enum):
    """Which rows of a full table go first."""

    OLDEST = "oldest"
    """Those that were touched the longest time ago; of these the ones touched less often."""
    LEAST_FREQUENT = "least frequent"
    """Those that were touched by the fewest calls; of these the oldest ones."""


class RowTouches:
    """Two numbers for each row of a table.

    Attributes:
        last: int64 `[capacity]`: the clock when a row was touched last.
        num: int64 `[capacity]`: how many calls touched it.
    """

    def __init__(self, capacity: int):
        """None so far."""
        self.last = np.zeros(capacity, np.int64)
        self.num = np.zeros(capacity, np.int64)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.last.nbytes + self.num.nbytes

    def reserve(self, num_rows: int) -> None:
        """Makes room for rows below `num_rows`, by doubling."""
        more = len(self.last)
        while more < num_rows:
            more *= 2
        if more > len(self.last):
            padding = np.zeros(more - len(self.last), np.int64)
            self.last = np.concatenate([self.last, padding])
            self.num = np.concatenate([self.num, padding])

    def touch(self, rows: np.ndarray, clock: int) -> None:
        """Notes one call, which may name a row more than once."""
        self.last[rows] = clock
        self.num[rows] = self.num[rows] + 1

    def first_to_go(
        self, count: int, eviction: Eviction, ids: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """The ids of `count` of some rows.

        They depend on ids and touches alone, not on which row an id has: of rows that are as old
        and as frequent, those with the lowest ids go first. Looks at each of the rows.
        """
        keys = [self.last[rows], self.num[rows]]
        if eviction is Eviction.LEAST_FREQUENT:
            keys.reverse()
        return ids[_smallest(count, [*keys, ids])]


def _smallest(count: int, keys: list[np.ndarray]) -> np.ndarray:
    """Where the smallest tuples of keys are, in any order; no two are equal in all keys."""
    found, left = [], np.arange(len(keys[0]))
    for key in keys:
        if not 0 < count < len(left):
            break
        values = key[left]
        last = np.partition(values, count - 1)[count - 1]
        found.append(left[values < last])
        count -= len(found[-1])
        left = left[values == last]
    return np.concatenate([*found, left[:count]])
