"""The contents of a shard of a table, as NumPy arrays by name, and their division among shards.

The names are part of checkpoints and logs:

    ids         int64 `[n]`
    rows        `[n, dim]`
    slots...    `[n, ...]`: the optimizer's state, by the path of each array in it
    last        int64 `[n]`: clock of the last use
    num         int64 `[n]`: number of calls that used the row
    clock       int64: number of calls that used any row
"""

from collections.abc import Mapping

import jax
import numpy as np

from tpudist.ps.tables.id_hash import shard_of
from tpudist.ps.tables.row_optimizers import Rows

State = Mapping[str, np.ndarray]


def to_state(
    ids: np.ndarray, rows: Rows, last: np.ndarray, num: np.ndarray, clock: int
) -> dict[str, np.ndarray]:
    """Returns the arrays by name."""
    slots = jax.tree_util.tree_leaves_with_path(rows.slots)
    return {
        "ids": ids,
        "rows": rows.values,
        **{slot_name(path): x for path, x in slots},
        "last": last,
        "num": num,
        "clock": np.array(clock, np.int64),
    }


def rows_of_state(state: State, row_shapes: Rows) -> Rows:
    """Returns the rows and slots of a state of a table whose rows have these shapes.

    Raises:
        ValueError: If the table had another dim, dtype or optimizer, or the state is incomplete.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(row_shapes.slots)
    shapes = {slot_name(path): x for path, x in paths} | {"rows": row_shapes.values}
    shapes |= {name: jax.ShapeDtypeStruct((), np.int64) for name in ("ids", "last", "num")}
    needed, names = {*shapes, "clock"}, set(state)
    if needed != names:
        raise ValueError(
            f"A table cannot be restored from the arrays {sorted(names)}: with its optimizer it "
            f"needs {sorted(needed)}. Restore it with the optimizer with which it was saved."
        )
    for name, x in shapes.items():
        shape, array = (len(state["ids"]), *x.shape), state[name]
        if array.shape != shape or array.dtype != x.dtype:
            raise ValueError(
                f"A table cannot be restored from {name} of {array.dtype} {list(array.shape)}: "
                f"with {shape[0]} ids, its dim and its dtype it must be {x.dtype} {list(shape)}. "
                f"Restore it with the dim and dtype with which it was saved."
            )
    return Rows(state["rows"], structure.unflatten([state[slot_name(path)] for path, _ in paths]))


def part_of_shard(state: State, shard: int, num_shards: int) -> dict[str, np.ndarray]:
    """Returns the part of a state that belongs to one of `num_shards` shards.

    Raises:
        ValueError: If `num_shards` is not from 1 to 2^31.
    """
    keep = shard_of(state["ids"], num_shards) == shard
    return {name: x[keep] if x.ndim else x for name, x in state.items()}


def slot_name(path: jax.tree_util.KeyPath) -> str:
    """Returns the name of an array of the optimizer's state by its path."""
    return f"slots{jax.tree_util.keystr(path)}"
