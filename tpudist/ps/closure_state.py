"""ClosureState: the values that one closure reads from servers, and the updates that it sends.

Only this file knows how reads and updates of a closure become messages. A closure sends nothing
until its function has returned, so a function that raises changes nothing.
"""

# A closure costs one message to each server at the start and one at the end:
#
# - Start: `pull` of the variables that the same function read last time (`homes_read`), with the
#   versions of the copies. A server sends only other versions. A variable that is read for the
#   first time costs one more message.
# - End: `push` of the updates, with the closure's number. A server applies a number once, so a
#   retry is harmless. Servers decide separately: after a crash, one server may have the update of
#   the first run and another one the update of the second run. Both have it once.
#
# If closures wait for workers, the last message is `push_and_pull`: its answer contains what the
# next closure on this worker will probably read (`ReadAhead`). Such a value may be older than one
# that a `pull` at the start of the next closure would return. That is allowed only if the next
# closure was scheduled before this one started (`limit`): when the program scheduled it, it could
# not have observed any update that the value lacks.

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tpudist.engine.engine import Actor, Engine, Future
from tpudist.ps.changes import Assignment, Change, Gradients, RowChange, TableChange
from tpudist.ps.servers import Home, gather
from tpudist.ps.shard import Values
from tpudist.xla import traces, user_code


class HeldVariable(Protocol):
    """A variable on a server."""

    name: str
    home: Home


@dataclasses.dataclass(frozen=True)
class ReadAhead:
    """Values that servers sent at the end of a closure, for the next one.

    Attributes:
        limit: Only a closure with a lower number may use them.
        servers: Server number -> actor that sent the values.
        num_changed: Server number -> number of closures that had changed the server then.
        variables: Numbers of the variables whose copies were current when the servers answered.
    """

    limit: int
    servers: Mapping[int, Actor]
    num_changed: Mapping[int, int]
    variables: frozenset[int]


class ServerCopies:
    """Copies of servers' variables on one worker, kept from closure to closure.

    Args:
        engine: Runs the servers.
        device: Device of the copies; None for JAX's default.
    """

    def __init__(self, engine: Engine, device: jax.Device | None):
        self.engine, self.device = engine, device
        self.arrays: dict[int, tuple[int, jax.Array]] = {}  # by variable: version and copy
        # By function, then by variable. Homes stay: a variable that was read once on a rare branch
        # is requested by each later closure, but sent only if it has changed.
        self.homes_read: dict[Hashable, dict[int, Home]] = {}
        self.ahead: ReadAhead | None = None

    def take(self, values: Values) -> None:
        """Copies values that a server sent to the worker's device, even during a trace."""
        with traces.run_eagerly(), jax.default_device(self.device):
            for number, (version, array) in values.arrays.items():
                self.arrays[number] = version, _put(array)


