"""Updates of variables and tables, as data that can be sent, logged and replayed.

A server applies them in the order in which they arrive. An update contains everything it needs: a
closure that adds sends the summand, and not the sum that it has computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from tpudist.state import scatter_updates

# Fields of type `Any` are jax.Arrays on a worker, tracers in a step, and NumPy arrays on the way to
# a server and in its log.


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """Sets a variable, or adds to it, or subtracts from it.

    Attributes:
        variable: Number of the variable.
        op: `assign`, `add` or `sub`.
        value: Operand, with the shape and dtype of the variable.
    """

    variable: int
    op: str
    value: Any

    def apply(self, old: jax.Array) -> jax.Array:
        """Returns the new value of the variable."""
        if self.op == "assign":
            return self.value
        return old + self.value if self.op == "add" else old - self.value


@dataclasses.dataclass(frozen=True, eq=False)
class RowChange:
    """Changes some rows of a variable; see `state.scatter_updates`.

    Attributes:
        variable: Number of the variable.
        op: `add`, `sub`, `mul`, `div`, `min`, `max` or `update`.
        indices: `[...]` integers.
        values: `[*indices.shape, ...]`.
    """

    variable: int
    op: str
    indices: Any
    values: Any

    def apply(self, old: jax.Array) -> jax.Array:
        """Returns the new value of the variable."""
        return scatter_updates.apply_slices(self.op, old, self.indices, self.values)


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """Updates variables with an optimizer.

    Attributes:
        optimizer: Number of the optimizer.
        variables: Numbers of the variables.
        values: Gradient of each variable, or of its rows at `indices`.
        indices: `[rows]` integers for each variable; None if the gradient has all rows.
    """

    optimizer: int
    variables: tuple[int, ...]
    values: tuple[ArrayLike, ...]
    indices: tuple[ArrayLike | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TableChange:
    """Changes rows of a table; see `table_shard`.

    Attributes:
        table: Number of the table.
        op: `gradients`, by which the table's optimizer updates rows, or `rows`, which replace rows.
        ids: `[n]` int64.
        values: `[n, dim]`.
    """

    table: int
    op: str
    ids: np.ndarray
    values: np.ndarray


Change = Assignment | RowChange | Gradients | TableChange

# Names of classes and fields are part of the format of logs: renaming one makes old logs
# unreadable.
_KINDS: dict[str, type[Change]] = {
    x.__name__: x for x in (Assignment, RowChange, Gradients, TableChange)
}
_ARRAYS = ("ids", "indices", "value", "values")  # fields that hold arrays
_OP_IN_LOGS = "what"  # the name of `op` in the logs of earlier versions


def pack(changes: Sequence[Change]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Returns changes as JSON, and their arrays by name."""
    facts: list[Any] = []
    arrays: dict[str, np.ndarray] = {}

    def name_array(x: ArrayLike | None) -> str | None:
        if x is None:
            return None
        arrays[name := str(len(arrays))] = np.asarray(x)
        return name

    for change in changes:
        fact = {"kind": type(change).__name__, **vars(change)}
        if "op" in fact:
            fact[_OP_IN_LOGS] = fact.pop("op")
        for field in filter(fact.__contains__, _ARRAYS):
            value = fact[field]
            is_tuple = isinstance(value, tuple)
            fact[field] = [name_array(x) for x in value] if is_tuple else name_array(value)
        facts.append(fact)
    return facts, arrays


def unpack(facts: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Change]:
    """Returns the changes that `pack` received."""

    def find(x: Any) -> Any:
        if isinstance(x, list):
            return tuple(map(find, x))
        return None if x is None else arrays[x]

    changes: list[Change] = []
    for fact in facts:
        fields = {k: v for k, v in fact.items() if k != "kind"}
        if _OP_IN_LOGS in fields:
            fields["op"] = fields.pop(_OP_IN_LOGS)
        for name in filter(fields.__contains__, _ARRAYS):
            fields[name] = find(fields[name])
        if "variables" in fields:
            fields["variables"] = tuple(fields["variables"])
        changes.append(_KINDS[fact["kind"]](**fields))
    return changes
