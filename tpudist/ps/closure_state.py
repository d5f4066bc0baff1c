"""ClosureState: what one closure has read of what servers hold, and what it changes.

What is known to be read comes in one message from each server when the closure begins, and what the
worker has already is not sent again. What is changed goes to each server in one message when the
closure has ended, with the closure's number; one that raises changes nothing.

Where closures wait for workers, the answer to that message has what the next one will read. It is
used if that one was scheduled before this one began: then all that its program had seen happen when
it was scheduled is in it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class ReadAhead:
    """What servers have sent when a closure had ended, for the next one.

    Attributes:
        limit: The next one's number must be lower: then it was scheduled in time.
        servers: Who has sent it, by the number of the server.
        num_changed: How many closures had changed the server then.
        variables: Of which the copy is as it was then.
    """

    limit: int
    servers: Mapping[int, Actor]
    num_changed: Mapping[int, int]
    variables: frozenset[int]


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
        self.ahead: ReadAhead | None = None

    def put(self, x: Any) -> jax.Array:
        """A host array where the worker computes, also in the midst of a trace."""
        with traces.run_eagerly(), jax.default_device(self.device):
            return _put(x)

    def take(self, values: Values) -> None:
        """Keeps what a server has sent."""
        for number, (version, array) in values.arrays.items():
            self.arrays[number] = version, self.put(array)


class ClosureState:
    """What one closure sees and does."""

    def __init__(
        self,
        copies: ServerCopies,
        number: int,
        low: int,
        servers: Sequence[Actor],
        function: Callable[..., Any],
        num_scheduled: int = 0,
    ):
        """Begins, with what `function` has read before.

        Args:
            copies: Of the worker.
            number: Of the closure.
            low: All closures of lower numbers have finished.
            servers: Who the servers are now.
            function: What the closure calls.
            num_scheduled: See `worker.RunStatus`.

        Raises:
            ActorDied: A server has died.
        """
        self._num_scheduled = num_scheduled
        self._copies, self._number, self._low = copies, number, low
        self._servers, self._engine = servers, copies.engine
        self._changes: dict[int, list[Change]] = {}  # by server
        self._pending: dict[int, list[Assignment | RowChange]] = {}  # by variable
        self._by_optimizer: set[int] = set()
        self._tables_changed: set[int] = set()
        self._values: dict[int, jax.Array] = {}
        self._num_seen: dict[int, int] = {}
        self._homes = copies.homes_read.setdefault(_key_of(function), {})
        missing = [x for x in self._homes.values() if not self._was_read_ahead(x)]
        copies.ahead = None
        if missing:
            self._pull(missing)

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
                f"Variable '{variable.name}' was read after an optimizer updated it in the same "
                f"closure. Servers apply the changes of a closure after it ends, so its new value "
                f"is unknown here. Read it before the update, or in another closure."
            )
        if home.number not in self._values:
            self._homes[home.number] = home
            self._pull([home])
        value = self._values[home.number]
        if not count:
            return value
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
                f"Rows of variable '{variable.name}' were read after the same closure changed it. "
                f"Servers apply the changes of a closure after it ends. Read the rows first."
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
            self._copies.take(values)
        for home in homes:
            self._values[home.number] = known[home.number][1]

    def _was_read_ahead(self, home: Home) -> bool:
        """Whether the worker has what a variable holds, read late enough; it is taken then."""
        ahead = self._copies.ahead
        if ahead is None or self._number >= ahead.limit or home.number not in ahead.variables:
            return False
        if ahead.servers[home.server] != self._servers[home.server]:
            return False  # it has another one in its place, which may know less
        self._num_seen[home.server] = ahead.num_changed[home.server]
        self._values[home.number] = self._copies.arrays[home.number][1]
        return True

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
                f"Rows of table '{name}' were looked up after the same closure changed it. "
                f"Servers apply the changes of a closure after it ends. Look up the rows first."
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
        calls, homes = {}, [x for x in self._homes.values() if x.number in self._values]
        for server, changes in self._changes.items():
            sent = self._number, self._low, [_on_host(change) for change in changes]
            actor = self._servers[server]
            if self._num_scheduled:
                arrays = self._copies.arrays
                wanted = {x.number: arrays[x.number][0] for x in homes if x.server == server}
                calls[server] = self._engine.call(actor, "push_and_pull", *sent, wanted)
            else:
                calls[server] = self._engine.call(actor, "push", *sent)
        staleness, num_changed = None, {}
        for server, found in gather(self._engine, calls).items():
            if self._num_scheduled:
                num_before, values = found
                self._copies.take(values)
                num_changed[server] = values.num_changed
            else:
                num_before = found
            if server in self._num_seen and num_before >= 0:
                staleness = max(staleness or 0, num_before - self._num_seen[server])
        if num_changed:
            self._copies.ahead = ReadAhead(
                self._num_scheduled,
                {server: self._servers[server] for server in num_changed},
                num_changed,
                frozenset(x.number for x in homes if x.server in num_changed),
            )
        return staleness


_put = jax.jit(lambda x: x)  # `device_put` takes four times as long


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
