"""TableShard: rows of an embedding table by 64-bit ids, in host memory.

There is no vocabulary: the first use of an id creates its row, and a bound on the number of rows
evicts others. It knows no network, file or closure: it returns its contents as NumPy arrays by name
(`table_state`), and restores them. Only one thread may call it at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.typing import ArrayLike

from tpudist.ps.tables import table_state
from tpudist.ps.tables.id_hash import as_ids
from tpudist.ps.tables.id_map import IdMap
from tpudist.ps.tables.row_arrays import RowArrays
from tpudist.ps.tables.row_creation import create_rows, halves, initial_rows
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
    """Rows `[dim]` by id, and their state of the optimizer.

    Methods raise the errors of `as_ids` and `TableOptions.check_rows` for invalid ids and rows. If
    a call needs new rows, it raises ValueError if it names more than `max_rows` ids, and
    MemoryError if the rows do not fit into `max_bytes`. A call that raises changes no row; only an
    initializer that raises does so after other rows were evicted.

    Args:
        options: Options of the table, the same on all of its shards.

    Attributes:
        options: Options of the table.
        clock: Number of calls that used rows: the time in which ages of rows are measured.
    """

    def __init__(self, options: TableOptions):
        self.options, self.clock = options, 0
        seed = options.seed & ((1 << 64) - 1)  # two's complement of a negative seed
        self._seed = halves(np.array([seed], np.uint64))[0]
        self._optimizer = RowOptimizer(options.optimizer)
        self._map = IdMap()
        self._arrays = RowArrays(options.row, options.capacity)
        self._touches = RowTouches(options.capacity)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including the room for further rows."""
        return self._map.nbytes + self._arrays.nbytes + self._touches.nbytes

    def ids(self) -> np.ndarray:
        """Returns the ids that have rows, int64 `[n]`."""
        return self._map.ids()

    def pull(self, ids: ArrayLike, *, create: bool = True) -> np.ndarray:
        """Returns copies of the rows of ids `[n]`, in their order, as `[n, dim]`.

        Args:
            ids: Ids; an id may occur more than once.
            create: Whether to create rows for missing ids. With False, their initial values are
                returned, and no use is recorded: for evaluation.
        """
        ids = as_ids(ids)
        rows = self._find_or_create(ids) if create else self._map.find(ids)
        if create:
            self._touches.touch(rows, self._tick())
        values = np.empty((len(ids), self.options.dim), self.options.dtype)
        # A missing id (row -1) reads another row, which is overwritten below.
        self._arrays.read_into(values, rows, lambda table: table.values)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            values[missing] = initial_rows(ids[missing], self._seed, self.options)
        return values

    def push(self, ids: ArrayLike, gradients: ArrayLike) -> None:
        """Updates the rows of ids `[n]` by gradients `[n, dim]`, each row once.

        Gradients of one id are summed. A missing id gets a row first.
        """
        ids, gradients = as_ids(ids), np.asarray(gradients)
        self.options.check_rows("gradients", gradients, len(ids))
        rows = self._find_or_create(ids)
        chosen, groups = self._touches.touch_each(rows, self._tick())
        if groups is not None:
            gradients = sum_duplicates(gradients, groups, len(chosen))
            rows = rows[chosen]
        update = functools.partial(_update_rows, optimizer=self._optimizer)
        self._arrays.change(update, rows, gradients)
        # The computation reads NumPy arrays of the caller, who may change them after this call.
        self._arrays.wait()

    def assign(self, ids: ArrayLike, rows: ArrayLike) -> None:
        """Replaces the rows of ids `[n]` by `rows` `[n, dim]`, but not their slots.

        If an id occurs more than once, its last row counts.
        """
        ids, values = as_ids(ids), np.asarray(rows)
        self.options.check_rows("rows", values, len(ids))
        unique, first_of_reversed = np.unique(ids[::-1], return_index=True)
        numbers = self._find_or_create(unique)
        self._touches.touch(numbers, self._tick())
        self._arrays.change(_set_values, numbers, values[::-1][first_of_reversed])
        self._arrays.wait()

    def remove(self, ids: ArrayLike) -> np.ndarray:
        """Removes rows; returns the ids that had rows, in order."""
        ids = np.unique(as_ids(ids))
        return ids[self._map.remove(ids) >= 0]

    def evict(self, *, max_age: int | None = None, min_touches: int = 0) -> np.ndarray:
        """Removes rows that were not used recently or often; returns their ids.

        Args:
            max_age: Maximum number of calls since a row was last used; None for any number.
            min_touches: Minimum number of calls that used a row.
        """
        ids, rows = self._map.items()
        is_unused = self._touches.num_calls[rows] < min_touches
        if max_age is not None:
            is_unused |= self.clock - self._touches.last[rows] > max_age
        return self.remove(ids[is_unused])

    def state(self) -> dict[str, np.ndarray]:
        """Returns copies of all contents, by name (`table_state`)."""
        ids, rows = self._map.items()
        touches = self._touches.last[rows], self._touches.num_calls[rows]
        return table_state.to_state(ids, self._arrays.read(rows), *touches, self.clock)

    def restore(self, state: State) -> None:
        """Adds rows of a `state`, and replaces existing rows with the same ids.

        If there are more than `max_rows` then, rows are evicted.

        Raises:
            ValueError: If the table of the state had another dim, dtype or optimizer.
            MemoryError: If there is no room for them in `max_bytes`.
        """
        rows, ids = table_state.rows_of_state(state, self.options.row), state["ids"]
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"A table cannot be restored from {len(ids)} rows, because some have the same id. "
                f"Each id has one row. Restore the states one after the other."
            )
        # All rows exist together before some are evicted below.
        self.require_room(ids, may_evict=False)
        with self._add(ids, new=ids[self._map.find(ids) < 0]) as numbers:
            self._arrays.change(_set_rows, numbers, rows)
            self._arrays.wait()
        self._touches.last[numbers] = state["last"]
        self._touches.num_calls[numbers] = state["num"]
        self.clock = max(self.clock, int(state["clock"]))
        if self.options.max_rows is not None:
            no_row_is_in_use = numbers[:0]
            self._evict_first(len(self) - self.options.max_rows, no_row_is_in_use)

    def require_room(self, ids: np.ndarray, *, may_evict: bool = True) -> None:
        """Checks that rows fit into `max_bytes`.

        Args:
            ids: Ids whose rows must exist at the same time.
            may_evict: Whether other rows may be evicted first, because of `max_rows`.

        Raises:
            MemoryError: If they do not fit.
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
        """Returns the rows of ids, and creates missing ones."""
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
        # All checks come before the first change, so that a call that raises changes nothing.
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
        create = functools.partial(
            create_rows,
            seed=self._seed,
            optimizer=self._optimizer,
            initializer=self.options.initializer,
        )
        with self._add(ids, new=ids) as rows:
            self._arrays.change(create, rows, halves(ids))
            self._arrays.wait()
        self._touches.num_calls[rows] = 0  # the call that creates them sets `last`

    @contextlib.contextmanager
    def _add(self, ids: np.ndarray, *, new: np.ndarray) -> Iterator[np.ndarray]:
        """Adds missing ids, and yields all rows; removes the `new` ids if the block raises."""
        rows = self._map.find_or_add(ids)
        try:
            self._arrays.reserve(self._map.end_row)
            self._touches.reserve(self._map.end_row)
            yield rows
        except BaseException:
            self._map.remove(new)
            raise

    def _evict_first(self, count: int, rows_in_use: np.ndarray) -> None:
        if count <= 0:
            return
        # Reads all rows. A full table does this in each call that creates rows.
        ids, rows = self._map.items()
        may_go = ~np.isin(rows, rows_in_use)  # rows of the current call stay
        self.remove(
            self._touches.first_to_evict(count, self.options.eviction, ids[may_go], rows[may_go])
        )


@functools.partial(jax.jit, donate_argnums=0)
def _set_values(table: Rows, indices: jax.Array, values: jax.Array) -> Rows:
    return Rows(scatter(table.values, indices, values), table.slots)
