"""Shard: one parameter server, as an actor of an engine.

It holds variables (`shard_variables`) and tables (`shard_tables`), logs updates, and applies the
updates of each closure once. It knows no engine and no other server.
"""

# How an update takes effect exactly once, whatever dies:
#
# 1. `push` looks the closure's number up in the ledger. A retry, a second run of a slow closure and
#    a late message of a worker that was given up carry the same number, and are ignored.
# 2. The update and its number are one record of the log, which is appended before the update is
#    applied and before the worker gets an answer. A server that dies in between replays it.
# 3. A worker that gets no answer repeats the closure. If the record was complete, the successor has
#    the number in its ledger; if it was cut off, `RecordFile` removes it. There is no third case.
# 4. If applying raises an error, the record is removed from the log.
#
# The ledger may forget numbers below `low`: the coordinator guarantees that they do not come again.
# The log is replayed lazily (`_catch_up`), because updates by an optimizer need its transformation,
# which the program defines after the server has started.
#
# Lookups are not logged: the initial value of a row depends only on the seed and the id. So after a
# crash, a table may lack rows that were only looked up, and rows may look older or less used than
# they are. With `max_rows`, it may therefore have other rows.

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from tpudist.ps.changes import Change, TableChange
from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.shard_log import LoggedVariable, Record, ShardLog
from tpudist.ps.shard_traffic import ShardTraffic
from tpudist.ps.shard_variables import ShardVariables
from tpudist.ps.tables.shard_tables import ShardTables
from tpudist.ps.tables.table_options import TableOptions

Constraint = Callable[[jax.Array], jax.Array]
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class Definition:
    """A variable to create on a server, or to find in its log.

    Attributes:
        number: Number of the variable, unique in the strategy.
        name: Name of the variable.
        initial: Initial value; None if the server has the variable in its log.
        constraint: Called with the value after each update by an optimizer; returns the new value.
    """

    number: int
    name: str
    initial: np.ndarray | None
    constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """Values that a server sends.

    Attributes:
        num_changed: Number of closures that have changed this server.
        arrays: Number of a variable -> its version and value. Contains only variables whose
            version differs from the requested one. In the server's process the values are its own
            arrays, which nobody may donate, and which may still be computed. Another process
            receives NumPy arrays.
    """

    num_changed: int
    arrays: Mapping[int, tuple[int, ArrayLike]]

    def __reduce__(self) -> tuple[object, ...]:
        arrays = {number: (version, np.asarray(x)) for number, (version, x) in self.arrays.items()}
        return Values, (self.num_changed, arrays)


