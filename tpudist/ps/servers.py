"""Servers: the parameter servers of a strategy, as the program that created them sees them.

Defines variables, optimizers and tables on them, reads and changes them outside of closures, and
replaces servers that have died. A server with a log continues where it was.
"""

# `_lock` guards the lists of definitions and actors. Unlike the condition of
# `coordinator.closure_queue`, it is held while servers are called: a new variable must not be
# defined while its server is replaced. So code that runs in a server, and code that finds hanging
# servers (`ServerWatch`, `peek`), must not take it.
#
# Exactly-once outside of closures: direct changes of a server have numbers. `_change_once` sends
# the next number (`_next_direct`), and a server ignores a number that it has applied. So `_ask` may
# repeat a call whose answer was lost. After an error, the next change has the same number. A
# restarted program learns the number from `define`.

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

from tpudist.engine.engine import Actor, ActorDied, Engine, Future
from tpudist.errors import UnavailableError
from tpudist.ps.changes import Change
from tpudist.ps.server_watch import ServerWatch
from tpudist.ps.shard import Constraint, Definition, Shard, Values
from tpudist.ps.shard_log import close_logs
from tpudist.ps.tables.table_options import TableOptions

ROLE = "ps"
MAX_DEATHS = 10
"""Number of deaths in a row during one call, or while servers read a log. Beyond it the call or the
log seems to end them, for example by exhausting the memory."""
CLOSE_S = 10.0
"""Seconds for which `close` waits for a server to finish its log."""
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class Home:
    """The place of a variable.

    Attributes:
        number: Number of the variable, unique in the strategy.
        server: Number of its server.
    """

    number: int
    server: int


