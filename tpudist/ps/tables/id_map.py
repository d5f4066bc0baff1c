"""IdMap: the row of each id of a table, exactly, for arbitrary ids.

A hash table with open addressing and linear probing, vectorized with NumPy. A slot contains a row
number, and `_id_of_row` says whether that row has the requested id, so no id is reserved.
"""

import numpy as np
from jax.typing import ArrayLike

from tpudist.ps.tables.id_hash import as_ids

_FREE = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing
_MIN_SLOTS = 64
_MAX_ROWS = np.iinfo(np.int32).max


class IdMap:
    """Ids of 64 bits, each with a row of its own.

    Methods accept ids as `as_ids` does, and raise its errors. Memory for removed ids is used again,
    but not released; until then, a list has 4 bytes for each.

    Attributes:
        end_row: All row numbers are lower; some of them may be freed.
    """

    # Invariants: a slot is free or has a row in use; each row in use has one slot; and no slot
    # between an id's home and its slot is free, so that a search may end at a free slot. At most a
    # quarter of the slots is in use: most ids are in their home slot, and every search ends.

    def __init__(self) -> None:
        self.end_row = 0
        self._slots = np.full(_MIN_SLOTS, _FREE, np.int32)
        self._id_of_row = np.zeros(_MIN_SLOTS // 4, np.int64)
        self._free_rows = np.zeros(0, np.int32)

    @staticmethod
    def bytes_for(num_rows: int) -> int:
        """Returns the memory of a map of `num_rows` rows, without the list of freed rows."""
        num_slots = _num_slots(num_rows)
        return 4 * num_slots + 8 * num_slots // 4

    def __len__(self) -> int:
        return self.end_row - len(self._free_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._slots.nbytes + self._id_of_row.nbytes + self._free_rows.nbytes

    def find(self, ids: ArrayLike) -> np.ndarray:
        """Returns the row of each id, int64 `[n]`; -1 for missing ids."""
        return self._probe(as_ids(ids))[0]

    def find_or_add(self, ids: ArrayLike) -> np.ndarray:
        """Returns the row of each id, and adds missing ids.

        Freed rows are used first, then new ones, in the order of the ids: the order in which a call
        names them does not matter.

        Raises:
            OverflowError: If there would be more than 2^31 - 1 rows.
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

    def remove(self, ids: ArrayLike) -> np.ndarray:
        """Removes ids, and frees their rows; returns the rows `[n]`, -1 for missing ids."""
        rows, at = self._probe(as_ids(ids))
        at = np.unique(at[rows >= 0])
        if len(at):
            self._free_rows = np.concatenate([self._free_rows, self._slots[at]])
            # Free slots would end the search for ids behind them too early, so the occupied slots
            # that follow are placed again.
            after = self._followers(at)
            moved = self._slots[after]
            self._slots[at] = self._slots[after] = _FREE
            self._place(self._id_of_row[moved], moved)
        return rows

    def ids(self) -> np.ndarray:
        """Returns all ids, in the order of their rows."""
        return self.items()[0]

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all ids and their rows, in the order of the rows."""
        is_used = np.ones(self.end_row, bool)
        is_used[self._free_rows] = False
        rows = np.flatnonzero(is_used).astype(np.int32)
        return self._id_of_row[rows], rows

    def _home(self, ids: np.ndarray) -> np.ndarray:
        """Returns the first slot to look at for each id."""
        # The top bits of the product depend on all lower bits, but hardly on the upper half of the
        # id, so that is folded in first. A table of 2^k slots takes the top k bits.
        bits = ids.view(np.uint64) >> np.uint64(32)
        bits ^= ids.view(np.uint64)
        bits *= _FACTOR
        num_bits = len(self._slots).bit_length() - 1
        bits >>= np.uint64(64 - num_bits)
        return bits.view(np.int64)

    def _probe(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row and the slot of each id; -1 and a free slot for missing ids."""
        at = self._home(ids)
        # int64, because NumPy would convert int32 indices again for each lookup below.
        rows = self._slots.take(at).astype(np.int64)
        left = np.flatnonzero(self._is_other(rows, ids))
        if not len(left):
            return rows, at
        # `at` belongs to the ids in `left` from here on, and `slots` to all ids.
        slots, at, ids = at, at.take(left), ids.take(left)
        while len(left):
            at += 1
            at &= len(self._slots) - 1
            candidates = self._slots.take(at)
            rows[left], slots[left] = candidates, at
            other = np.flatnonzero(self._is_other(candidates, ids))
            left, at, ids = left.take(other), at.take(other), ids.take(other)
        return rows, slots

    def _is_other(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Returns whether a slot has another id than the requested one; False for a free slot."""
        # A free slot reads the id of row 0, and is masked.
        return (self._id_of_row.take(rows, mode="clip") != ids) & (rows >= 0)

    def _followers(self, at: np.ndarray) -> np.ndarray:
        """Returns the occupied slots after some slots, up to the next free one each."""
        # Walks from all slots at once. A walk that reaches a listed slot ends, because another one
        # continues from there.
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
        """Returns rows for new ids; enlarges the table if necessary."""
        if len(self) + num > _MAX_ROWS:
            raise OverflowError(
                f"A table cannot have {len(self) + num} rows on one server: row numbers have 32 "
                f"bits. Use more servers, or max_rows."
            )
        keep = max(0, len(self._free_rows) - num)
        free, self._free_rows = self._free_rows[keep:], self._free_rows[:keep]
        next_rows = np.arange(self.end_row, self.end_row + num - len(free), dtype=np.int32)
        self.end_row += len(next_rows)
        # Doubling makes adding O(1) on average; all rows are placed again.
        size = _num_slots(self.end_row)
        if size > len(self._slots):
            used = self._slots[self._slots >= 0]
            self._id_of_row = np.concatenate(
                [self._id_of_row, np.zeros(size // 4 - len(self._id_of_row), np.int64)]
            )
            self._slots = np.full(size, _FREE, np.int32)
            self._place(self._id_of_row[used], used)
        return np.concatenate([np.sort(free), next_rows])

    def _place(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Puts rows of new ids into slots."""
        # Every row writes to its slot if that is free. NumPy keeps one of several writes to a slot,
        # and the losers try the next slot. Ends: each round places a row or passes a taken slot.
        at = self._home(ids)
        while len(rows):
            free = self._slots[at] < 0
            self._slots[at[free]] = rows[free]
            lost = self._slots[at] != rows
            rows, at = rows[lost], (at[lost] + 1) & (len(self._slots) - 1)


def _num_slots(num_rows: int) -> int:
    return max(_MIN_SLOTS, 1 << (4 * num_rows - 1).bit_length())
