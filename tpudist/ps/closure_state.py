"""ClosureState: what one closure has read of what servers hold, and what it changes.

What is known to be read comes in one message from each server when the closure begins, and what the
worker has already is not sent again. What is changed goes to each server in one message when the
closure has ended, with the closure's number; one that raises changes nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tpudist.engine.engine import Actor, Engine
from tpudist.ps.changes import Assignment, Change, Gradients, RowChange, TableChange
from tpudist.ps.servers import Home, gather
from tpudist.ps.shard import Values
from tpudist.xla import traces


class HeldVariable(Protocol):
    """A variable that a server holds."""

    name: str
    home: Home


class ServerCopies:
    """What a worker has of what servers hold, from closure to closure."""

    def __init__(self, engine: Engine, device: jax.Device | None):
        """Nothing yet.

        Args:
            engine: Where the servers live.
            device: Where copies are put; None for JAX's default.
        """
        self.engine, self.device = engine, device
        self.arrays: dict[int, tuple[int, jax.Array]] = {}  # by variable: version and copy
        self.homes_read: dict[Any, dict[int, Home]] = {}  # by function

    def put(self, x: Any) -> jax.Array:
        """A host array where the worker computes, also in the midst of a trace."""
        with traces.run_eagerly():
            return jax.device_put(x, self.device)


class ClosureState:
    """What one closure sees and does."""

    def __init__(
        self,
        copies: ServerCopies,
        number: int,
        low: int,
        servers: Sequence[Actor],
        function: Callable[..., Any],
    ):
        """Begins, with what `function` has read before.

        Args:
            copies: Of the worker.
            number: Of the closure.
            low: All closures of lower numbers have finished.
            servers: Who the servers are now.
            function: What the closure calls.

        Raises:
            ActorDied: A server has died.
        """
        self._copies, self._number, self._low = copies, number, low
        self._servers, self._engine = servers, copies.engine
        self._changes: dict[int, list[Change]] = {}  # by server
        self._pending: dict[int, list[Assignment | RowChange]] = {}  # by variable
        self._by_optimizer: set[int] = set()
        self._tables_changed: set[int] = set()
        self._values: dict[int, jax.Array] = {}
        self._num_seen: dict[int, int] = {}
        self._homes = copies.homes_read.setdefault(_key_of(function), {})
        if self._homes:
            self._pull(list(self._homes.values()))

    # Reading.

    def read(self, variable: HeldVariable) -> jax.Array:
        """What a variable holds, as this closure has changed it.

        Raises:
            RuntimeError: An optimizer has updated it in this closure.
        """
        return self.read_after(variable, len(self._pending.get(variable.home.number, ())))

    def read_after(self, variable: HeldVariable, count: int) -> jax.Array:
        """What a variable held after the first `count` changes of this closure."""
        home = variable.home
        if home.number in self._by_optimizer:
            raise RuntimeError(
                f"Variable '{variable.name}' was read after an optimizer has updated it in the "
                f"same closure. Servers apply what a closure changes when it has ended, so what it "
                f"becomes is not known here. Read it before, or in another closure."
            )
        if home.number not in self._values:
            self._homes[home.number] = home
            self._pull([home])
        value = self._values[home.number]
        with traces.run_eagerly(), jax.default_device(self._copies.device):
            for change in self._pending.get(home.number, ())[:count]:
                value = change.apply(value)
        return value

    def read_rows(self, variable: HeldVariable, indices: np.ndarray) -> np.ndarray:
        """Some rows of a variable.

        Raises:
            RuntimeError: The closure has changed it.
        """
        home = variable.home
        if home.number in self._by_optimizer or self._pending.get(home.number):
            raise RuntimeError(
                f"Rows of variable '{variable.name}' were read after the same closure has changed "
                f"it. Servers apply what a closure changes when it has ended: read the rows before."
            )
        call = self._engine.call(self._servers[home.server], "pull_rows", home.number, indices)
        return self._engine.result(call)

    def _pull(self, homes: Sequence[Home]) -> None:
        known = self._copies.arrays
        wanted: dict[int, dict[int, int]] = {}
        for home in homes:
            version = known[home.number][0] if home.number in known else -1
            wanted.setdefault(home.server, {})[home.number] = version
        calls = {
            server: self._engine.call(self._servers[server], "pull", versions)
            for server, versions in wanted.items()
        }
        values: Values
        for server, values in gather(self._engine, calls).items():
            self._num_seen.setdefault(server, values.num_changed)
            for number, (version, array) in values.arrays.items():
                known[number] = version, self._copies.put(array)
        for home in homes:
            self._values[home.number] = known[home.number][1]

    # Changing.

    def change(self, home: Home, change: Assignment | RowChange) -> int:
        """Notes that a variable changes; how often it was changed then."""
        self._changes.setdefault(home.server, []).append(change)
        pending = self._pending.setdefault(home.number, [])
        pending.append(change)
        return len(pending)

    def count(self, home: Home) -> int:
        """How often a variable was changed."""
        return len(self._pending.get(home.number, ()))

    def update(self, server: int, gradients: Gradients) -> None:
        """Notes that an optimizer updates variables of one server."""
        self._changes.setdefault(server, []).append(gradients)
        self._by_optimizer |= set(gradients.variables)

    def check_table(self, number: int, name: str) -> None:
        """Refuses to look up what this closure has changed.

        Raises:
            RuntimeError: It has changed the table.
        """
        if number in self._tables_changed:
            raise RuntimeError(
                f"Rows of table '{name}' were looked up after the same closure has changed it. "
                f"Servers apply what a closure changes when it has ended: look them up before."
            )

    def change_table(self, server: int, change: TableChange) -> None:
        """Notes that rows of a table change."""
        self._changes.setdefault(server, []).append(change)
        self._tables_changed.add(change.table)

    def finish(self) -> int | None:
        """Has the servers apply what the closure has changed.

        Returns:
            By how many closures what it has changed was ahead of what it had read: the most of all
            servers; None if it has changed nothing that it has read.

        Raises:
            ActorDied: A server has died. It has applied all or nothing, and so has each other one.
        """
        calls = {}
        for server, changes in self._changes.items():
            sent = [_on_host(change) for change in changes]
            actor = self._servers[server]
            calls[server] = self._engine.call(actor, "push", self._number, self._low, sent)
        staleness = None
        for server, num_before in gather(self._engine, calls).items():
            if server in self._num_seen and num_before >= 0:
                staleness = max(staleness or 0, num_before - self._num_seen[server])
        return staleness


def _on_host(change: Change) -> Change:
    if isinstance(change, TableChange):
        return change
    if isinstance(change, Assignment):
        return Assignment(change.variable, change.what, np.asarray(change.value))
    if isinstance(change, RowChange):
        arrays = np.asarray(change.indices), np.asarray(change.values)
        return RowChange(change.variable, change.what, *arrays)
    values = tuple(map(np.asarray, change.values))
    indices = tuple(None if x is None else np.asarray(x) for x in change.indices)
    return Gradients(change.optimizer, change.variables, values, indices)


def _key_of(function: Callable[..., Any]) -> Any:
    """By what a function is known again: another object of one definition reads alike."""
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return code.co_filename, code.co_firstlineno, code.co_qualname
    return type(function).__module__, type(function).__qualname__
