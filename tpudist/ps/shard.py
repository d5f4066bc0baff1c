"""Shard: one parameter server, as an actor of an engine.

It holds variables (`shard_variables`) and tables (`shard_tables`), logs updates, and applies the
updates of each closure once. It knows no engine and no other server.
"""

# How an update takes effect exactly once, whatever dies:
#
# 1. `push` looks the closure's number up in the ledger. A retry, a second run of a slow closure and
# a
#    late message of a worker that was given up all carry the same number, and are ignored.
# 2. The update and its number are one record of the log, which is appended before the update is
#    applied and before the worker gets an answer. A server that dies in between replays it.
# 3. A worker that gets no answer repeats the closure. If the record was complete, the successor has
#    the number in its ledger; if it was cut off, `RecordFile` removes it. There is no third case.
# 4. If applying raises, `revoke` appends a record that cancels the first one.
#
# The ledger may forget numbers below `low`: the coordinator guarantees that they do not come again.
# The log is replayed lazily (`_catch_up`), because updates by an optimizer need its transformation,
# which the program defines after the server has started.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from tpudist.array_types import Shape
from tpudist.ps.changes import Change, TableChange
from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.shard_log import ShardLog
from tpudist.ps.shard_traffic import ShardTraffic
from tpudist.ps.shard_variables import ShardVariables
from tpudist.ps.tables.shard_tables import ShardTables, state_arrays
from tpudist.ps.tables.table_options import TableOptions

Constraint = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Definition:
    """A variable that a server shall hold.

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
        arrays: Variable -> version and value, only for variables with another version than
            requested.
    """

    num_changed: int
    arrays: Mapping[int, tuple[int, np.ndarray]]