class ClosureState:
    """Reads and updates of one closure. Created when it starts, with a message to each server.

    Args:
        copies: Copies of the worker.
        number: Number of the closure.
        low: All closures with lower numbers have finished.
        servers: Current servers.
        function: Function of the closure. The variables that it read last time are fetched at once.
        read_ahead_limit: Closures with lower numbers are scheduled already, so that values may be
            fetched for them at the end of this one. None fetches nothing.

    Raises:
        ActorDied: If a server has died.
    """

    def __init__(
        self,
        copies: ServerCopies,
        number: int,
        low: int,
        servers: Sequence[Actor],
        function: Callable[..., Any],
        read_ahead_limit: int | None = None,
    ):
        self._read_ahead_limit = read_ahead_limit
        self._copies, self._number, self._low = copies, number, low
        self._servers, self._engine = servers, copies.engine
        self._changes: dict[int, list[Change]] = {}  # by server
        self._pending: dict[int, list[Assignment | RowChange]] = {}  # by variable
        self._by_optimizer: set[int] = set()
        self._tables_changed: set[int] = set()
        self._values: dict[int, jax.Array] = {}
        self._num_changed_at_read: dict[int, int] = {}  # by server
        self._homes = copies.homes_read.setdefault(_key_of(function), {})
        missing = [x for x in self._homes.values() if not self._use_read_ahead(x)]
        copies.ahead = None  # valid for the next closure only
        if missing:
            self._pull(missing)

    # Reading.

    def read(self, variable: HeldVariable) -> jax.Array:
        """Returns the value of a variable, including the updates of this closure.

        Raises:
            RuntimeError: If an optimizer has updated it in this closure.
        """
        return self.read_after(variable, len(self._pending.get(variable.home.number, ())))

    def read_after(self, variable: HeldVariable, count: int) -> jax.Array:
        """Returns the value of a variable after the first `count` updates of this closure."""
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
        # The server has not applied these updates yet, so the worker computes their result.
        with traces.run_eagerly(), jax.default_device(self._copies.device):
            for change in self._pending.get(home.number, ())[:count]:
                value = change.apply(value)
        return value

    def read_rows(self, variable: HeldVariable, indices: np.ndarray) -> jax.Array:
        """Returns some rows of a variable: `[*indices.shape, ...]`.

        Raises:
            RuntimeError: If the closure has updated the variable.
        """
        home = variable.home
        if home.number in self._by_optimizer or self._pending.get(home.number):
            raise RuntimeError(
                f"Rows of variable '{variable.name}' were read after the same closure changed it. "
                f"Servers apply the changes of a closure after it ends. Read the rows first."
            )
        call = self._engine.call(self._servers[home.server], "pull_rows", home.number, indices)
        return _put(self._engine.result(call))

    def _pull(self, homes: Sequence[Home]) -> None:
        known = self._copies.arrays
        versions: dict[int, dict[int, int]] = {}  # server -> variable -> version of the copy
        for home in homes:
            version = known[home.number][0] if home.number in known else -1
            versions.setdefault(home.server, {})[home.number] = version
        calls = {
            server: self._engine.call(self._servers[server], "pull", of_server)
            for server, of_server in versions.items()
        }
        values: Values
        for server, values in gather(self._engine, calls).items():
            # The first read of a server counts: staleness is the age of the oldest value.
            self._num_changed_at_read.setdefault(server, values.num_changed)
            self._copies.take(values)
        for home in homes:
            self._values[home.number] = known[home.number][1]

    def _use_read_ahead(self, home: Home) -> bool:
        """Uses the value that the last closure fetched; returns False if it may not be used."""
        ahead = self._copies.ahead
        if ahead is None or self._number >= ahead.limit or home.number not in ahead.variables:
            return False
        if ahead.servers[home.server] != self._servers[home.server]:
            return False  # the server was replaced, and its successor may have fewer updates
        self._num_changed_at_read[home.server] = ahead.num_changed[home.server]
        self._values[home.number] = self._copies.arrays[home.number][1]
        return True

    # Changing.

    def record_change(self, home: Home, change: Assignment | RowChange) -> int:
        """Records an update of a variable; returns the number of its updates so far."""
        self._changes.setdefault(home.server, []).append(change)
        pending = self._pending.setdefault(home.number, [])
        pending.append(change)
        return len(pending)

    def num_changes(self, home: Home) -> int:
        """Returns the number of updates of a variable."""
        return len(self._pending.get(home.number, ()))

    def record_gradients(self, server: int, gradients: Gradients) -> None:
        """Records that an optimizer updates variables of one server."""
        self._changes.setdefault(server, []).append(gradients)
        self._by_optimizer |= set(gradients.variables)

    def check_table(self, number: int, name: str) -> None:
        """Checks that a table may be looked up.

        Raises:
            RuntimeError: If the closure has changed the table.
        """
        if number in self._tables_changed:
            raise RuntimeError(
                f"Rows of table '{name}' were looked up after the same closure changed it. "
                f"Servers apply the changes of a closure after it ends. Look up the rows first."
            )

    def record_table_change(self, server: int, change: TableChange) -> None:
        """Records that rows of a table change."""
        self._changes.setdefault(server, []).append(change)
        self._tables_changed.add(change.table)

    def finish(self) -> int | None:
        """Sends the updates, and waits until the servers have applied them.

        Returns:
            Largest number, over all servers, of closures that changed a server between the read and
            the update of this closure; None if it updated no server from which it had read.

        Raises:
            ActorDied: If a server has died. Each server has applied all of its updates or none.
        """
        limit = self._read_ahead_limit
        homes = [x for x in self._homes.values() if x.number in self._values]
        calls: dict[int, Future] = {}
        for server, changes in self._changes.items():
            sent = self._number, self._low, [_on_host(change) for change in changes]
            actor = self._servers[server]
            if limit is not None:
                arrays = self._copies.arrays
                versions = {x.number: arrays[x.number][0] for x in homes if x.server == server}
                calls[server] = self._engine.call(actor, "push_and_pull", *sent, versions)
            else:
                calls[server] = self._engine.call(actor, "push", *sent)
        staleness: int | None = None
        num_changed: dict[int, int] = {}
        for server, answer in gather(self._engine, calls).items():
            if limit is not None:
                num_before, values = answer
                self._copies.take(values)
                num_changed[server] = values.num_changed
            else:
                num_before = answer
            # -1: a server had applied this closure before. The staleness was counted then.
            if server in self._num_changed_at_read and num_before >= 0:
                staleness = max(staleness or 0, num_before - self._num_changed_at_read[server])
        if limit is not None and num_changed:
            self._copies.ahead = ReadAhead(
                limit,
                {server: self._servers[server] for server in num_changed},
                num_changed,
                frozenset(x.number for x in homes if x.server in num_changed),
            )
        return staleness


# To the default device, without waiting for a server's array that is still computed. Always a copy:
# users' functions may donate what they read, and the server needs its array. `device_put` takes
# four times as long for a small array on a CPU.
_put = jax.jit(lambda x: x)


def _on_host(change: Change) -> Change:
    if isinstance(change, TableChange):
        return change
    if isinstance(change, Assignment):
        return Assignment(change.variable, change.op, np.asarray(change.value))
    if isinstance(change, RowChange):
        arrays = np.asarray(change.indices), np.asarray(change.values)
        return RowChange(change.variable, change.op, *arrays)
    values = tuple(map(np.asarray, change.values))
    indices = tuple(None if x is None else np.asarray(x) for x in change.indices)
    return Gradients(change.optimizer, change.variables, values, indices)


def _key_of(function: Callable[..., Any]) -> Hashable:
    """Returns a key of a function's definition.

    Functions with one key probably read the same variables. If not, only messages are wasted.
    """
    # Users schedule any callable. The key contains no object, so functions are not kept alive.
    function = user_code.unwrap(function)
    code = user_code.code_of(function)
    if isinstance(code, types.CodeType):
        return code.co_filename, code.co_firstlineno, code.co_qualname
    return type(function).__module__, type(function).__qualname__
