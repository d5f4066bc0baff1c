"""IdMap: which row of a table each id has; exact, whatever the ids are.

Open addressing with linear probing, whole arrays at a time. A slot holds a row number, and the id
of that row says whether it is the one that is looked for, so that no id is special.
"""

from typing import Any

import numpy as np

from tpudist.ps.tables.id_hash import as_ids

_FREE = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_LEAST_BITS = 6


class IdMap:
    """Ids of 64 bits, each with a row of its own.

    At most a quarter of the slots is taken, so that few ids look at several, and their number
    doubles when more would be.

    Attributes:
        num_rows: All rows are below this number.
    """

    def __init__(self) -> None:
        """No ids."""
        self.num_rows = 0
        self._slots = np.full(1 << _LEAST_BITS, _FREE, np.int32)
        self._id_of_row = np.zeros(1 << (_LEAST_BITS - 2), np.int64)
        self._free_rows = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return self.num_rows - len(self._free_rows)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self._slots.nbytes + self._id_of_row.nbytes + self._free_rows.nbytes

    def find(self, ids: Any) -> np.ndarray:
        """The row of each id, int64 `[n]`; -1 for one that is not there.

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim.
        """
        return self._probe(as_ids(ids))[0]

    def find_or_add(self, ids: Any) -> np.ndarray:
        """The row of each id, which is new for one that was not there.

        New rows are those that were freed, and then the next ones, in order of the ids: the order
        in which a call names them does not matter.

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim.
        """
        ids = as_ids(ids)
        rows = self.find(ids)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            new, inverse = np.unique(ids[missing], return_inverse=True)
            new_rows = self._take_rows(len(new))
            self._id_of_row[new_rows] = new
            self._place(new, new_rows)
            rows[missing] = new_rows[inverse]
        return rows

    def remove(self, ids: Any) -> np.ndarray:
        """The rows that ids had, `[n]`, which are free now; -1 for one that was not there.

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim.
        """
        rows, at = self._probe(as_ids(ids))
        at = np.unique(at[rows >= 0])
        if len(at):
            self._free_rows = np.concatenate([self._free_rows, self._slots[at]])
            after = self._followers(at)
            moved = self._slots[after]
            self._slots[at] = self._slots[after] = _FREE
            self._place(self._id_of_row[moved], moved)
        return rows

    def ids(self) -> np.ndarray:
        """All ids, in the order of their rows."""
        return self.items()[0]

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids and their rows, in the order of the rows."""
        is_used = np.ones(self.num_rows, bool)
        is_used[self._free_rows] = False
        rows = np.flatnonzero(is_used).astype(np.int32)
        return self._id_of_row[rows], rows

    def _home(self, ids: np.ndarray) -> np.ndarray:
        """The slot that each id would like to have."""
        bits = ids.view(np.uint64) >> np.uint64(32)
        bits ^= ids.view(np.uint64)
        bits *= _FACTOR
        bits >>= np.uint64(65 - len(self._slots).bit_length())
        return bits.view(np.int64)

    def _probe(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row of each id, and its slot; -1 and a free slot for one that is not there."""
        at = self._home(ids)
        rows = self._slots.take(at).astype(
            np.int64
        )  # which NumPy looks up with; once, and not anew
        left = np.flatnonzero(self._is_other(rows, ids))
        if not len(left):
            return rows, at
        found, ids = at, ids.take(left)
        at = at.take(left)
        while len(left):
            at += 1
            at &= len(self._slots) - 1
            there = self._slots.take(at)
            rows[left], found[left] = there, at
            go_on = np.flatnonzero(self._is_other(there, ids))
            left, at, ids = left.take(go_on), at.take(go_on), ids.take(go_on)
        return rows, found

    def _is_other(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Whether a slot is taken by another id than the one that is looked for."""
        return (self._id_of_row.take(rows, mode="clip") != ids) & (rows >= 0)

    def _followers(self, at: np.ndarray) -> np.ndarray:
        """The slots from some on up to the next free one, but for those.

        What is there may have been pushed on by what was in `at`, and would not be found any more.
        """
        is_listed = np.zeros(len(self._slots), bool)
        is_listed[at] = True
        followers = []
        while len(at):
            at = (at + 1) & (len(self._slots) - 1)
            at = at[(self._slots[at] >= 0) & ~is_listed[at]]
            is_listed[at] = True
            followers.append(np.unique(at))
        return np.concatenate(followers)

    def _take_rows(self, num: int) -> np.ndarray:
        """Rows for new ids, and slots for them."""
        keep = max(0, len(self._free_rows) - num)
        free, self._free_rows = self._free_rows[keep:], self._free_rows[:keep]
        next_rows = np.arange(self.num_rows, self.num_rows + num - len(free), dtype=np.int32)
        self.num_rows += len(next_rows)
        size = len(self._slots)
        while size < 4 * self.num_rows:
            size *= 2
        if size > len(self._slots):
            used = self._slots[self._slots >= 0]
            self._id_of_row = np.concatenate(
                [self._id_of_row, np.zeros(size // 4 - len(self._id_of_row), np.int64)]
            )
            self._slots = np.full(size, _FREE, np.int32)
            self._place(self._id_of_row[used], used)
        return np.concatenate([np.sort(free), next_rows])

    def _place(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Puts rows of ids that are not there into slots.

        All write to the slot they would like, if it is free; of those that want the same one NumPy
        lets one win, and the others go on. Each round places one of them at least.
        """
        at = self._home(ids)
        while len(rows):
            free = self._slots[at] < 0
            self._slots[at[free]] = rows[free]
            lost = self._slots[at] != rows
            rows, at = rows[lost], (at[lost] + 1) & (len(self._slots) - 1)