class Shard:
    """The contents of one server.

    It returns its arrays, and does not overwrite an array after that.

    Args:
        index: Number of the server.
        incarnation: Number of servers that had this index before. It makes version numbers unique
            over all of them.
        folder: Folder of its log; None keeps no log.
    """

    def __init__(self, index: int, incarnation: int, folder: Path | None):
        self._index, self._incarnation = index, incarnation
        self._variables = ShardVariables(index, incarnation)
        self._traffic = ShardTraffic()
        self._tables = ShardTables()
        self._ledger = ClosureLedger()
        self._num_changed = self._num_repeated = 0
        self._log = None if folder is None else ShardLog(folder, incarnation)
        self._must_replay = self._log is not None and self._log.has_records
        self._last_direct = -1 if self._log is None else self._log.last_direct

    def define(self, variables: Sequence[Definition]) -> int:
        """Creates variables, or finds them in the log.

        Returns:
            Number of the last direct change (`push_direct`); -1 if there was none.

        Raises:
            ValueError: If the log has another variable with the same number.
        """
        logged = self._log.definitions if self._log is not None else {}
        for variable in variables:
            number, name, initial = variable.number, variable.name, variable.initial
            self._traffic.take(initial)
            if variable.constraint is not None:
                self._variables.constrain(number, variable.constraint)
            if number in logged:
                self._check_logged(variable, logged[number])
            elif number not in self._variables:
                assert initial is not None, "only a variable in a log has no initial value"
                self._variables.add(number, name, initial)
                if self._log is not None:
                    self._log.define(number, name, initial)
        return self._last_direct

    def define_optimizers(
        self, transformations: Mapping[int, optax.GradientTransformation]
    ) -> None:
        """Adds the optimizers of its variables, by number."""
        self._variables.define_optimizers(transformations)

    def define_tables(self, options: Mapping[int, TableOptions]) -> None:
        """Adds its parts of tables, by number of the table."""
        self._tables.define(options)

    # Reading.

    def pull(self, versions: Mapping[int, int]) -> Values:
        """Returns the values of variables whose version differs from the given one."""
        self._catch_up()
        arrays = self._variables.pull(versions)
        for _, array in arrays.values():
            self._traffic.give(array)
        return Values(self._num_changed, arrays)

    def pull_rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Returns some rows of a variable: `[*indices.shape, ...]`."""
        self._catch_up()
        self._traffic.take(indices)
        return self._traffic.give(self._variables.pull_rows(number, indices))

    def pull_table(self, number: int, ids: np.ndarray, create: bool) -> np.ndarray:
        """Returns rows of a table; see `TableShard.pull`."""
        self._catch_up()
        self._traffic.take(ids)
        return self._traffic.give(self._tables.pull(number, ids, create))

    def variables_of_optimizer(self, optimizer: int) -> list[tuple[int, ...]]:
        """Returns the groups of variables that an optimizer updates together."""
        self._catch_up()
        return self._variables.variables_of_optimizer(optimizer)

    def state_of_optimizer(self, optimizer: int, variables: tuple[int, ...]) -> list[np.ndarray]:
        """Returns copies of an optimizer's state for variables of this server."""
        self._catch_up()
        return self._variables.state(optimizer, variables)

    def state_of_table(self, number: int) -> dict[str, np.ndarray]:
        """Returns a copy of all rows of a table."""
        self._catch_up()
        return {name: self._traffic.give(x) for name, x in self._tables.state(number).items()}

    def size_of_table(self, number: int) -> int:
        """Returns the number of rows of a table."""
        self._catch_up()
        return self._tables.size(number)

    def report(self) -> dict[str, Any]:
        """Returns the figures of this server."""
        self._catch_up()
        return self.report_without_replay()

    def report_without_replay(self) -> dict[str, Any]:
        """Returns the figures at any time: optimizers that a replay needs may be missing."""
        return {
            "server": self._index,
            "incarnation": self._incarnation,
            "variables": len(self._variables),
            "rows": sum(self._tables.size(number) for number in self._tables.numbers()),
            "bytes": self._variables.nbytes + self._tables.nbytes,
            "bytes_in": self._traffic.bytes_in,
            "bytes_out": self._traffic.bytes_out,
            "changed": self._num_changed,
            "repeated": self._num_repeated,
            "low": self._ledger.low,
        }

    # Changing.

    def push(self, closure: int, low: int, changes: Sequence[Change]) -> int:
        """Applies the updates of a closure, unless it has done so before.

        Args:
            closure: Number of the closure.
            low: All closures with lower numbers have finished, and will not send updates again.
            changes: Updates of variables and tables of this server.

        Returns:
            Number of closures that had changed this server before; -1 if this closure had.

        Raises:
            Exception: If an update is invalid. Then none of them is applied.
        """
        self._catch_up()
        self._traffic.take_changes(changes)
        if closure in self._ledger:
            self._num_repeated += 1
            return -1
        before = self._num_changed
        self._log_and_apply({"closure": closure, "low": low}, changes)
        self._mark_applied(closure, low, changes)
        self._save_if_long()
        return before

    def push_and_pull(
        self, closure: int, low: int, changes: Sequence[Change], versions: Mapping[int, int]
    ) -> tuple[int, Values]:
        """Calls `push` and then `pull`, in one message."""
        return self.push(closure, low, changes), self.pull(versions)

    def seal(self, closure: int) -> None:
        """Rejects all later updates of a closure; see `Servers.seal`."""
        self._catch_up()
        if closure not in self._ledger:
            self._log_and_apply({"closure": closure, "low": 0}, ())
            self._mark_applied(closure, 0, ())

    def push_direct(self, number: int, changes: Sequence[Change]) -> None:
        """Applies updates from outside of closures; `number` counts them."""
        self._catch_up()
        self._traffic.take_changes(changes)
        if number <= self._last_direct:
            return
        self._log_and_apply({"direct": number}, changes)
        self._last_direct = number
        self._save_if_long()

    def evict_table(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Removes rows of a table; returns their number, too low if the call was repeated."""
        self._catch_up()
        count = self._tables.evict(number, max_age, min_touches)
        if count and self._log is not None:
            self._save()  # the log cannot repeat it: lookups, which it does not contain, decide
        return count

    def restore_table(
        self, number: int, table: int, state: Mapping[str, np.ndarray], replace: bool
    ) -> None:
        """Adds rows to a table, or replaces all of its rows; see `push_direct`."""
        self._catch_up()
        self._traffic.take(*state.values())
        if number <= self._last_direct:
            return
        self._tables.restore(table, state, replace=replace)
        self._save_direct(number)

    def restore_optimizer(
        self,
        number: int,
        optimizer: int,
        variables: tuple[int, ...],
        arrays: Mapping[int, np.ndarray],
    ) -> None:
        """Replaces some arrays of an optimizer's state; see `push_direct`."""
        self._catch_up()
        if number <= self._last_direct:
            return
        # Leaves that the checkpoint does not have keep their values.
        leaves = dict(enumerate(self._variables.state(optimizer, variables))) | dict(arrays)
        self._variables.restore_state(optimizer, variables, [*leaves.values()])
        self._save_direct(number)

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _check_logged(self, variable: Definition, logged: LoggedVariable) -> None:
        initial, logged_kind = variable.initial, f"{logged.dtype}{logged.shape}"
        kind = "" if initial is None else f"{initial.dtype}{initial.shape}"
        if variable.name != logged.name or kind not in ("", logged_kind):
            raise ValueError(
                f"Variable {variable.number} is '{variable.name}' {kind}, but the log of server "
                f"{self._index} has '{logged.name}' {logged_kind} under this number. Another "
                f"program wrote the log, or the program creates its variables in another order. "
                f"Use another folder."
            )

    def _log_and_apply(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> None:
        if self._log is None:
            self._apply(changes)
            return
        self._log.append(facts, changes)
        try:
            self._apply(changes)
        except Exception:
            self._log.remove_last()
            raise

    def _apply(self, changes: Sequence[Change]) -> None:
        # All or nothing: tables are checked first, because their updates cannot be undone, and
        # `ShardVariables.apply` changes nothing if it raises. Only an initializer of the user that
        # raises for new rows escapes the check.
        of_tables = [x for x in changes if isinstance(x, TableChange)]
        self._tables.check(of_tables)
        self._variables.apply([x for x in changes if not isinstance(x, TableChange)])
        for change in of_tables:
            self._tables.apply(change)

    def _mark_applied(self, closure: int, low: int, changes: Sequence[Change]) -> None:
        self._ledger.add(closure)
        self._ledger.add_below(low)
        self._num_changed += bool(changes)

    def _catch_up(self) -> None:
        """Replays the log, once."""
        if not self._must_replay:
            return
        assert self._log is not None
        # An error, such as a missing optimizer, must not leave half of the log applied: the next
        # call replays all of it again.
        self._replay(self._log)
        self._must_replay = False

    def _replay(self, log: ShardLog) -> None:
        self._ledger, self._num_changed = ClosureLedger(), 0
        self._variables.clear()
        self._tables.clear()
        for facts, arrays, changes in log.read():
            if "define" in facts:
                self._variables.add(facts["define"], facts["name"], arrays["value"])
            elif "table" in facts:
                self._tables.restore(facts["table"], arrays)
            elif "state_of" in facts:
                leaves = [arrays[str(i)] for i in range(len(arrays))]
                variables = tuple(facts["variables"])
                self._variables.restore_state(facts["state_of"], variables, leaves)
            elif "low_of_base" in facts:
                self._ledger = ClosureLedger(facts["low_of_base"], facts["above"])
                self._num_changed, self._last_direct = facts["changed"], facts["direct"]
            elif "direct" in facts:
                self._apply(changes)
                self._last_direct = facts["direct"]
            elif facts["closure"] not in self._ledger:
                self._apply(changes)
                self._mark_applied(facts["closure"], facts["low"], changes)

    def _save_direct(self, number: int) -> None:
        """Saves a direct change that is not a record of the log."""
        before, self._last_direct = self._last_direct, number
        if self._log is not None:
            try:
                self._save()  # contains the change, and `number` with it
            except BaseException:
                self._last_direct = before  # it must not count, so that it can be repeated
                raise

    def _save_if_long(self) -> None:
        if self._log is not None and self._log.is_long():
            try:
                self._save()
            except OSError as error:  # the update itself is in the log, so the call has succeeded
                _log.warning("Server %d could not compact its log: %s", self._index, error)

    def _save(self) -> None:
        """Compacts the log: replaces it by a description of the current contents."""
        assert self._log is not None
        # State of an optimizer needs its variables, so it follows them.
        records: list[Record] = []
        for number, name, value in self._variables.values():
            records.append(({"define": number, "name": name}, {"value": value}))
        for number, variables, leaves in self._variables.states():
            named = {str(i): x for i, x in enumerate(leaves)}
            records.append(({"state_of": number, "variables": list(variables)}, named))
        for number in self._tables.numbers():
            records.append(({"table": number}, self._tables.state(number)))
        facts = {"low_of_base": self._ledger.low, "above": self._ledger.above()}
        facts |= {"changed": self._num_changed, "direct": self._last_direct}
        self._log.compact([*records, (facts, {})])
