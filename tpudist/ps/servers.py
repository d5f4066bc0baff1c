"""Servers: the shards of a strategy, as the program sees them that has made it.

They are made, told what to hold, asked and changed here, and replaced when they have died: one that
has a log goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpudist.engine.engine import Actor, ActorDied, Engine, Future
from tpudist.errors import UnavailableError
from tpudist.ps.changes import Change
from tpudist.ps.server_watch import ServerWatch
from tpudist.ps.shard import Definition, Shard, Values
from tpudist.ps.shard_log import close_logs
from tpudist.ps.tables.table_options import TableOptions

ROLE = "ps"
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a variable is.

    Attributes:
        number: Of the variable, among all of the strategy.
        server: Which server holds it.
    """

    number: int
    server: int


class Servers:
    """The parameter servers of one strategy.

    Attributes:
        engine: Where they live.
        folder: Where their logs are; None for none.
    """

    def __init__(
        self,
        engine: Engine,
        num_servers: int,
        folder: str | os.PathLike | None,
        timeout_s: float | None = None,
    ):
        """Starts them.

        Args:
            engine: Where they live.
            num_servers: How many.
            folder: Where their logs are; None for none.
            timeout_s: After how many seconds without a sign of life one is given up; None for
                never.
        """
        self.engine = engine
        self.folder = None if folder is None else Path(folder)
        self._lock = engine.concurrency.condition()
        self._definitions: list[list[Definition]] = [[] for _ in range(num_servers)]
        self._transformations: dict[int, Any] = {}
        self._tables: dict[int, TableOptions] = {}
        self._next_server = itertools.cycle(range(num_servers))
        self._num_variables = 0
        self._num_direct = [0] * num_servers
        self._incarnations = [0] * num_servers
        self._newest: dict[int, Actor] = {}  # of each, also if nobody sees it yet
        self._actors = [self._spawn(i) for i in range(num_servers)]
        self._watch: ServerWatch | None = None
        if timeout_s is not None and engine.actors_may_hang:
            newest = self._newest
            self._watch = ServerWatch(engine, lambda: list(newest.values()), timeout_s)

    def __len__(self) -> int:
        return len(self._definitions)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """The actors, in the order of the servers."""
        with self._lock:
            return tuple(self._actors)

    def look(self) -> list[tuple[Actor, int]]:
        """The actors, and how many were in the place of each; does not wait.

        While another one is made in the place of an actor that has died, it is one more than the
        actor's incarnation. Without the lock, which is held until that one goes on.
        """
        return list(zip(self._actors, self._incarnations, strict=True))

    # What they hold.

    def define(self, name: str, initial: np.ndarray, constraint: Any, server: int | None) -> Home:
        """Has the next server, or a certain one, hold a new variable."""
        with self._lock:
            place = next(self._next_server) if server is None else server
            home = Home(self._num_variables, place)
            self._num_variables += 1
            made = Definition(home.number, name, initial, constraint)
            last = self._ask(place, "define", [made])
            self._num_direct[place] = max(self._num_direct[place], last + 1)
            # What comes after it begins with its log, or is not there.
            self._definitions[place].append(dataclasses.replace(made, initial=None))
            return home

    def define_optimizer(self, tx: Any) -> int:
        """Has all servers know a new optimizer; its number."""
        with self._lock:
            number = len(self._transformations)
            self._transformations[number] = tx
            self.ask_all("define_optimizers", {number: tx})
            return number

    def define_table(self, options: TableOptions) -> int:
        """Has all servers hold parts of a new table; its number."""
        with self._lock:
            number = len(self._tables)
            self._tables[number] = options
            self.ask_all("define_tables", {number: options})
            return number

    # Outside of closures.

    def read(self, home: Home) -> np.ndarray:
        """What a variable holds."""
        values: Values = self._ask(home.server, "pull", {home.number: -1})
        return values.arrays[home.number][1]

    def read_rows(self, home: Home, indices: np.ndarray) -> np.ndarray:
        """Some rows of a variable."""
        return self._ask(home.server, "pull_rows", home.number, indices)

    def change(self, server: int, changes: Sequence[Change]) -> None:
        """Changes variables of one server, once, whatever becomes of it meanwhile."""
        self._change_once(server, "push_direct", list(changes))

    def report(self) -> list[Mapping[str, Any]]:
        """What each server says of itself."""
        return self.ask_all("report")

    def restore_table(
        self, server: int, number: int, state: Mapping[str, np.ndarray], *, replace: bool = False
    ) -> None:
        """Puts rows into a table on one server, or in the place of all that it has there."""
        self._change_once(server, "restore_table", number, dict(state), replace)

    def variables_of_optimizer(self, number: int) -> list[list[tuple[int, ...]]]:
        """For each server the numbers of variables that an optimizer has updated together."""
        return self.ask_all("variables_of_optimizer", number)

    def read_optimizer(
        self, server: int, number: int, variables: tuple[int, ...]
    ) -> list[np.ndarray]:
        """The arrays of an optimizer's state for variables of one server."""
        return self._ask(server, "state_of_optimizer", number, variables)

    def restore_optimizer(
        self,
        server: int,
        number: int,
        variables: tuple[int, ...],
        arrays: Mapping[int, np.ndarray],
    ) -> None:
        """Replaces some of the arrays that `read_optimizer` gives."""
        self._change_once(server, "restore_optimizer", number, variables, dict(arrays))

    def _change_once(self, server: int, method: str, *args: Any) -> None:
        with self._lock:
            self._ask(server, method, self._num_direct[server], *args)
            self._num_direct[server] += 1

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """What a method of each server gives."""
        return [self._ask(i, method, *args) for i in range(len(self))]

    def seal(self, closure: int) -> None:
        """Has a closure change nothing from now on: it has finished, and was begun several times.

        Changes of one that began earlier and is late are refused also where those of the one that
        has finished never were. A server that is dead cannot be late.
        """
        calls = [self.engine.call(actor, "seal", closure) for actor in self.actors]
        for call in calls:
            with contextlib.suppress(ActorDied):
                self.engine.result(call)

    # When one has died.

    def replace(self, died: ActorDied) -> None:
        """Puts another server in the place of one that has died.

        Raises:
            UnavailableError: It had no log, so that what it held is lost.
        """
        with self._lock:
            index = died.actor.index
            if died.actor.role != ROLE or self._actors[index] != died.actor:
                return  # somebody has done so
            if self.folder is None:
                raise UnavailableError(
                    f"{died} Its state is lost, because the strategy keeps no log. Restore a "
                    f"checkpoint in a new run. To continue without loss, use "
                    f"ParameterServerStrategy(..., log=FOLDER)."
                ) from died
            self.engine.kill(died.actor)
            self._actors[index] = self._revive(index, died)

    def _revive(self, index: int, died: ActorDied) -> Actor:
        """A server that goes on where a log ends; nobody sees it before it knows all."""
        while True:
            _log.warning("%s Another server continues where its log ends.", died)
            self._incarnations[index] += 1
            actor = self._spawn(index)
            try:
                self._call(actor, "define_optimizers", self._transformations)
                self._call(actor, "define_tables", self._tables)
                last = self._call(actor, "define", self._definitions[index])
            except ActorDied as again:
                if again.actor != actor or not again.was_made:
                    raise
                self.engine.kill(actor)
                died = again
            else:
                self._num_direct[index] = max(self._num_direct[index], last + 1)
                return actor

    def close(self) -> None:
        """Ends their logs."""
        if self._watch is not None:
            self._watch.close()
        for actor in self.actors:
            try:
                self.engine.result(self.engine.call(actor, "close"), 10.0)
            except Exception as error:
                _log.warning("%s did not finish its log: %s", actor, error)
        if self.folder is not None:
            close_logs(self.folder)

    def _spawn(self, index: int) -> Actor:
        folder = None if self.folder is None else self.folder / f"server-{index}"
        made = self.engine.spawn(ROLE, index, Shard, index, self._incarnations[index], folder)
        self._newest[index] = made
        return made

    def _ask(self, server: int, method: str, *args: Any) -> Any:
        """Calls a method of a server, again if it has died before it has answered."""
        while True:
            actor = self.actors[server]
            try:
                return self._call(actor, method, *args)
            except ActorDied as died:
                if died.actor != actor or not died.was_made:
                    raise
                self.replace(died)

    def _call(self, actor: Actor, method: str, *args: Any) -> Any:
        value = self.engine.result(self.engine.call(actor, method, *args))
        if self._watch is not None:
            self._watch.note_answer(actor)
        return value


def gather(engine: Engine, calls: Mapping[int, Future]) -> dict[int, Any]:
    """The results of calls of several servers; waits for all of them, then raises."""
    found: dict[int, Any] = {}
    error: BaseException | None = None
    for server, call in calls.items():
        try:
            found[server] = engine.result(call)
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error
    return found
