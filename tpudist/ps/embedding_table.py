"""Table: rows by 64-bit id on all servers of a strategy, without a vocabulary."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.ps.changes import TableChange
from tpudist.ps.pending_rows import PendingRows
from tpudist.ps.servers import Servers
from tpudist.ps.tables import table_checkpoint, table_options
from tpudist.ps.tables.id_hash import as_ids, shard_of
from tpudist.ps.tables.row_touches import Eviction
from tpudist.ps.tables.table_options import Initializer, TableOptions
from tpudist.ps.tables.table_state import State, part_of_shard
from tpudist.xla import traces

T = TypeVar("T")


class Table:
    """An embedding table that creates a row when its id is first looked up or updated.

    Ids are any 64-bit integers. A hash assigns each id to one server. The initial value of a row
    depends only on its id and the seed, not on the order or the number of servers. Look up and
    update rows in scheduled functions, before and after `strategy.run`, and pass it the rows:

        rows = table.lookup(ids)
        gradient = strategy.run(step, args=(rows, ...))
        table.apply_gradients(ids, gradient)

    Changes of a function take effect once, after it ends. Create a table in the scope of a
    `ParameterServerStrategy`. tf.distribute has no such table.

    Args:
        dim: Length of a row.
        optimizer: Optimizer that updates each row separately: an Optax transformation, or
            `rowwise_adagrad`. Rows without a gradient do not change.
        initializer: Initializer of new rows, such as one of `jax.nn.initializers`.
        dtype: Dtype of the rows: float32, bfloat16 or float16.
        seed: Seed of the initializer.
        max_rows: Maximum number of rows per server; by default unlimited.
        max_bytes: Maximum memory of the table per server; by default unlimited. Room doubles from
            `capacity`. If there is no room for a row, the function raises `MemoryError`, and the
            server changes nothing.
        eviction: Rows to remove when there would be more than `max_rows`: `oldest` or
            `least frequent`.
        capacity: Number of rows for which each server reserves room initially.
        name: Name in messages.

    Raises:
        RuntimeError: If the table is created in another scope, or in a scheduled function.
        ValueError: If a number is below 1, the dtype is not supported, the optimizer draws random
            numbers, or the initial room exceeds `max_bytes`.

    Attributes:
        name: Name in messages.
        options: Options of the table.
    """

    def __init__(
        self,
        dim: int,
        optimizer: optax.GradientTransformation,
        *,
        initializer: Initializer = table_options.SMALL_NORMAL,
        dtype: DTypeLike = np.float32,
        seed: int = 0,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        eviction: Eviction | str = Eviction.OLDEST,
        capacity: int = 1024,
        name: str | None = None,
    ):
        strategy = context.get_strategy()
        if strategy.servers is None or current_place() is not None:
            raise RuntimeError(
                "A Table needs parameter servers, and cannot be created in a scheduled function. "
                "Create it in the scope of a tpudist.ParameterServerStrategy."
            )
        self.options = TableOptions(
            dim=dim,
            optimizer=optimizer,
            initializer=initializer,
            dtype=dtype,
            seed=seed,
            max_rows=max_rows,
            max_bytes=max_bytes,
            eviction=Eviction(eviction),
            capacity=capacity,
        )
        self._strategy = strategy
        self._num_servers = len(strategy.servers)
        self._number = strategy.servers.define_table(self.options)
        self.name = f"Table_{self._number}" if name is None else name

    def lookup(self, ids: ArrayLike, *, create: bool = True) -> jax.Array:
        """Returns the rows of ids: `[*ids.shape, dim]`.

        Args:
            ids: Integers of any shape; an id may occur more than once.
            create: Whether to create rows for new ids. With False, their initial values are
                returned without creating rows: for evaluation.

        Raises:
            RuntimeError: If called in a traced function, or after the same function has changed the
                table.
            TypeError: If the ids are not integers.
        """
        self._check_not_traced("looked up", ids)
        with traces.run_eagerly():
            return jnp.asarray(self._begin(np.asarray(ids), create).get())

    def prefetch(self, ids: ArrayLike) -> PendingRows:
        """Starts to look up rows, without waiting for them: see `PendingRows.get`."""
        self._check_not_traced("looked up", ids)
        return self._begin(np.asarray(ids), True)

    def prefetch_of(
        self, elements: Iterable[T], ids_of: Callable[[T], ArrayLike], ahead: int = 1
    ) -> Iterator[tuple[T, PendingRows]]:
        """Yields elements with the rows of their ids, which are looked up `ahead` elements earlier.

        Rows are looked up before the functions in between have changed them, so they may be older
        than those of `lookup`. Use it in the function of `create_per_worker_dataset`.

        Raises:
            ValueError: If `ahead` is less than 1.
        """
        if ahead < 1:
            raise ValueError(
                f"prefetch_of(ahead={ahead}): ahead must be at least 1. Use lookup to read rows "
                f"without prefetching."
            )
        return self._prefetch_each(iter(elements), ids_of, ahead)

    def _prefetch_each(
        self, elements: Iterator[T], ids_of: Callable[[T], ArrayLike], ahead: int
    ) -> Iterator[tuple[T, PendingRows]]:
        requested = ((x, self.prefetch(ids_of(x))) for x in elements)
        waiting = collections.deque(itertools.islice(requested, ahead))
        while waiting:
            waiting.extend(itertools.islice(requested, 1))
            yield waiting.popleft()

    def apply_gradients(self, ids: ArrayLike, gradients: ArrayLike) -> None:
        """Updates the rows of ids; the gradients of one id are summed first.

        Args:
            ids: Same as in `lookup`.
            gradients: `[*ids.shape, dim]` floats.

        Raises:
            TypeError: If the ids are not integers, or the gradients are not floats.
            ValueError: If the shapes do not match.
        """
        self._change("gradients", ids, gradients)

    def assign(self, ids: ArrayLike, rows: ArrayLike) -> None:
        """Replaces the rows of ids, but not their optimizer state.

        Args:
            ids: Same as in `lookup`. If an id occurs more than once, its last row counts.
            rows: `[*ids.shape, dim]` floats.
        """
        self._change("rows", ids, rows)

    def evict(self, *, max_age: int | None = None, min_touches: int = 0) -> int:
        """Removes rows that were not used recently or often; returns their number.

        Args:
            max_age: Maximum number of later lookups and updates that reached the row's server; None
                for any number.
            min_touches: Minimum number of calls that used a row.
        """
        return sum(self._ask_all("evict_table", max_age, min_touches))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return sum(self._ask_all("size_of_table"))

    def state(self) -> dict[str, np.ndarray]:
        """Returns all rows and their optimizer state, as NumPy arrays by name."""
        parts = self._ask_all("state_of_table")
        # Each server counts its own calls; ages of rows are differences to one clock.
        clock = max(part["clock"] for part in parts)
        names = [name for name in parts[0] if name != "clock"]
        return {n: np.concatenate([part[n] for part in parts]) for n in names} | {"clock": clock}

    def restore(self, state: State) -> None:
        """Adds the rows of a `state`, also of a table on another number of servers.

        Servers receive their rows one after the other.

        Raises:
            ValueError: If the rows have another dim, dtype or optimizer.
        """
        self._restore(state, replace=False)

    def _restore(self, state: State, *, replace: bool) -> None:
        for server in range(self._num_servers):
            part = part_of_shard(state, server, self._num_servers)
            self._servers.restore_table(server, self._number, part, replace=replace)

    def checkpoint_objects(self) -> dict[str, Any]:
        """Returns the arrays that checkpoints save and restore: all arrays of `state`.

        Raises:
            RuntimeError: If scheduled functions are running.
        """
        strategy: Any = self._strategy
        strategy.check_quiet(f"Table '{self.name}'")
        return table_checkpoint.arrays_of_table(self, self.options)

    def replace(self, state: State) -> None:
        """Replaces all rows by the rows of `state`, like `restore` into an empty table.

        Raises:
            ValueError: If the rows have another dim, dtype or optimizer.
        """
        self._restore(state, replace=True)

    def __repr__(self) -> str:
        return f"Table('{self.name}', dim={self.options.dim}, {self.options.dtype})"

    # Within.

    @property
    def _servers(self) -> Servers:
        if self._strategy.servers is None:
            raise RuntimeError(
                f"Table '{self.name}' was used on a worker outside of a closure. Use it in a "
                f"function that you pass to schedule."
            )
        return self._strategy.servers

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        return self._servers.ask_all(method, self._number, *args)

    def _check_not_traced(self, action: str, *values: object) -> None:
        if context.current().frame is not None or any(map(traces.is_traced, values)):
            raise RuntimeError(
                f"Rows of table '{self.name}' were {action} in a traced function, where ids are "
                f"unknown. Do this in the scheduled function, before or after strategy.run, and "
                f"pass the rows."
            )

    def _begin(self, ids: np.ndarray, create: bool) -> PendingRows:
        place = current_place()
        if place is not None and place.state is not None:
            place.state.check_table(self._number, self.name)
        flat = as_ids(ids.reshape(-1))
        return PendingRows(
            self._number,
            self.options,
            flat,
            ids.shape,
            self._divide(flat),
            create=create,
            find_servers=lambda: self._servers,
        )

    def _change(self, op: str, ids: ArrayLike, values: ArrayLike) -> None:
        self._check_not_traced("changed", ids, values)
        ids = np.asarray(ids)
        flat, values = as_ids(ids.reshape(-1)), np.asarray(values)
        if values.shape != (*ids.shape, self.options.dim):
            raise ValueError(
                f"{op} of shape {list(values.shape)} do not match ids {list(ids.shape)} of "
                f"table '{self.name}' with dim {self.options.dim}. Use the shape "
                f"{[*ids.shape, self.options.dim]}."
            )
        values = values.reshape(flat.size, self.options.dim)
        self.options.check_rows(op, values, flat.size)
        place = current_place()
        for server, positions in self._divide(flat):
            if positions is None:
                change = TableChange(self._number, op, flat, values)
            else:
                change = TableChange(self._number, op, flat[positions], values[positions])
            if place is not None and place.state is not None:
                place.state.record_table_change(server, change)
            else:
                self._servers.change(server, [change])

    def _divide(self, flat: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
        """Returns the servers of ids, each with the positions of its ids; None for all ids."""
        if self._num_servers == 1:
            return [(0, None)]
        # Positions instead of booleans, because both `flat` and gradients are indexed with them.
        owners = shard_of(flat, self._num_servers)
        divided = ((i, np.flatnonzero(owners == i)) for i in range(self._num_servers))
        return [(i, positions) for i, positions in divided if positions.size]

    @property
    def handle_parts(self) -> tuple[object, ...]:
        """The table itself, by whose identity two uses of it are compared."""
        return (self,)

    def __reduce__(self) -> tuple[object, ...]:
        """Returns a reference for workers in other processes."""
        contents = {k: v for k, v in vars(self).items() if k != "_strategy"}
        return find_table, (self._strategy, self._number, contents)


def find_table(strategy: Any, number: int, contents: Mapping[str, Any]) -> Table:
    """Returns the table with this number; each process has one object per number."""
    key = "table", number
    table = strategy.variables_by_number.get(key)
    if table is None:
        table = object.__new__(Table)
        vars(table).update(contents, _strategy=strategy)
        strategy.variables_by_number[key] = table
    return table
