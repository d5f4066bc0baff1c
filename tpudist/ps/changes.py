"""What a closure does to variables that servers hold: data, which can be sent, logged and replayed.

A server applies changes in the order in which they come. None of them depends on what the closure
had read, but for what is in it: a closure that adds sends what it adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpudist.state import scatter_updates


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """A variable becomes `value`, or that is added to it, or subtracted.

    Attributes:
        variable: Its number.
        what: `assign`, `add` or `sub`.
        value: Of the variable's shape and dtype.
    """

    variable: int
    what: str
    value: Any

    def apply(self, old: Any) -> Any:
        """What the variable holds then."""
        if self.what == "assign":
            return self.value
        return old + self.value if self.what == "add" else old - self.value


@dataclasses.dataclass(frozen=True, eq=False)
class RowChange:
    """Some rows of a variable change; see `state.scatter_updates`.

    Attributes:
        variable: Its number.
        what: `add`, `sub`, `mul`, `div`, `min`, `max` or `update`.
        indices: `[...]` integers.
        values: `[*indices.shape, ...]`.
    """

    variable: int
    what: str
    indices: Any
    values: Any

    def apply(self, old: Any) -> Any:
        """What the variable holds then."""
        return scatter_updates.apply(self.what, old, self.indices, self.values)


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """An optimizer updates variables.

    Attributes:
        optimizer: Its number.
        variables: Their numbers.
        values: The gradient of each: of its shape, or of the rows at `indices`.
        indices: `[rows]` integers for each, or None where the gradient is of all rows.
    """

    optimizer: int
    variables: tuple[int, ...]
    values: tuple[Any, ...]
    indices: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TableChange:
    """Rows of a table change; see `table_shard`.

    Attributes:
        table: Its number.
        what: `gradients`, by which its optimizer updates rows; or `rows`, that replace them.
        ids: `[n]` int64.
        values: `[n, dim]`.
    """

    table: int
    what: str
    ids: Any
    values: Any


Change = Assignment | RowChange | Gradients | TableChange


def pack(changes: Sequence[Change]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Changes as what JSON holds, and arrays by name."""
    facts: list[Any] = []
    arrays: dict[str, np.ndarray] = {}

    def name_array(x: Any) -> str | None:
        if x is None:
            return None
        arrays[name := str(len(arrays))] = np.asarray(x)
        return name

    for change in changes:
        fact: dict[str, Any] = {"kind": type(change).__name__}
        for field in dataclasses.fields(change):
            value = getattr(change, field.name)
            if field.name in _ARRAYS:
                several = isinstance(value, tuple)
                value = [name_array(x) for x in value] if several else name_array(value)
            fact[field.name] = value
        facts.append(fact)
    return facts, arrays


def unpack(facts: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Change]:
    """The inverse of `pack`."""

    def find(x: Any) -> Any:
        if isinstance(x, list):
            return tuple(map(find, x))
        return None if x is None else arrays[x]

    found: list[Change] = []
    for fact in facts:
        kind = _KINDS[fact["kind"]]
        fields = {k: v for k, v in fact.items() if k != "kind"}
        for name in _ARRAYS & fields.keys():
            fields[name] = find(fields[name])
        if kind is Gradients:
            fields["variables"] = tuple(fields["variables"])
        found.append(kind(**fields))
    return found


_ARRAYS = {"ids", "indices", "value", "values"}
_KINDS: dict[str, Any] = {x.__name__: x for x in (Assignment, RowChange, Gradients, TableChange)}
