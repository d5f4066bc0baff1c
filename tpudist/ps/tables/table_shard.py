"""TableShard: rows of an embedding table by ids of 64 bits, in the host's memory.

There is no vocabulary: a row comes into being when its id is first asked for, and a bound on the
number of rows makes others go. It knows no network, no file and no closure: what changed, and all
that is there, it gives as NumPy arrays by name (`table_state`), and takes the same. One caller at a
time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from tpudist.ps.tables import table_state
from tpudist.ps.tables.id_hash import as_ids
from tpudist.ps.tables.id_map import IdMap
from tpudist.ps.tables.row_arrays import RowArrays
from tpudist.ps.tables.row_creation import create_rows, initial_rows, words
from tpudist.ps.tables.row_duplicates import sum_duplicates
from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows, scatter
from tpudist.ps.tables.row_touches import RowTouches
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_state import State

_set_rows = jax.jit(scatter, donate_argnums=0)
_update_rows = jax.jit(
    lambda table, indices, gradients, *, optimizer: optimizer.update(table, indices, gradients),
    donate_argnums=0,
    static_argnames="optimizer",
)


class TableShard:
    """Rows `[dim]` by id, and what an optimizer keeps of each.

    Attributes:
        options: Those of the table.
        clock: Goes on by one with each call that touches rows; rows are as old as it says. Whoever
            knows a better one, such as the number of a closure, sets it.
    """

    def __init__(self, options: TableOptions, *, keep_changes: bool = False):
        """No rows.

        Args:
            options: Those of the table, the same ones on all of its shards.
            keep_changes: Whether to note which rows changed, for `take_changes`.
        """
        self.options, self.clock = options, 0
        self._seed = words(np.array([options.seed & (1 << 64) - 1], np.uint64))[0]
        self._optimizer = RowOptimizer(options.optimizer)
        self._map = IdMap()
        self._arrays = RowArrays(options.row, options.capacity)
        self._touches = RowTouches(options.capacity)
        self._keep_changes = keep_changes
        self._changed: list[np.ndarray] = []
        self._evicted: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._map)

    @property
    def nbytes(self) -> int:
        """How much memory it takes, with the room for further rows."""
        return self._map.nbytes + self._arrays.nbytes + self._touches.nbytes

    def ids(self) -> np.ndarray:
        """The ids that have rows, int64 `[n]`."""
        return self._map.ids()

    def pull(self, ids: Any, *, create: bool = True, out: np.ndarray | None = None) -> np.ndarray:
        """Copies of the rows of ids `[n]`, in their order, as `[n, dim]`.

        Args:
            ids: They may be there more than once.
            create: Whether ids that are not there get rows. If not, what those would be is given,
                and nothing is touched: for evaluation.
            out: Where to write them, contiguous and of this table's dtype.

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim, `out` does not fit, or there are more ids than
                `max_rows`.
            MemoryError: There is no room for new rows in `max_bytes`.
        """
        ids = as_ids(ids)
        if out is None:
            out = np.empty((len(ids), self.options.dim), self.options.dtype)
        self.options.check_out(out, len(ids))
        rows = self._find_or_create(ids) if create else self._map.find(ids)
        if create:
            self._touches.touch(rows, self._tick())
        self._arrays.read_into(out, rows, lambda table: table.values)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            out[missing] = initial_rows(ids[missing], self._seed, self.options)
        return out

    def push(self, ids: Any, gradients: Any) -> None:
        """Updates the rows of ids `[n]` by gradients `[n, dim]`, each row once.

        Gradients of the same id are summed. An id that is not there gets a row first.

        Raises:
            TypeError: The ids are not integers, or the gradients are not floats.
            ValueError: The shapes do not fit, or there are more ids than `max_rows`.
        """
        ids, gradients = as_ids(ids), np.asarray(gradients)
        self.options.check_rows("gradients", gradients, len(ids))
        rows = self._find_or_create(ids)
        last, which = self._touches.touch_each(rows, self._tick())
        if which is not None:
            gradients = sum_duplicates(gradients, which, len(last))
            rows = rows[last]
        update = functools.partial(_update_rows, optimizer=self._optimizer)
        self._arrays.change(update, rows, gradients)
        self._note_changes(ids)
        self._arrays.wait()

    def assign(self, ids: Any, rows: Any) -> None:
        """Sets the rows of ids `[n]` to `rows` `[n, dim]`, and leaves what the optimizer keeps.

        Of an id that is there more than once the last row counts.

        Raises:
            TypeError: The ids are not integers, or the rows are not floats.
            ValueError: The shapes do not fit, or there are more ids than `max_rows`.
        """
        ids, values = as_ids(ids), np.asarray(rows)
        self.options.check_rows("rows", values, len(ids))
        numbers = self._find_or_create(ids)
        last, _ = self._touches.touch_each(numbers, self._tick())
        self._arrays.change(_set_values, numbers[last], values[last])
        self._note_changes(ids)
        self._arrays.wait()

    def remove(self, ids: Any) -> np.ndarray:
        """Forgets rows; the ids that were there, in order.

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim.
        """
        ids = np.unique(as_ids(ids))
        gone = ids[self._map.remove(ids) >= 0]
        if self._keep_changes and len(gone):
            self._evicted.append(gone)
        return gone

    def evict(self, *, max_age: int | None = None, min_touches: int = 0) -> np.ndarray:
        """Forgets rows that no call has touched for long, or few calls; their ids.

        Args:
            max_age: By how much the clock may have gone on since; None for any age.
            min_touches: How many calls must have touched a row for it to stay.
        """
        ids, rows = self._map.items()
        is_gone = self._touches.num[rows] < min_touches
        if max_age is not None:
            is_gone |= self.clock - self._touches.last[rows] > max_age
        return self.remove(ids[is_gone])

    def state(self, ids: Any = None) -> dict[str, np.ndarray]:
        """All that is there, or what there is of some ids, as copies by name (`table_state`).

        Raises:
            TypeError: The ids are not integers.
            ValueError: The ids have not one dim.
        """
        if ids is None:
            ids, rows = self._map.items()
        else:
            ids = np.unique(as_ids(ids))
            rows = self._map.find(ids)
            ids, rows = ids[rows >= 0], rows[rows >= 0]
        touches = self._touches.last[rows], self._touches.num[rows]
        return table_state.to_state(ids, self._arrays.read(rows), *touches, self.clock)

    def take_changes(self) -> dict[str, np.ndarray]:
        """The state of the ids that changed since the last call, and the ids that are `evicted`.

        Restored in turn onto an earlier state, they give the rows of this one. A pull changes a row
        only if it creates it: when and how often others were pulled is in `state` alone.

        Raises:
            ValueError: The shard keeps no changes.
        """
        if not self._keep_changes:
            raise ValueError(
                "This table does not record changes. Create the shard with keep_changes=True."
            )
        none = np.zeros(0, np.int64)
        changed, evicted = np.concatenate([none, *self._changed]), [none, *self._evicted]
        self._changed, self._evicted = [], []
        gone = np.unique(np.concatenate(evicted))
        return self.state(changed) | {"evicted": gone[self._map.find(gone) < 0]}

    def restore(self, state: State) -> None:
        """Puts in rows as `state` or `take_changes` gave them, over those that are there.

        If there are more than `max_rows` then, those that go first are evicted.

        Raises:
            ValueError: The state is of a table with another dim, dtype or optimizer.
            MemoryError: There is no room for them in `max_bytes`.
        """
        rows, ids = table_state.rows_of_state(state, self.options.row), state["ids"]
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"A table cannot be restored from {len(ids)} rows, because some have the same id. "
                f"Each id has one row. Restore the states one after the other."
            )
        self.require_room(ids, may_evict=False)
        self._map.remove(state.get("evicted", ids[:0]))
        numbers = self._map.find_or_add(ids)
        self._reserve()
        self._arrays.change(_set_rows, numbers, rows)
        self._arrays.wait()
        self._touches.last[numbers] = state["last"]
        self._touches.num[numbers] = state["num"]
        self.clock = max(self.clock, int(state["clock"]))
        if self.options.max_rows is not None:
            self._evict_first(len(self) - self.options.max_rows, numbers[:0])

    def require_room(self, ids: np.ndarray, *, may_evict: bool = True) -> None:
        """Refuses ids whose rows would take more memory than `max_bytes`.

        Args:
            ids: Of rows that are to be there at once.
            may_evict: Whether others go before, as `max_rows` says.

        Raises:
            MemoryError: They would.
        """
        room = self.options.room
        if room is None or len(self) + len(ids) <= room:
            return
        num_rows = len(self) + len(np.unique(ids[self._map.find(ids) < 0]))
        if may_evict and self.options.max_rows is not None:
            num_rows = min(num_rows, self.options.max_rows)
        if num_rows > room:
            raise MemoryError(
                f"A server cannot store {num_rows} rows of a table of dim {self.options.dim}. "
                f"With max_bytes={self.options.max_bytes} it has room for {room}: room doubles "
                f"from capacity={self.options.capacity}, and {2 * room} rows would need "
                f"{self.options.bytes_for(2 * room)} bytes. Use more servers, evict rows with "
                f"max_rows, or use a larger max_bytes."
            )

    def _find_or_create(self, ids: np.ndarray) -> np.ndarray:
        """The rows of ids, of which those that are missing are created."""
        rows = self._map.find(ids)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            self._create(np.unique(ids[missing]), rows[rows >= 0])
            rows[missing] = self._map.find(ids[missing])
        return rows

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _create(self, ids: np.ndarray, rows_in_use: np.ndarray) -> None:
        self.require_room(ids)
        if self.options.max_rows is not None:
            in_call = len(ids) + len(np.unique(rows_in_use))
            if in_call > self.options.max_rows:
                raise ValueError(
                    f"A call requests {in_call} different ids from a shard with "
                    f"max_rows={self.options.max_rows}. All rows of a call must fit at once. Use "
                    f"a larger max_rows, or request fewer ids."
                )
            self._evict_first(len(self) + len(ids) - self.options.max_rows, rows_in_use)
        rows = self._map.find_or_add(ids)
        self._reserve()
        self._touches.num[rows] = 0
        create = functools.partial(
            create_rows,
            seed=self._seed,
            optimizer=self._optimizer,
            initializer=self.options.initializer,
        )
        self._arrays.change(create, rows, words(ids))
        self._arrays.wait()
        self._note_changes(ids)

    def _reserve(self) -> None:
        self._arrays.reserve(self._map.num_rows)
        self._touches.reserve(self._map.num_rows)

    def _evict_first(self, count: int, rows_in_use: np.ndarray) -> None:
        if count <= 0:
            return
        ids, rows = self._map.items()
        may_go = ~np.isin(rows, rows_in_use)
        self.remove(
            self._touches.first_to_go(count, self.options.eviction, ids[may_go], rows[may_go])
        )

    def _note_changes(self, ids: np.ndarray) -> None:
        if self._keep_changes and len(ids):
            self._changed.append(ids.copy())


@functools.partial(jax.jit, donate_argnums=0)
def _set_values(table: Rows, indices: jax.Array, values: jax.Array) -> Rows:
    return Rows(scatter(table.values, indices, values), table.slots)
