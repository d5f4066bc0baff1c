"""RowTouches: when and how often each row of a table was used, and which rows to evict first."""

import enum

import numpy as np


class Eviction(enum.Enum):
    """Order in which rows of a full table are evicted."""

    OLDEST = "oldest"
    """First the least recently used rows; among equals, the less frequently used ones."""
    LEAST_FREQUENT = "least frequent"
    """First the rows that the fewest calls used; among equals, the less recently used ones."""


_RECORD = np.dtype([("last", np.int64), ("num_calls", np.int64)])


class RowTouches:
    """Time and number of uses of each row, stored together because they are used together.

    Args:
        capacity: Initial number of rows.
    """

    def __init__(self, capacity: int):
        self._records = np.zeros(capacity, _RECORD)

    @property
    def last(self) -> np.ndarray:
        """Clock of the last use of each row, int64 `[capacity]`; writable."""
        return self._records["last"]

    @property
    def num_calls(self) -> np.ndarray:
        """Number of calls that used each row, int64 `[capacity]`; writable."""
        return self._records["num_calls"]

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Returns the memory for this number of rows."""
        return _RECORD.itemsize * capacity

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._records.nbytes

    def reserve(self, num_rows: int) -> None:
        """Makes room for at least `num_rows`, by doubling."""
        capacity = len(self._records)
        while capacity < num_rows:
            capacity *= 2
        if capacity > len(self._records):
            larger = np.zeros(capacity, _RECORD)
            larger[: len(self._records)] = self._records
            self._records = larger

    def touch(self, rows: np.ndarray, last: int | np.ndarray) -> None:
        """Records a call that uses rows; a row may occur more than once.

        Args:
            rows: Rows that the call uses.
            last: New values of `last`: the clock, or scratch values (`touch_each`).
        """
        # A row that occurs twice is counted once, because both copies have the same new number.
        records = self._records.take(rows)
        records["last"] = last
        records["num_calls"] += 1
        self._records[rows] = records

    def touch_each(self, rows: np.ndarray, clock: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Records a call that uses rows, and finds duplicates without sorting.

        Returns:
            One position of each distinct row, `[unique]` in order; and for each of `rows` its index
            in that array, int32 `[n]`, or None if all rows are distinct.
        """
        positions = np.arange(len(rows), dtype=np.int32)
        # `last` is scratch space for a moment: each row gets one of its positions there (NumPy may
        # write duplicates in any order). A position that reads itself back represents its row.
        self.touch(rows, positions)
        chosen = self.last[rows]
        self.last[rows] = clock
        is_chosen = chosen == positions
        if is_chosen.all():
            return positions, None
        rank = np.cumsum(is_chosen, dtype=np.int32) - 1
        return np.flatnonzero(is_chosen), rank[chosen]

    def first_to_evict(
        self, count: int, eviction: Eviction, ids: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """Returns the ids of the `count` rows to evict first.

        They depend only on ids and uses, not on row numbers: among equals, lower ids come first.
        Reads each of the rows once.
        """
        keys = [self.last[rows], self.num_calls[rows]]
        if eviction is Eviction.LEAST_FREQUENT:
            keys.reverse()
        return ids[_smallest(count, [*keys, ids])]


def _smallest(count: int, keys: list[np.ndarray]) -> np.ndarray:
    """Returns the positions of the `count` smallest tuples of keys; no two tuples are equal."""
    # Selects by one key after the other: everything below the `count`-th value is chosen, and ties
    # at that value are decided by the next key. Linear time, unlike a sort.
    chosen, left = [], np.arange(len(keys[0]))
    for key in keys:
        if not 0 < count < len(left):
            break
        values = key[left]
        last = np.partition(values, count - 1)[count - 1]
        chosen.append(left[values < last])
        count -= len(chosen[-1])
        left = left[values == last]
    return np.concatenate([*chosen, left[:count]])
