"""Shard: what one parameter server holds, as an actor of an engine.

Arrays in host memory, each with a version, and the state of the optimizers that update them. What a
closure changes comes with the closure's number, and is applied once however often it comes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist.ps.changes import Assignment, Change, Gradients, RowChange, TableChange
from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.server_optimizer import ServerOptimizer
from tpudist.ps.shard_log import ShardLog
from tpudist.ps.shard_tables import ShardTables, state_arrays
from tpudist.ps.table_options import TableOptions


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
        self._index = index
        self._device = jax.local_devices(backend="cpu")[0]
        self._values: dict[int, jax.Array] = {}
        self._names: dict[int, str] = {}
        self._constraints: dict[int, Any] = {}
        self._versions: dict[int, int] = {}
        self._next_version = itertools.count(incarnation << 40)
        self._viewed: set[int] = set()  # whose arrays somebody may read
        self._optimizers: dict[int, ServerOptimizer] = {}
        self._tables = ShardTables()
        self._ledger = ClosureLedger()
        self.num_changed = 0
        self._log = None if folder is None else ShardLog(folder, sync_s)
        self._is_behind = self._log is not None and self._log.has_records
        self._direct = -1 if self._log is None else self._log.last_direct

    def define(self, variables: Sequence[Definition]) -> int:
        """Takes variables that it is to hold from now on.

        Returns:
            The number of the last change that came from no closure; -1 if there was none.

        Raises:
            ValueError: Its log has another variable of the same number.
        """
        for wanted in variables:
            if wanted.constraint is not None:
                self._constraints[wanted.number] = wanted.constraint
        logged = self._log.definitions if self._log is not None else {}
        with jax.default_device(self._device):
            for wanted in variables:
                if wanted.number in logged:
                    self._check(wanted, *logged[wanted.number])
                elif wanted.number not in self._values:
                    self._add(wanted.number, wanted.name, wanted.initial)
                    if self._log is not None:
                        self._log.define(wanted.number, wanted.name, np.asarray(wanted.initial))
        return self._direct

    def define_optimizers(
        self, transformations: Mapping[int, optax.GradientTransformation]
    ) -> None:
        """Takes the optimizers, by number, that change its variables."""
        for number, tx in transformations.items():
            if number not in self._optimizers:
                self._optimizers[number] = ServerOptimizer(tx)

    def define_tables(self, options: Mapping[int, TableOptions]) -> None:
        """Takes the tables, by number, of which it is to hold parts."""
        self._tables.define(options)

    # Reading.

    def pull(self, wanted: Mapping[int, int]) -> Values:
        """What variables hold: of those that have another version than the one that is known."""
        self._catch_up()
        found = {}
        for number, known in wanted.items():
            if (version := self._versions[number]) != known:
                self._viewed.add(number)
                found[number] = version, np.asarray(self._values[number])
        return Values(self.num_changed, found)

    def pull_rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Some rows of a variable: `[*indices.shape, ...]`."""
        self._catch_up()
        return np.take(np.asarray(self._values[number]), indices, axis=0)

    def pull_states(self, optimizer: int) -> dict[tuple[int, ...], list[np.ndarray]]:
        """The state of an optimizer: the leaves of each set of variables, copied."""
        self._catch_up()
        states = self._optimizers[optimizer].states
        return {k: [np.array(x) for x in jax.tree.leaves(state)] for k, state in states.items()}

    def pull_table(self, number: int, ids: np.ndarray, create: bool) -> np.ndarray:
        """Rows of a table; see `TableShard.pull`."""
        self._catch_up()
        return self._tables.pull(number, ids, create)

    def state_of_table(self, number: int) -> dict[str, np.ndarray]:
        """All rows of a table, copied."""
        self._catch_up()
        return self._tables.state(number)

    def size_of_table(self, number: int) -> int:
        """How many rows of a table there are."""
        self._catch_up()
        return self._tables.size(number)

    def report(self) -> dict[str, Any]:
        """Bytes of the values, and how many closures have changed them."""
        self._catch_up()
        num_bytes = sum(x.nbytes for x in self._values.values()) + self._tables.nbytes
        return {
            "server": self._index,
            "variables": len(self._values),
            "bytes": num_bytes,
            "changed": self.num_changed,
            "repeated": self._num_repeated,
            "low": self._ledger.low,
        }

    # Changing.

    _num_repeated = 0

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
        if closure in self._ledger:
            self._num_repeated += 1
            return -1
        self._apply({"closure": closure, "low": low}, changes)
        self._note(closure, low)
        self._save_if_long()
        return self.num_changed - 1

    def push_direct(self, number: int, changes: Sequence[Change]) -> None:
        """Applies what was changed by no closure; `number` counts such changes."""
        self._catch_up()
        if number <= self._direct:
            return
        self._apply({"direct": number}, changes)
        self._direct = number
        self._save_if_long()

    def push_states(
        self, number: int, optimizer: int, variables: tuple[int, ...], leaves: Sequence[Any]
    ) -> None:
        """Replaces the state of an optimizer for some variables; see `push_direct`."""
        self._catch_up()
        if number <= self._direct:
            return
        self._set_states(optimizer, variables, leaves)
        self._direct = number
        if self._log is not None:
            self._save()

    def evict_table(self, number: int, max_age: int | None, min_touches: int) -> int:
        """Forgets rows of a table; how many."""
        self._catch_up()
        count = self._tables.evict(number, max_age, min_touches)
        if count and self._log is not None:
            self._save()  # when rows were looked up is not in the log
        return count

    def restore_table(self, number: int, table: int, state: Mapping[str, np.ndarray]) -> None:
        """Puts rows into a table; see `push_direct`."""
        self._catch_up()
        if number <= self._direct:
            return
        self._tables.restore(table, state_arrays(state))
        self._direct = number
        if self._log is not None:
            self._save()

    def close(self) -> None:
        """Ends the log."""
        if self._log is not None:
            self._log.close()

    # Within.

    def _add(self, number: int, name: str, value: Any) -> None:
        self._values[number] = jax.device_put(np.array(value), self._device)
        self._names[number] = name
        self._versions[number] = next(self._next_version)

    def _check(self, wanted: Definition, name: str, shape: tuple, dtype: Any) -> None:
        given = "" if wanted.initial is None else f"{wanted.initial.dtype}{wanted.initial.shape}"
        if wanted.name != name or given not in ("", f"{dtype}{shape}"):
            raise ValueError(
                f"Variable {wanted.number} is '{wanted.name}' {given}, but the log of server "
                f"{self._index} has '{name}' {dtype}{shape} under this number. The log was written "
                f"by another program, or by one that makes its variables in another order: give "
                f"another folder."
            )

    def _apply(self, facts: Mapping[str, Any], changes: Sequence[Change]) -> None:
        """Logs some changes and applies them."""
        if self._log is None:
            self._compute_and_take(changes)
            return
        place = self._log.append(facts, changes)  # first: then nothing is lost if this fails
        try:
            self._compute_and_take(changes)
        except Exception:
            self._log.revoke(place)
            raise

    def _compute_and_take(self, changes: Sequence[Change]) -> None:
        of_tables = [x for x in changes if isinstance(x, TableChange)]
        for change in of_tables:
            self._tables.check(change)
        self._take(self._compute([x for x in changes if not isinstance(x, TableChange)]))
        for change in of_tables:
            self._tables.apply(change)

    def _compute(self, changes: Sequence[Change]) -> dict[int, jax.Array]:
        """What variables hold after some changes."""
        new: dict[int, jax.Array] = {}

        def now(number: int) -> jax.Array:
            return new[number] if number in new else self._values[number]

        with jax.default_device(self._device):
            for change in changes:
                if isinstance(change, Gradients):
                    numbers = change.variables
                    values = [now(n) for n in numbers]
                    # Only the last change may overwrite: should one after it fail, the old values
                    # are the ones that are kept.
                    last = change is changes[-1] and not self._constraints.keys() & set(numbers)
                    viewed = self._viewed - new.keys()
                    optimizer = self._optimizer(change.optimizer)
                    after = optimizer.apply(change, values, viewed, in_place=last)
                    for n, value in zip(numbers, after, strict=True):
                        constraint = self._constraints.get(n)
                        new[n] = value if constraint is None else constraint(value)
                elif isinstance(change, RowChange):
                    last = change is changes[-1]
                    number = change.variable
                    alone = last and (number in new or number not in self._viewed)
                    new[number] = _change_rows(change, now(number), in_place=alone)
                else:
                    assert isinstance(change, Assignment)
                    number = change.variable
                    new[number] = jnp.array(change.apply(now(number)), copy=True)
        return new

    def _optimizer(self, number: int) -> ServerOptimizer:
        if number not in self._optimizers:
            raise ValueError(
                f"Server {self._index} is to apply gradients by optimizer {number}, which the "
                f"program has not made (yet). Make all optimizers in the strategy's scope, in the "
                f"same order in each run, before anything is read or scheduled."
            )
        return self._optimizers[number]

    def _take(self, new: Mapping[int, jax.Array]) -> None:
        for number, value in new.items():
            if value is not self._values[number]:
                self._viewed.discard(number)
            self._values[number] = value
            self._versions[number] = next(self._next_version)

    def _note(self, closure: int, low: int) -> None:
        self._ledger.add(closure)
        self._ledger.raise_to(low)
        self.num_changed += 1

    def _set_states(
        self, optimizer: int, variables: tuple[int, ...], leaves: Sequence[Any]
    ) -> None:
        with jax.default_device(self._device):
            owner = self._optimizer(optimizer)
            state = owner.begin(variables, [self._values[n] for n in variables])
            treedef = jax.tree.structure(state)
            arrays = [jnp.array(x, copy=True) for x in leaves]
            owner.states[variables] = jax.tree.unflatten(treedef, arrays)

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
        self._ledger, self.num_changed = ClosureLedger(), 0
        self._tables.clear()
        for facts, arrays, changes in log.read():
            if "define" in facts:
                self._add(facts["define"], facts["name"], arrays["value"])
            elif "table" in facts:
                self._tables.restore(facts["table"], state_arrays(arrays))
            elif "state_of" in facts:
                leaves = [arrays[str(i)] for i in range(len(arrays))]
                self._set_states(facts["state_of"], tuple(facts["variables"]), leaves)
            elif "low_of_base" in facts:
                self._ledger = ClosureLedger(facts["low_of_base"], facts["above"])
                self.num_changed, self._direct = facts["changed"], facts["direct"]
            elif "direct" in facts:
                self._compute_and_take(changes)
                self._direct = facts["direct"]
            elif facts["closure"] not in self._ledger:
                self._compute_and_take(changes)
                self._note(facts["closure"], facts["low"])

    def _save_if_long(self) -> None:
        if self._log is not None and self._log.is_long():
            self._save()

    def _save(self) -> None:
        """Begins the log anew, with all that is held."""
        assert self._log is not None
        records: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        for number, value in self._values.items():
            facts: dict[str, Any] = {"define": number, "name": self._names[number]}
            records.append((facts, {"value": np.asarray(value)}))
        for number, optimizer in self._optimizers.items():
            for variables, state in optimizer.states.items():
                leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
                records.append(({"state_of": number, "variables": list(variables)}, leaves))
        for number in self._tables.numbers():
            records.append(({"table": number}, self._tables.state(number)))
        facts = {"low_of_base": self._ledger.low, "above": self._ledger.above()}
        facts |= {"changed": self.num_changed, "direct": self._direct}
        self._log.begin_anew([*records, (facts, {})])


def _change_rows(change: RowChange, old: jax.Array, *, in_place: bool) -> jax.Array:
    apply = _apply_in_place if in_place else _apply
    return apply(change.what, old, jnp.asarray(change.indices), jnp.asarray(change.values))


def _scatter(what: str, old: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return RowChange(0, what, indices, values).apply(old)


_apply = jax.jit(_scatter, static_argnums=0)
_apply_in_place = jax.jit(_scatter, static_argnums=0, donate_argnums=1)
