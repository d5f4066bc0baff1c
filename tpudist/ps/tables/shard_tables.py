"""ShardTables: what one server holds of tables of rows by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tpudist.ps.changes import TableChange
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_shard import TableShard


class ShardTables:
    """The shards of tables on one server, by the number of the table."""

    def __init__(self):
        """None yet."""
        self._tables: dict[int, TableShard] = {}

    def define(self, options: Mapping[int, TableOptions]) -> None:
        """Takes tables that it is to hold from now on."""
        for number, wanted in options.items():
            if number not in self._tables:
                self._tables[number] = TableShard(wanted)

    def pull(self, number: int, ids: np.ndarray, create: bool) -> np.ndarray:
        """The rows of ids; see `TableShard.pull`."""
        return self._find(number).pull(ids, create=create)

    def check(self, changes: Sequence[TableChange]) -> None:
        """Refuses what does not fit.

        Raises:
            TypeError: Ids are no integers, or rows no floats.
            ValueError: The shapes do not fit.
            MemoryError: There is no room for their rows.
        """
        ids_of: dict[int, list[np.ndarray]] = {}
        for change in changes:
            values = np.asarray(change.values)
            options = self._find(change.table).options
            options.check_rows(change.what, values, len(change.ids))
            most = options.max_rows
            if most is not None and len(np.unique(change.ids)) > most:
                raise ValueError(
                    f"A closure changes more than max_rows={most} rows of a table on one server. "
                    f"All rows of a closure must fit at once. Use a larger max_rows."
                )
            ids_of.setdefault(change.table, []).append(change.ids)
        for number, ids in ids_of.items():
            self._find(number).require_room(np.concatenate(ids))

    def apply(self, change: TableChange) -> None:
        """Changes rows."""
        table = self._find(change.table)
        if change.what == "gradients":
            table.push(change.ids, change.values)
        else:
            table.assign(change.ids, change.values)

    def evict(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Forgets rows; how many."""
        return len(self._find(number).evict(max_age=max_age, min_touches=min_touches))

    def state(self, number: int) -> dict[str, np.ndarray]:
        """All of a table's rows; see `table_state`."""
        return self._find(number).state()

    def restore(
        self, number: int, state: Mapping[str, np.ndarray], *, replace: bool = False
    ) -> None:
        """Puts rows in, over those that are there or in the place of all of them."""
        found = self._find(number)
        table = TableShard(found.options) if replace else found
        table.restore(state)
        self._tables[number] = table

    def numbers(self) -> Iterator[int]:
        """Of the tables."""
        return iter(self._tables)

    def size(self, number: int) -> int:
        """How many rows there are."""
        return len(self._find(number))

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(table.nbytes for table in self._tables.values())

    def clear(self) -> None:
        """All tables are as they were when they were defined."""
        self._tables = {n: TableShard(x.options) for n, x in self._tables.items()}

    def _find(self, number: int) -> TableShard:
        if number not in self._tables:
            raise ValueError(
                f"A server received a request for table {number}, which the program has not "
                f"created (yet). Create all tables in the strategy's scope, in the same order in "
                f"each run, before you read or schedule."
            )
        return self._tables[number]


def state_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of a record, which may be written to."""
    return {name: np.array(x) for name, x in arrays.items()}