class Servers:
    """The parameter servers of one strategy.

    Args:
        engine: Runs the servers.
        num_servers: Number of servers.
        folder: Folder of their logs; None keeps no logs.
        timeout_s: Seconds without a sign of life after which a server is given up; None means
            never.

    Attributes:
        engine: Runs the servers.
        folder: Folder of their logs, if any.
    """

    def __init__(
        self,
        engine: Engine,
        num_servers: int,
        folder: str | os.PathLike | None,
        timeout_s: float | None = None,
    ):
        self.engine = engine
        self.folder = None if folder is None else Path(folder)
        self._lock = engine.concurrency.condition()
        self._definitions: list[list[Definition]] = [[] for _ in range(num_servers)]
        self._transformations: dict[int, optax.GradientTransformation] = {}
        self._tables: dict[int, TableOptions] = {}
        self._next_server = 0
        # A variable's number is its position in the order of creation, in each run of the program.
        # By it, a server finds the variable in its log.
        self._num_variables = 0
        self._next_direct = [0] * num_servers
        self._incarnations = [0] * num_servers
        # Includes successors that are not visible yet: if one hangs while it reads its log, it must
        # be found too. `ServerWatch`, which starts when all servers have an entry, reads it without
        # a lock, because `_revive` holds `_lock` meanwhile.
        self._newest: dict[int, Actor] = {}
        self._actors = [self._spawn(i) for i in range(num_servers)]
        self._watch: ServerWatch | None = None
        if timeout_s is not None and engine.actors_may_hang:
            newest = self._newest
            self._watch = ServerWatch(engine, lambda: list(newest.values()), timeout_s)

    def __len__(self) -> int:
        return len(self._definitions)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """Actors of the servers, in their order."""
        with self._lock:
            return tuple(self._actors)

    def peek(self) -> list[tuple[Actor, int]]:
        """Returns each actor and the number of its predecessors, without waiting for a lock."""
        # While a successor starts, the number is one more than the actor's incarnation.
        return list(zip(self._actors, self._incarnations, strict=True))

    # Definitions.

    def define(
        self, name: str, initial: np.ndarray, constraint: Constraint | None, server: int | None
    ) -> Home:
        """Creates a variable on a server, by default on the next one in turn."""
        with self._lock:
            place = self._next_server if server is None else server
            home = Home(self._num_variables, place)
            definition = Definition(home.number, name, initial, constraint)
            last = self._ask(place, "define", [definition])
            # Counted only now: a definition that raised an error needs no number.
            self._num_variables += 1
            if server is None:
                self._next_server = (place + 1) % len(self)
            self._next_direct[place] = max(self._next_direct[place], last + 1)
            # A successor reads the value from the log; without a log there is no successor.
            self._definitions[place].append(dataclasses.replace(definition, initial=None))
            return home

    def define_optimizer(self, tx: optax.GradientTransformation) -> int:
        """Announces an optimizer to all servers; returns its number."""
        with self._lock:
            number = len(self._transformations)
            self._transformations[number] = tx
            self.ask_all("define_optimizers", {number: tx})
            return number

    def define_table(self, options: TableOptions) -> int:
        """Creates a table on all servers; returns its number."""
        with self._lock:
            number = len(self._tables)
            self._tables[number] = options
            self.ask_all("define_tables", {number: options})
            return number

    # Outside of closures.

    def read(self, home: Home) -> np.ndarray:
        """Returns the value of a variable."""
        values: Values = self._ask(home.server, "pull", {home.number: -1})
        return np.asarray(values.arrays[home.number][1])

    def read_rows(self, home: Home, indices: np.ndarray) -> np.ndarray:
        """Returns some rows of a variable."""
        return self._ask(home.server, "pull_rows", home.number, indices)

    def change(self, server: int, changes: Sequence[Change]) -> None:
        """Applies changes to one server, once, even if the server is replaced meanwhile."""
        self._change_once(server, "push_direct", list(changes))

    def report(self) -> list[Mapping[str, Any]]:
        """Returns the figures of each server."""
        return self.ask_all("report")

    def restore_table(
        self, server: int, number: int, state: Mapping[str, np.ndarray], *, replace: bool = False
    ) -> None:
        """Adds rows to a table on one server, or replaces all of its rows there."""
        self._change_once(server, "restore_table", number, dict(state), replace)

    def variables_of_optimizer(self, number: int) -> list[list[tuple[int, ...]]]:
        """Returns each server's groups of variables that an optimizer updates together."""
        return self.ask_all("variables_of_optimizer", number)

    def read_optimizer(
        self, server: int, number: int, variables: tuple[int, ...]
    ) -> list[np.ndarray]:
        """Returns the arrays of an optimizer's state for variables of one server."""
        return self._ask(server, "state_of_optimizer", number, variables)

    def restore_optimizer(
        self,
        server: int,
        number: int,
        variables: tuple[int, ...],
        arrays: Mapping[int, np.ndarray],
    ) -> None:
        """Replaces some of the arrays that `read_optimizer` returns."""
        self._change_once(server, "restore_optimizer", number, variables, dict(arrays))

    def _change_once(self, server: int, method: str, *args: Any) -> None:
        with self._lock:
            self._ask(server, method, self._next_direct[server], *args)
            self._next_direct[server] += 1

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of each server; returns the results."""
        return [self._ask(i, method, *args) for i in range(len(self))]

    def seal(self, closure: int) -> None:
        """Makes all servers reject later updates of a finished closure that started several times.

        A slow run of the closure may still send updates, also to a server to which the finished run
        sent none. A dead server needs no seal: its callers are dead too, or get `ActorDied`.
        """
        calls = [self.engine.call(actor, "seal", closure) for actor in self.actors]
        for call in calls:
            with contextlib.suppress(ActorDied):
                self.engine.result(call)

    # Replacement.

    def replace(self, died: ActorDied) -> None:
        """Replaces a server that has died.

        Raises:
            UnavailableError: If the server had no log, so that its contents are lost.
        """
        with self._lock:
            index = died.actor.index
            if died.actor.role != ROLE or self._actors[index] != died.actor:
                return  # another thread has replaced it
            if self.folder is None:
                raise UnavailableError(
                    f"{died} Its state is lost, because the strategy keeps no log. Restore a "
                    f"checkpoint in a new run. To continue without loss, use "
                    f"ParameterServerStrategy(..., log=FOLDER)."
                ) from died
            self.engine.kill(died.actor)
            self._actors[index] = self._revive(index, died)

    def _revive(self, index: int, died: ActorDied) -> Actor:
        """Starts a server that continues from a log; it is visible once it knows everything."""
        for _ in range(MAX_DEATHS):
            _log.warning("%s Another server continues where its log ends.", died)
            self._incarnations[index] += 1
            actor = self._spawn(index)
            try:
                self._call(actor, "define_optimizers", self._transformations)
                self._call(actor, "define_tables", self._tables)
                last = self._call(actor, "define", self._definitions[index])
            except ActorDied as again:
                if again.actor != actor or not again.was_created:
                    raise
                self.engine.kill(actor)
                died = again
            else:
                self._next_direct[index] = max(self._next_direct[index], last + 1)
                return actor
        raise UnavailableError(
            f"{died} It is the last of {MAX_DEATHS} servers in a row that died while they read the "
            f"log in {self.folder}. Give servers more memory, or restore a checkpoint in a new run."
        ) from died

    def close(self) -> None:
        """Closes the logs."""
        if self._watch is not None:
            self._watch.close()
        for actor in self.actors:
            try:
                self.engine.result(self.engine.call(actor, "close"), CLOSE_S)
            except Exception as error:
                _log.warning("%s did not finish its log: %s", actor, error)
        if self.folder is not None:
            close_logs(self.folder)

    def _spawn(self, index: int) -> Actor:
        folder = None if self.folder is None else self.folder / f"server-{index}"
        actor = self.engine.spawn(ROLE, index, Shard, index, self._incarnations[index], folder)
        self._newest[index] = actor
        return actor

    def _ask(self, server: int, method: str, *args: Any) -> Any:
        """Calls a method of a server; replaces a server that dies, and calls again.

        Raises:
            UnavailableError: If servers die repeatedly, or have no log.
        """
        num_deaths = 0
        while True:
            actor = self.actors[server]
            try:
                return self._call(actor, method, *args)
            except ActorDied as died:
                if died.actor != actor or not died.was_created:
                    raise
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    raise UnavailableError(
                        f"{died} It is the last of {MAX_DEATHS} servers in a row that died during "
                        f"a call of {method}, which seems to be the cause. Give servers more "
                        f"memory, or use more of them."
                    ) from died
                self.replace(died)

    def _call(self, actor: Actor, method: str, *args: Any) -> Any:
        value = self.engine.result(self.engine.call(actor, method, *args))
        if self._watch is not None:
            self._watch.record_answer(actor)
        return value


def gather(engine: Engine, calls: Mapping[int, Future]) -> dict[int, Any]:
    """Returns the results of one call per server; waits for all calls before it raises an error."""
    results: dict[int, Any] = {}
    error: BaseException | None = None
    for server, call in calls.items():
        try:
            results[server] = engine.result(call)
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error
    return results
