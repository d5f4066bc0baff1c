"""Shard: one parameter server, as an actor of an engine.

It holds variables (`shard_variables`) and tables (`shard_tables`). What a closure changes comes
with the closure's number, is logged, and is applied once however often it comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

from tpudist.ps.changes import Change, TableChange
from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.shard_log import ShardLog
from tpudist.ps.shard_traffic import ShardTraffic
from tpudist.ps.shard_variables import ShardVariables
from tpudist.ps.tables.shard_tables import ShardTables, state_arrays
from tpudist.ps.tables.table_options import TableOptions


@dataclasses.dataclass(frozen=True)
class Definition:
    """A variable that a server is to hold.

    Attributes:
        number: Which, of all of the strategy.
        name: Of the variable.
        initial: Its first value; None if the server has it, from its log.
        constraint: What is applied to the value after an optimizer has updated it, or None.
    """

    number: int
    name: str
    initial: Any
    constraint: Any = None


@dataclasses.dataclass(frozen=True)
class Values:
    """What was asked for of a server.

    Attributes:
        num_changed: How many closures have changed this server so far.
        arrays: Versions and arrays by the variable's number, of those that had changed.
    """

    num_changed: int
    arrays: Mapping[int, tuple[int, np.ndarray]]


class Shard:
    """The variables of one server.

    What it gives are views of its arrays, which it does not overwrite after that.
    """

    def __init__(self, index: int, incarnation: int, folder: Path | None, sync_s: float = 0.05):
        """Empty, or as its log says.

        Args:
            index: Which server this is.
            incarnation: How many were in its place before, so that no version is given twice.
            folder: Where its log is; None for none.
            sync_s: After how many seconds at the latest what was logged would outlive the host.
        """
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
        """Takes variables that it is to hold from now on.

        Returns:
            The number of the last change that came from no closure; -1 if there was none.

        Raises:
            ValueError: Its log has another variable of the same number.
        """
        logged = self._log.definitions if self._log is not None else {}
        for wanted in variables:
            self._traffic.take(wanted.initial)
            if wanted.constraint is not None:
                self._variables.constrain(wanted.number, wanted.constraint)
            if wanted.number in logged:
                self._check(wanted, *logged[wanted.number])
            elif wanted.number not in self._variables:
                self._variables.add(wanted.number, wanted.name, wanted.initial)
                if self._log is not None:
                    self._log.define(wanted.number, wanted.name, np.asarray(wanted.initial))
        return self._direct

    def define_optimizers(
        self, transformations: Mapping[int, optax.GradientTransformation]
    ) -> None:
        """Takes the optimizers, by number, that change its variables."""
        self._variables.define_optimizers(transformations)

    def define_tables(self, options: Mapping[int, TableOptions]) -> None:
        """Takes the tables, by number, of which it is to hold parts."""
        self._tables.define(options)

    # Reading.

    def pull(self, wanted: Mapping[int, int]) -> Values:
        """What variables hold: of those that have another version than the one that is known."""
        self._catch_up()
        found = self._variables.pull(wanted)
        for _, array in found.values():
            self._traffic.give(array)
        return Values(self._num_changed, found)

    def pull_rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Some rows of a variable: `[*indices.shape, ...]`."""
        self._catch_up()
        self._traffic.take(indices)
        return self._traffic.give(self._variables.pull_rows(number, indices))

    def pull_table(self, number: int, ids: np.ndarray, create: bool) -> np.ndarray:
        """Rows of a table; see `TableShard.pull`."""
        self._catch_up()
        self._traffic.take(ids)
        return self._traffic.give(self._tables.pull(number, ids, create))

    def variables_of_optimizer(self, optimizer: int) -> list[tuple[int, ...]]:
        """Which variables an optimizer has updated together."""
        self._catch_up()
        return self._variables.variables_of_optimizer(optimizer)

    def state_of_optimizer(self, optimizer: int, variables: tuple[int, ...]) -> list[np.ndarray]:
        """Copies of an optimizer's state for variables of this server."""
        self._catch_up()
        return self._variables.state(optimizer, variables)

    def state_of_table(self, number: int) -> dict[str, np.ndarray]:
        """All rows of a table, copied."""
        self._catch_up()
        return {name: self._traffic.give(x) for name, x in self._tables.state(number).items()}

    def size_of_table(self, number: int) -> int:
        """How many rows of a table there are."""
        self._catch_up()
        return self._tables.size(number)

    def report(self) -> dict[str, Any]:
        """Bytes of the values, and how many closures have changed them."""
        self._catch_up()
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """As `report`, without doing what the log says first, for which not all may be known."""
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
        """Applies what a closure changes, if it was not applied before.

        Args:
            closure: Its number.
            low: Closures of lower numbers have finished, and do not come again.
            changes: What it does to variables of this server.

        Returns:
            How many closures had changed this server before; -1 if this one had.

        Raises:
            Exception: A change does not fit, and none of them was applied.
        """
        self._catch_up()
        self._traffic.take_changes(changes)
        if closure in self._ledger:
            self._num_repeated += 1
            return -1
        self._apply({"closure": closure, "low": low}, changes)
        self._note(closure, low, changes)
        self._save_if_long()
        return self._num_changed - 1

    def push_and_pull(
        self, closure: int, low: int, changes: Sequence[Change], wanted: Mapping[int, int]
    ) -> tuple[int, Values]:
        """As `push` and then `pull`, in one call."""
        return self.push(closure, low, changes), self.pull(wanted)

    def seal(self, closure: int) -> None:
        """Has a closure change nothing from now on, if it has not; see `Servers.seal`."""
        self._catch_up()
        if closure not in self._ledger:
            self._apply({"closure": closure, "low": 0}, ())
            self._note(closure, 0, ())

    def push_direct(self, number: int, changes: Sequence[Change]) -> None:
        """Applies what was changed by no closure; `number` counts such changes."""
        self._catch_up()
        self._traffic.take_changes(changes)
        if number <= self._direct:
            return
        self._apply({"direct": number}, changes)
        self._direct = number
        self._save_if_long()

    def evict_table(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Forgets rows of a table; how many."""
        self._catch_up()
        count = self._tables.evict(number, max_age, min_touches)
        if count and self._log is not None:
            self._save()  # when rows were looked up is not in the log
        return count

    def restore_table(
        self, number: int, table: int, state: Mapping[str, np.ndarray], replace: bool
    ) -> None:
        """Puts rows into a table, or in the place of all that it has; see `push_direct`."""
        self._catch_up()
        self._traffic.take(*state.values())
        if number <= self._direct:
            return
        self._tables.restore(table, state_arrays(state), replace=replace)
        self._direct = number
        if self._log is not None:
            self._save()

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
        leaves = dict(enumerate(self._variables.state(optimizer, variables))) | dict(arrays)
        self._variables.restore_state(optimizer, variables, [*leaves.values()])
        self._direct = number
        if self._log is not None:
            self._save()

    def close(self) -> None:
        """Ends the log."""
        if self._log is not None:
            self._log.close()

    # Within.

    def _check(self, wanted: Definition, name: str, shape: tuple, dtype: Any) -> None:
        given = "" if wanted.initial is None else f"{wanted.initial.dtype}{wanted.initial.shape}"
        if wanted.name != name or given not in ("", f"{dtype}{shape}"):
            raise ValueError(
                f"Variable {wanted.number} is '{wanted.name}' {given}, but the log of server "
                f"{self._index} has '{name}' {dtype}{shape} under this number. Another program "
                f"wrote the log, or the program creates its variables in another order. Use "
                f"another folder."
            )

    def _apply(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> None:
        """Logs some changes and applies them."""
        if self._log is None:
            self._apply_unlogged(changes)
            return
        place = self._log.append(facts, changes)  # first: then nothing is lost if this fails
        try:
            self._apply_unlogged(changes)
        except Exception:
            self._log.revoke(place)
            raise

    def _apply_unlogged(self, changes: Sequence[Change]) -> None:
        of_tables = [x for x in changes if isinstance(x, TableChange)]
        self._tables.check(of_tables)
        self._variables.apply([x for x in changes if not isinstance(x, TableChange)])
        for change in of_tables:
            self._tables.apply(change)

    def _note(self, closure: int, low: int, changes: Sequence[Change]) -> None:
        self._ledger.add(closure)
        self._ledger.raise_to(low)
        self._num_changed += bool(changes)

    def _catch_up(self) -> None:
        """Does again what the log says, once optimizers are known."""
        if not self._is_behind:
            return
        assert self._log is not None
        self._is_behind = False
        try:
            self._replay(self._log)
        except Exception:
            self._is_behind = True
            raise

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
                self._note(facts["closure"], facts["low"], changes)

    def _save_if_long(self) -> None:
        if self._log is not None and self._log.is_long():
            self._save()

    def _save(self) -> None:
        """Begins the log anew, with all that is held."""
        assert self._log is not None
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
        self._log.begin_anew([*records, (facts, {})])