class Shard:
    """The contents of one server.

    It returns views of its arrays, and does not overwrite an array after that.

    Args:
        index: Number of the server.
        incarnation: Number of its predecessors, so that no version number occurs twice.
        folder: Folder of its log; None keeps no log.
        sync_s: Maximum seconds until a logged update would survive a crash of the host.
    """

    def __init__(self, index: int, incarnation: int, folder: Path | None, sync_s: float = 0.05):
        self._index, self._incarnation = index, incarnation
        self._variables = ShardVariables(index, incarnation)
        self._traffic = ShardTraffic()
        self._tables = ShardTables()
        self._ledger = ClosureLedger()
        self._num_changed = self._num_repeated = 0
        self._log = None if folder is None else ShardLog(folder, sync_s, incarnation)
        self._is_behind = self._log is not None and self._log.has_records
        self._direct = -1 if self._log is None else self._log.last_direct

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
                self._check(variable, *logged[number])
            elif number not in self._variables:
                assert initial is not None, "only a variable in a log has no initial value"
                self._variables.add(number, name, initial)
                if self._log is not None:
                    self._log.define(number, name, initial)
        return self._direct

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
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """Returns figures without replaying the log, for which optimizers may still be missing."""
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
        self._apply({"closure": closure, "low": low}, changes)
        self._record(closure, low, changes)
        self._save_if_long()
        return self._num_changed - 1

    def push_and_pull(
        self, closure: int, low: int, changes: Sequence[Change], versions: Mapping[int, int]
    ) -> tuple[int, Values]:
        """Calls `push` and then `pull`, in one message."""
        return self.push(closure, low, changes), self.pull(versions)

    def seal(self, closure: int) -> None:
        """Rejects all later updates of a closure; see `Servers.seal`."""
        self._catch_up()
        if closure not in self._ledger:
            self._apply({"closure": closure, "low": 0}, ())
            self._record(closure, 0, ())

    def push_direct(self, number: int, changes: Sequence[Change]) -> None:
        """Applies updates from outside of closures; `number` counts them."""
        self._catch_up()
        self._traffic.take_changes(changes)
        if number <= self._direct:
            return
        self._apply({"direct": number}, changes)
        self._direct = number
        self._save_if_long()

    def evict_table(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Removes rows of a table; returns their number."""
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
        if number <= self._direct:
            return
        self._tables.restore(table, state_arrays(state), replace=replace)
        self._direct = number
        if self._log is not None:
            self._save()  # contains the restored rows, and `number` with them

    def restore_optimizer(
        self,
        number: int,
        optimizer: int,
        variables: tuple[int, ...],
        arrays: Mapping[int, np.ndarray],
    ) -> None:
        """Replaces some arrays of an optimizer's state; see `push_direct`."""
        self._catch_up()
        if number <= self._direct:
            return
        # Leaves that the checkpoint does not have keep their values.
        leaves = dict(enumerate(self._variables.state(optimizer, variables))) | dict(arrays)
        self._variables.restore_state(optimizer, variables, [*leaves.values()])
        self._direct = number
        if self._log is not None:
            self._save()

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _check(self, variable: Definition, name: str, shape: Shape, dtype: str) -> None:
        initial = variable.initial
        kind = "" if initial is None else f"{initial.dtype}{initial.shape}"
        if variable.name != name or kind not in ("", f"{dtype}{shape}"):
            raise ValueError(
                f"Variable {variable.number} is '{variable.name}' {kind}, but the log of server "
                f"{self._index} has '{name}' {dtype}{shape} under this number. Another program "
                f"wrote the log, or the program creates its variables in another order. Use "
                f"another folder."
            )

    def _apply(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> None:
        """Logs updates, and applies them."""
        if self._log is None:
            self._apply_unlogged(changes)
            return
        place = self._log.append(facts, changes)
        try:
            self._apply_unlogged(changes)
        except Exception:
            self._log.revoke(place)
            raise

    def _apply_unlogged(self, changes: Sequence[Change]) -> None:
        # All or nothing: tables are checked first, because their updates cannot be undone, and
        # `ShardVariables.apply` changes nothing if it raises.
        of_tables = [x for x in changes if isinstance(x, TableChange)]
        self._tables.check(of_tables)
        self._variables.apply([x for x in changes if not isinstance(x, TableChange)])
        for change in of_tables:
            self._tables.apply(change)

    def _record(self, closure: int, low: int, changes: Sequence[Change]) -> None:
        self._ledger.add(closure)
        self._ledger.raise_to(low)
        self._num_changed += bool(changes)

    def _catch_up(self) -> None:
        """Replays the log, once."""
        if not self._is_behind:
            return
        assert self._log is not None
        # An error, such as a missing optimizer, must not leave half of the log applied: the next
        # call replays all of it again.
        self._replay(self._log)
        self._is_behind = False

    def _replay(self, log: ShardLog) -> None:
        self._ledger, self._num_changed = ClosureLedger(), 0
        self._variables.clear()
        self._tables.clear()
        for facts, arrays, changes in log.read():
            if "define" in facts:
                self._variables.add(facts["define"], facts["name"], arrays["value"])
            elif "table" in facts:
                self._tables.restore(facts["table"], state_arrays(arrays))
            elif "state_of" in facts:
                leaves = [arrays[str(i)] for i in range(len(arrays))]
                variables = tuple(facts["variables"])
                self._variables.restore_state(facts["state_of"], variables, leaves)
            elif "low_of_base" in facts:
                self._ledger = ClosureLedger(facts["low_of_base"], facts["above"])
                self._num_changed, self._direct = facts["changed"], facts["direct"]
            elif "direct" in facts:
                self._apply_unlogged(changes)
                self._direct = facts["direct"]
            elif facts["closure"] not in self._ledger:
                self._apply_unlogged(changes)
                self._record(facts["closure"], facts["low"], changes)

    def _save_if_long(self) -> None:
        if self._log is not None and self._log.is_long():
            self._save()

    def _save(self) -> None:
        """Compacts the log: replaces it by a description of the current contents."""
        assert self._log is not None
        # `_replay` reads these records in order: state needs its variables, and the ledger comes
        # last, so that an incomplete description would not be taken for a complete one.
        records: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        for number, name, value in self._variables.values():
            records.append(({"define": number, "name": name}, {"value": value}))
        for number, variables, leaves in self._variables.states():
            named = {str(i): x for i, x in enumerate(leaves)}
            records.append(({"state_of": number, "variables": list(variables)}, named))
        for number in self._tables.numbers():
            records.append(({"table": number}, self._tables.state(number)))
        facts = {"low_of_base": self._ledger.low, "above": self._ledger.above()}
        facts |= {"changed": self._num_changed, "direct": self._direct}
        self._log.compact([*records, (facts, {})])
