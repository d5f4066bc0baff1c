"""TableOptions: what a table of rows by id is, the same on all of its shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows
from tpudist.ps.tables.row_touches import Eviction

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
"""As those of `jax.nn.initializers`: a key, a shape and a dtype give an array."""

_DTYPES = ("float32", "bfloat16", "float16")
SMALL_NORMAL = jax.nn.initializers.normal(0.01)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What a table is."""

    dim: int
    """The length of a row."""
    optimizer: optax.GradientTransformation
    """What a gradient does to its row (`RowOptimizer`)."""
    initializer: Initializer = SMALL_NORMAL
    """Draws a new row as a table `[1, dim]`, from a key of `seed` and its id."""
    dtype: Any = np.float32
    """That of rows: float32, bfloat16 or float16. Gradients and slots are in float32."""
    seed: int = 0
    """Of 64 bits."""
    max_rows: int | None = None
    """How many rows a shard may have; None for any number."""
    max_bytes: int | None = None
    """How much memory a shard may take; None for any. A row for which there is no room is refused.
    While the room grows, the old one is there as well."""
    eviction: Eviction = Eviction.OLDEST
    """Which rows go when there would be more than `max_rows`."""
    capacity: int = 1024
    """For how many rows there is room at first; it doubles, which copies all and compiles anew."""

    def __post_init__(self) -> None:
        RowOptimizer(self.optimizer)  # refuses what it cannot apply to rows
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for name in ("dim", "max_rows", "max_bytes", "capacity"):
            number = getattr(self, name)
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
        """What is held for a row, as shapes."""
        value = jax.ShapeDtypeStruct((self.dim,), self.dtype)
        return Rows(value, jax.eval_shape(RowOptimizer(self.optimizer).init, value))

    def bytes_for(self, num_rows: int) -> int:
        """How much memory a shard takes at most that has room for so many rows."""
        of_row = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.row))
        num_slots = 1 << (2 * num_rows - 1).bit_length()
        # Besides: two touches, the place in a call, and whether it is free; the ids, and a map.
        return num_rows * (of_row + 2 * 8 + 4 + 4) + max(num_slots, 64) * (4 + 8 // 2)

    @functools.cached_property
    def room(self) -> int | None:
        """How many rows fit into `max_bytes`, as the room doubles from `capacity`."""
        if self.max_bytes is None:
            return None
        room = self.capacity
        while self.bytes_for(2 * room) <= self.max_bytes:
            room *= 2
        return room

    def check_rows(self, what: str, rows: np.ndarray, num_ids: int) -> None:
        """Refuses what are no rows of this table, one for each id.

        Raises:
            TypeError: They are not floats.
            ValueError: Their shape is another one.
        """
        if rows.shape != (num_ids, self.dim):
            raise ValueError(
                f"{num_ids} ids of a table with dim={self.dim} need one row per id, but {what} "
                f"has shape {list(rows.shape)}. Use the shape [{num_ids}, {self.dim}]."
            )
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            raise TypeError(
                f"A table of {self.dtype} needs rows of floats, but {what} has dtype "
                f"{rows.dtype}. Cast them, such as with {what}.astype(np.float32)."
            )

    def check_out(self, out: np.ndarray, num_ids: int) -> None:
        """Refuses what rows of this table cannot be written to.

        Raises:
            TypeError: They are not floats.
            ValueError: Shape, dtype or strides are other ones.
        """
        self.check_rows("out", out, num_ids)
        if out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"Rows of {self.dtype} cannot be written to out with dtype {out.dtype} and "
                f"strides {out.strides}. It must have the dtype of the table and be contiguous. "
                f"Use np.empty({out.shape}, {self.dtype})."
            )
