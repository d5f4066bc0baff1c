"""The arrays of a table in a checkpoint: ids, rows, slots and uses, for any number of rows."""

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
    """A table whose rows can be read and replaced together."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns all rows and their state."""
        ...

    def replace(self, state: State) -> None:
        """Replaces all rows."""
        ...


class _Source:
    """Reads all arrays of a table at one moment, and replaces them at one moment."""

    def __init__(self, table: ReplaceableTable):
        self._table = table
        self._state: dict[str, np.ndarray] | None = None

    def read(self, key: Hashable) -> np.ndarray:
        if self._state is None:
            self._state = self._table.state()
        return self._state[str(key)]

    def write_all(self, values: dict[Hashable, np.ndarray]) -> None:
        self._table.replace({str(key): value for key, value in values.items()})


def arrays_of_table(table: ReplaceableTable, options: TableOptions) -> dict[str, Any]:
    """Returns the arrays of a table for a checkpoint, by name."""
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
