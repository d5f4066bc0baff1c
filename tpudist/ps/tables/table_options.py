"""TableOptions: the options of a table, the same on all of its shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist.ps.tables.id_map import IdMap
from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows
from tpudist.ps.tables.row_touches import Eviction, RowTouches

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
"""Called with a key, a shape and a dtype; returns an array, like those of `jax.nn.initializers`."""

_DTYPES = ("float32", "bfloat16", "float16")
SMALL_NORMAL = jax.nn.initializers.normal(0.01)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of a table.

    Attributes:
        dim: Length of a row.
        optimizer: Updates a row by its gradient (`RowOptimizer`).
        initializer: Draws a new row as an array `[1, dim]`, from a key of `seed` and the id.
        dtype: Dtype of rows: float32, bfloat16 or float16. Gradients and slots are float32.
        seed: Seed; only its lower 64 bits count.
        max_rows: Maximum number of rows per shard; None for no limit.
        max_bytes: Maximum memory per shard; None for no limit. A row that does not fit is
            rejected. Not included are 4 bytes per removed row until another row takes its place,
            temporary memory during calls, and old arrays while they grow.
        eviction: Rows to evict when there would be more than `max_rows`.
        capacity: Initial room in rows. It doubles, which copies all rows and compiles again.
    """

    dim: int
    optimizer: optax.GradientTransformation
    initializer: Initializer = SMALL_NORMAL
    dtype: Any = np.float32  # any DTypeLike; a np.dtype after `__post_init__`
    seed: int = 0
    max_rows: int | None = None
    max_bytes: int | None = None
    eviction: Eviction = Eviction.OLDEST
    capacity: int = 1024

    def __post_init__(self) -> None:
        RowOptimizer(self.optimizer)  # raises an error if it cannot be applied to rows
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for name in ("dim", "max_rows", "max_bytes", "capacity"):
            number = vars(self)[name]
            if number is not None and number < 1:
                raise ValueError(f"Table({name}={number}): {name} must be at least 1.")
        if self.dtype.name not in _DTYPES:
            raise ValueError(
                f"Table(dtype={self.dtype}): dtype must be one of {', '.join(_DTYPES)}. Use "
                f"float32, or bfloat16 for half the memory."
            )
        if self.max_bytes is not None and self.bytes_for(self.capacity) > self.max_bytes:
            raise ValueError(
                f"Table(capacity={self.capacity}, max_bytes={self.max_bytes}): the initial "
                f"capacity of a server needs {self.bytes_for(self.capacity)} bytes. Use a smaller "
                f"capacity, or a larger max_bytes."
            )

    @functools.cached_property
    def row(self) -> Rows:
        """Shapes of a row and its slots."""
        value = jax.ShapeDtypeStruct((self.dim,), self.dtype)
        return Rows(value, jax.eval_shape(RowOptimizer(self.optimizer).init, value))

    def bytes_for(self, num_rows: int) -> int:
        """Returns the memory of a shard with room for `num_rows`; see `max_bytes`."""
        row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.row))
        return row_bytes * num_rows + IdMap.bytes_for(num_rows) + RowTouches.bytes_for(num_rows)

    @functools.cached_property
    def room(self) -> int | None:
        """Number of rows that fit into `max_bytes`, as arrays double from `capacity`."""
        if self.max_bytes is None:
            return None
        room = self.capacity
        while self.bytes_for(2 * room) <= self.max_bytes:
            room *= 2
        return room

    def check_rows(self, name: str, rows: np.ndarray, num_ids: int) -> None:
        """Checks that `rows` has one row of this table per id.

        Raises:
            TypeError: If the rows are not floats.
            ValueError: If their shape does not match.
        """
        if rows.shape != (num_ids, self.dim):
            raise ValueError(
                f"{num_ids} ids of a table with dim={self.dim} need one row per id, but {name} "
                f"has shape {list(rows.shape)}. Use the shape [{num_ids}, {self.dim}]."
            )
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            raise TypeError(
                f"A table of {self.dtype} needs rows of floats, but {name} has dtype "
                f"{rows.dtype}. Cast them, such as with {name}.astype(np.float32)."
            )
