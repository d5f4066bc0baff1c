"""Table: rows by 64-bit id, on all servers of a strategy, without a vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.engine.engine import ActorDied, Engine
from tpudist.ps.changes import TableChange
from tpudist.ps.servers import Servers, gather
from tpudist.ps.tables import table_checkpoint, table_options
from tpudist.ps.tables.id_hash import as_ids, shard_of
from tpudist.ps.tables.row_touches import Eviction
from tpudist.ps.tables.table_options import Initializer, TableOptions
from tpudist.ps.tables.table_state import State, part_of_shard
from tpudist.xla import traces


class Table:
    """An embedding table whose rows come into being when their ids are first asked for.

    Ids are any integers of 64 bits. Each is on one server, by a hash; a row begins as its id and
    the seed say, whatever the order and the number of servers. Rows are looked up and updated in
    scheduled functions, before and after `strategy.run`, which takes the rows as an argument:

        rows = table.lookup(ids)
        gradient = strategy.run(step, args=(rows, ...))
        table.apply_gradients(ids, gradient)

    What a function changes has effect when it has ended, once. tf.distribute has no such table.

    Attributes:
        name: For messages.
        options: What the table is.
    """

    def __init__(
        self,
        dim: int,
        optimizer: optax.GradientTransformation,
        *,
        initializer: Initializer = table_options.SMALL_NORMAL,
        dtype: Any = np.float32,
        seed: int = 0,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        eviction: Eviction | str = Eviction.OLDEST,
        capacity: int = 1024,
        name: str | None = None,
    ):
        """Makes a table in the scope of a `ParameterServerStrategy`.

        Args:
            dim: The length of a row.
            optimizer: What a gradient does to its row, each row by itself: Optax's, or
                `rowwise_adagrad`. A row that has no gradient stays as it is.
            initializer: Draws a new row, as those of `jax.nn.initializers`.
            dtype: Of rows: float32, bfloat16 or float16.
            seed: Of new rows.
            max_rows: How many rows a server may have of it; by default any number.
            max_bytes: How much memory a server may give to it; by default any. Room doubles from
                `capacity`, and a function that asks for a row without room is refused with
                `MemoryError`, by a server that has changed nothing.
            eviction: Which rows go when there would be more than `max_rows`: `oldest` or
                `least frequent`.
            capacity: For how many rows each server has room at first.
            name: For messages.

        Raises:
            RuntimeError: In another scope, or in a scheduled function.
            ValueError: A number below 1, another dtype, or an optimizer that draws random numbers;
                or the room at first takes more than `max_bytes`.
        """
        strategy = context.get_strategy()
        if strategy.servers is None or current_place() is not None:
            raise RuntimeError(
                "A Table was made where there are no parameter servers, or in a scheduled "
                "function. Make it in the scope of a tpudist.ParameterServerStrategy."
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

    def lookup(self, ids: Any, *, create: bool = True) -> jax.Array:
        """The rows of ids: `[*ids.shape, dim]`.

        Args:
            ids: Integers of any shape; the same one may be there more than once.
            create: Whether ids that are not there get rows. If not, what those would be is given:
                for evaluation.

        Raises:
            RuntimeError: In a function that is traced; or the same function has changed the table.
            TypeError: The ids are no integers.
        """
        self._refuse_traced("looked up", ids)
        with traces.run_eagerly():
            return jnp.asarray(self._begin(np.asarray(ids), create).get())

    def prefetch(self, ids: Any) -> PendingRows:
        """Begins to look rows up, and does not wait for them: see `PendingRows.get`."""
        self._refuse_traced("looked up", ids)
        return self._begin(np.asarray(ids), True)

    def prefetch_of(
        self, elements: Iterable[Any], ids_of: Callable[[Any], Any], ahead: int = 1
    ) -> Iterator[tuple[Any, PendingRows]]:
        """Elements with the rows of their ids, which are looked up `ahead` elements before.

        They are as old as that: updates of the functions between are not in them. For the function
        of `create_per_worker_dataset`.
        """
        source = iter(elements)
        waiting = [(x, self.prefetch(ids_of(x))) for x in itertools.islice(source, ahead)]
        while waiting:
            following = next(source, None)
            if following is not None:
                waiting.append((following, self.prefetch(ids_of(following))))
            yield waiting.pop(0)

    def apply_gradients(self, ids: Any, gradients: Any) -> None:
        """Updates the rows of ids; the gradients of one id are summed first.

        Args:
            ids: As for `lookup`.
            gradients: `[*ids.shape, dim]` floats.

        Raises:
            TypeError: The ids are no integers, or the gradients no floats.
            ValueError: Their shapes do not fit.
        """
        self._change("gradients", ids, gradients)

    def assign(self, ids: Any, rows: Any) -> None:
        """Replaces the rows of ids, and leaves what the optimizer keeps of them.

        Args:
            ids: As for `lookup`; of one that is there more than once the last row counts.
            rows: `[*ids.shape, dim]` floats.
        """
        self._change("rows", ids, rows)

    def evict(self, *, max_age: int | None = None, min_touches: int = 0) -> int:
        """Forgets rows that were not used for long, or not often; how many.

        Args:
            max_age: How many calls of its server may have come since a row was used; None for any.
            min_touches: By how many calls a row must have been used.
        """
        return sum(self._ask_all("evict_table", max_age, min_touches))

    def __len__(self) -> int:
        """How many rows there are."""
        return sum(self._ask_all("size_of_table"))

    def state(self) -> dict[str, np.ndarray]:
        """All rows, and what the optimizer keeps of them, as NumPy arrays by name."""
        parts = self._ask_all("state_of_table")
        clock = max(part["clock"] for part in parts)
        names = [name for name in parts[0] if name != "clock"]
        return {n: np.concatenate([part[n] for part in parts]) for n in names} | {"clock": clock}

    def restore(self, state: State) -> None:
        """Puts rows in as `state` gave them, be it of another number of servers.

        Raises:
            ValueError: They are of another dim, dtype or optimizer.
        """
        self._restore(state, replace=False)

    def _restore(self, state: State, *, replace: bool) -> None:
        for server in range(self._num_servers):
            part = part_of_shard(state, server, self._num_servers)
            self._servers.restore_table(server, self._number, part, replace=replace)

    def checkpoint_objects(self) -> dict[str, Any]:
        """What checkpoints save: all arrays of `state`, which take the place of what there is.

        Raises:
            RuntimeError: Scheduled functions are under way.
        """
        strategy: Any = self._strategy
        strategy.check_quiet(f"Table '{self.name}'")
        return table_checkpoint.arrays_of_table(self, self.options)

    def replace(self, state: State) -> None:
        """Has the rows of `state`, and no others: as `restore` into a table that is empty.

        Raises:
            ValueError: They are of another dim, dtype or optimizer.
        """
        self._restore(state, replace=True)

    def __repr__(self) -> str:
        return f"Table('{self.name}', dim={self.options.dim}, {self.options.dtype})"

    # Within.

    @property
    def _servers(self) -> Servers:
        if self._strategy.servers is None:
            raise RuntimeError(
                f"Table '{self.name}' was used on a worker where no closure runs. Use it in a "
                f"function that was given to schedule."
            )
        return self._strategy.servers

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        return self._servers.ask_all(method, self._number, *args)

    def _refuse_traced(self, what: str, *values: Any) -> None:
        if context.current().frame is not None or any(map(traces.is_traced, values)):
            raise RuntimeError(
                f"Rows of table '{self.name}' were {what} in a function that is traced, where ids "
                f"are not known. Do it in the scheduled function, before or after strategy.run, "
                f"and pass the rows."
            )

    def _begin(self, ids: np.ndarray, create: bool) -> PendingRows:
        place = current_place()
        if place is not None and place.state is not None:
            place.state.check_table(self._number, self.name)
        return PendingRows(self, ids, create)

    def _change(self, what: str, ids: Any, values: Any) -> None:
        self._refuse_traced("changed", ids, values)
        ids = np.asarray(ids)
        flat, values = as_ids(ids.reshape(-1)), np.asarray(values)
        if values.shape != (*ids.shape, self.options.dim):
            raise ValueError(
                f"{what} of shape {list(values.shape)} were given for ids {list(ids.shape)} of "
                f"table '{self.name}' with dim {self.options.dim}. They have the shape "
                f"{[*ids.shape, self.options.dim]}."
            )
        values = values.reshape(flat.size, self.options.dim)
        self.options.check_rows(what, values, flat.size)
        place = current_place()
        for server, which in self._divide(flat):
            if which is None:
                change = TableChange(self._number, what, flat, values)
            else:
                change = TableChange(self._number, what, flat[which], values[which])
            if place is not None and place.state is not None:
                place.state.change_table(server, change)
            else:
                self._servers.change(server, [change])

    def _divide(self, flat: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
        """The servers of ids, and which of them those are; None for all."""
        if self._num_servers == 1:
            return [(0, None)]
        owners = shard_of(flat, self._num_servers)
        found = ((i, np.flatnonzero(owners == i)) for i in range(self._num_servers))
        return [(i, which) for i, which in found if which.size]

    @property
    def handle_parts(self) -> tuple:
        """By what workers know it: which one it is; see `coordinator.function_snapshot`."""
        return (self,)

    def __reduce__(self) -> tuple:
        """For workers in other processes."""
        kept: Mapping[str, Any] = {k: v for k, v in vars(self).items() if k != "_strategy"}
        return find_table, (self._strategy, self._number, kept)


class PendingRows:
    """Rows of a table that were asked for; made by `Table.prefetch`."""

    def __init__(self, table: Table, ids: np.ndarray, create: bool):
        """Asks for the rows of `ids`."""
        self._table, self._create, self._shape = table, create, ids.shape
        self._flat = as_ids(ids.reshape(-1))
        self._parts = table._divide(self._flat)
        self._ask()

    def get(self) -> np.ndarray:
        """The rows: `[*ids.shape, dim]`; waits for them."""
        try:
            found = gather(self._engine, self._calls)
        except ActorDied as died:
            found = self._ask_again(died)
        if len(self._parts) == 1 and self._parts[0][1] is None:
            rows = found[0]
        else:
            options = self._table.options
            rows = np.empty((self._flat.size, options.dim), options.dtype)
            for server, which in self._parts:
                rows[which] = found[server]
        return rows.reshape(*self._shape, self._table.options.dim)

    def _ask_again(self, died: ActorDied) -> dict[int, Any]:
        """The parts of those servers that are in the place of some that have died."""
        if _session() is not None:  # maybe it was replaced since; else the closure is run again
            self._ask()
            return gather(self._engine, self._calls)
        while True:
            self._table._servers.replace(died)
            self._ask()
            try:
                return gather(self._engine, self._calls)
            except ActorDied as again:
                died = again

    def _ask(self) -> None:
        session = _session()
        if session is not None:
            self._engine: Engine = session.engine
            actors = session.servers
        else:
            self._engine = self._table._servers.engine
            actors = self._table._servers.actors
        self._calls = {}
        for server, which in self._parts:
            ids = self._flat if which is None else self._flat[which]
            number = self._table._number
            call = self._engine.call(actors[server], "pull_table", number, ids, self._create)
            self._calls[server] = call


def _session() -> Any:
    """What the worker of this thread keeps; None on no worker."""
    place = current_place()
    return None if place is None else place.session


def find_table(strategy: Any, number: int, contents: Mapping[str, Any]) -> Table:
    """A table of a strategy, in any of its processes: one object for each number."""
    key = "table", number
    found = strategy.variables_by_number.get(key)
    if found is None:
        found = object.__new__(Table)
        vars(found).update(contents, _strategy=strategy)
        strategy.variables_by_number[key] = found
    return found
