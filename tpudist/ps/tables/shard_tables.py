"""ShardTables: the parts of tables on one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tpudist.ps.changes import TableChange
from tpudist.ps.tables.id_hash import as_ids
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_shard import TableShard


class ShardTables:
    """Parts of tables, by the number of the table."""

    def __init__(self):
        self._tables: dict[int, TableShard] = {}

    def define(self, options: Mapping[int, TableOptions]) -> None:
        """Adds tables that are not known yet."""
        for number, table_options in options.items():
            if number not in self._tables:
                self._tables[number] = TableShard(table_options)

    def pull(self, number: int, ids: np.ndarray, create: bool) -> np.ndarray:
        """Returns the rows of ids; see `TableShard.pull`."""
        return self._find(number).pull(ids, create=create)

    def check(self, changes: Sequence[TableChange]) -> None:
        """Checks that changes can be applied.

        Raises:
            TypeError: If ids are not integers, or rows are not floats.
            ValueError: If shapes do not match, or a closure changes more than `max_rows` rows.
            MemoryError: If there is no room for the rows.
        """
        ids_of: dict[int, list[np.ndarray]] = {}
        for change in changes:
            values, ids = np.asarray(change.values), as_ids(change.ids)
            options = self._find(change.table).options
            options.check_rows(change.op, values, len(ids))
            limit = options.max_rows
            # Each change may evict the rows of earlier ones, so only its own rows must fit.
            if limit is not None and len(np.unique(ids)) > limit:
                raise ValueError(
                    f"A closure changes more than max_rows={limit} rows of a table on one server. "
                    f"All rows of a closure must fit at once. Use a larger max_rows."
                )
            ids_of.setdefault(change.table, []).append(ids)
        for number, parts in ids_of.items():
            self._find(number).require_room(np.concatenate(parts))

    def apply(self, change: TableChange) -> None:
        """Changes rows."""
        table = self._find(change.table)
        if change.op == "gradients":
            table.push(change.ids, change.values)
        else:
            table.assign(change.ids, change.values)

    def evict(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Removes rows; returns their number."""
        return len(self._find(number).evict(max_age=max_age, min_touches=min_touches))

    def state(self, number: int) -> dict[str, np.ndarray]:
        """Returns all rows of a table; see `table_state`."""
        return self._find(number).state()

    def restore(
        self, number: int, state: Mapping[str, np.ndarray], *, replace: bool = False
    ) -> None:
        """Adds or replaces rows, or replaces all rows of the table."""
        table = self._find(number)
        if replace:
            table = TableShard(table.options)
        table.restore(state)  # may raise; then the old rows stay
        self._tables[number] = table

    def numbers(self) -> Iterator[int]:
        """Returns the numbers of the tables."""
        return iter(self._tables)

    def size(self, number: int) -> int:
        """Returns the number of rows of a table."""
        return len(self._find(number))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(table.nbytes for table in self._tables.values())

    def clear(self) -> None:
        """Removes all rows."""
        self._tables = {n: TableShard(x.options) for n, x in self._tables.items()}

    def _find(self, number: int) -> TableShard:
        if number not in self._tables:
            raise ValueError(
                f"A server received a request for table {number}, which the program has not "
                f"created (yet). Create all tables in the strategy's scope, in the same order in "
                f"each run, before you read or schedule."
            )
        return self._tables[number]
