"""RowTouches: when and how often each row of a table was touched, and which rows go first."""

import enum

import numpy as np


class Eviction(enum.Enum):
    """Which rows of a full table go first."""

    OLDEST = "oldest"
    """Those that were touched the longest time ago; of these the ones touched less often."""
    LEAST_FREQUENT = "least frequent"
    """Those that were touched by the fewest calls; of these the oldest ones."""


_RECORD = np.dtype([("last", np.int64), ("num", np.int64)])


class RowTouches:
    """Two numbers for each row of a table, which lie side by side: they are needed together."""

    def __init__(self, capacity: int):
        """None so far."""
        self._records = np.zeros(capacity, _RECORD)

    @property
    def last(self) -> np.ndarray:
        """The clock when a row was touched last, int64 `[capacity]`; may be written to."""
        return self._records["last"]

    @property
    def num(self) -> np.ndarray:
        """How many calls touched it, int64 `[capacity]`; may be written to."""
        return self._records["num"]

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self._records.nbytes

    def reserve(self, num_rows: int) -> None:
        """Makes room for rows below `num_rows`, by doubling."""
        capacity = len(self._records)
        while capacity < num_rows:
            capacity *= 2
        if capacity > len(self._records):
            larger = np.zeros(capacity, _RECORD)
            larger[: len(self._records)] = self._records
            self._records = larger

    def touch(self, rows: np.ndarray, clock: int | np.ndarray) -> None:
        """Notes one call, which may name a row more than once."""
        found = self._records.take(rows)
        found["last"] = clock
        found["num"] += 1
        self._records[rows] = found

    def touch_each(self, rows: np.ndarray, clock: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Notes one call, and finds the rows that it names more than once, without sorting them.

        Returns:
            Where each row is named last, positions `[unique]` in order, and which of those rows
            each of `rows` is, int32 `[n]`; None if all of them differ.
        """
        positions = np.arange(len(rows), dtype=np.int32)
        self.touch(rows, positions)  # in place of the clock, which comes when they have been read
        last = self.last[rows]  # whatever order NumPy wrote in: one of each row's positions
        self.last[rows] = clock
        is_last = last == positions
        if is_last.all():
            return positions, None
        rank = np.cumsum(is_last, dtype=np.int32) - 1
        return np.flatnonzero(is_last), rank[last]

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
