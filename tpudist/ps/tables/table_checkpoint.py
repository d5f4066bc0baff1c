"""What a checkpoint has of a table: its ids, rows, slots and touches, of however many rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import jax
import numpy as np

from tpudist.ps.server_array import ArraysInCheckpoint
from tpudist.ps.tables.row_optimizers import RowOptimizer
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.tables.table_state import State, slot_name


class ReplaceableTable(Protocol):
    """A table of which all rows can be read and replaced."""

    def state(self) -> dict[str, np.ndarray]:
        """All rows, and what belongs to them."""
        ...

    def replace(self, state: State) -> None:
        """Has those rows, and no others."""
        ...


class _Source:
    """A table, whose arrays are read in one moment and replaced in one."""

    def __init__(self, table: ReplaceableTable):
        self._table = table
        self._found: dict[str, np.ndarray] | None = None

    def read(self, key: Hashable) -> np.ndarray:
        if self._found is None:
            self._found = self._table.state()
        return self._found[str(key)]

    def write_all(self, values: dict[Hashable, Any]) -> None:
        self._table.replace({str(key): value for key, value in values.items()})


def arrays_of_table(table: ReplaceableTable, options: TableOptions) -> dict[str, Any]:
    """The arrays of a table for a checkpoint, by name; those of slots as the optimizer has them."""
    arrays = ArraysInCheckpoint(_Source(table))
    row = jax.ShapeDtypeStruct((options.dim,), options.dtype)
    slots = jax.eval_shape(RowOptimizer(options.optimizer).init, row)
    numbers = {name: arrays.array(name, (-1,), np.int64) for name in ("ids", "last", "num")}
    return numbers | {
        "clock": arrays.array("clock", (), np.int64),
        "rows": arrays.array("rows", (-1, options.dim), options.dtype),
        "slots": jax.tree_util.tree_map_with_path(
            lambda path, x: arrays.array(slot_name(path), (-1, *x.shape), x.dtype), slots
        ),
    }
