"""What a shard of a table holds, as NumPy arrays by name, and which part of it is another shard's.

`ids` `[n]`, `rows` `[n, dim]`, `slots...` `[n, ...]` by their paths in the optimizer's state,
`last` and `num` of touches `[n]`, and the number `clock`. Of changes also `evicted` `[m]`, the ids
that are there no more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tpudist.ps.tables.id_hash import shard_of
from tpudist.ps.tables.row_optimizers import Rows

State = Mapping[str, np.ndarray]


def to_state(
    ids: np.ndarray, rows: Rows, last: np.ndarray, num: np.ndarray, clock: int
) -> dict[str, np.ndarray]:
    """The arrays by name."""
    slots = jax.tree_util.tree_leaves_with_path(rows.slots)
    return {
        "ids": ids,
        "rows": rows.values,
        **{slot_name(path): x for path, x in slots},
        "last": last,
        "num": num,
        "clock": np.array(clock, np.int64),
    }


def rows_of_state(state: State, row: Rows) -> Rows:
    """The rows and slots of a state of a table that has rows as `row`, shapes of one.

    Raises:
        ValueError: The state is of a table with another dim, dtype or optimizer, or not whole.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(row.slots)
    shapes = {slot_name(path): x for path, x in paths} | {"rows": row.values}
    shapes |= {name: jax.ShapeDtypeStruct((), np.int64) for name in ("ids", "last", "num")}
    needed, found = {*shapes, "clock"}, set(state) - {"evicted"}
    if needed != found:
        raise ValueError(
            f"A table cannot be restored from the arrays {sorted(found)}: with its optimizer it "
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
    """What of a state is that of one shard, if there are `num_shards`.

    Raises:
        ValueError: The number of shards is not from 1 to 2^31.
    """
    keep = shard_of(state["ids"], num_shards) == shard
    part = {name: x[keep] if x.ndim else x for name, x in state.items() if name != "evicted"}
    if "evicted" in state:
        evicted = state["evicted"]
        part["evicted"] = evicted[shard_of(evicted, num_shards) == shard]
    return part


def slot_name(path: Any) -> str:
    """The name of an array of the optimizer's state, by its path in that."""
    return f"slots{jax.tree_util.keystr(path)}"
