"""References of JAX (`jax.new_ref`): the cells of a program that its equations read and change.

`access_of` says what an equation does to a reference. `Memory` knows what the cells hold while
`replica_equality` follows a program: why the content may differ between replicas, or None. A whole
write replaces that, another adds to it, and branches and loops are merged.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.extend import core

# Why a content may differ: as in `replica_equality`.
Cause = str | None

NOT_FOLLOWED = "a mutable array reference, which tpudist does not follow"


class Access(enum.Enum):
    """What an equation does to the reference that is its first operand, or its result."""

    MAKE = "new_ref"
    READ = "get"
    WRITE = "swap"  # which gives what was there before
    ADD = "addupdate"
    END = "freeze"  # which gives what was there at the end


_SLICES = (frozenset({"tree"}),)
# All sets of parameters that each is known to have, in jax 0.10.2, 0.11.2 and 0.12.0.1.
_PARAMETERS: Mapping[Access, tuple[frozenset[str], ...]] = {
    Access.MAKE: (
        frozenset({"kind", "memory_space"}),  # until 0.10
        frozenset({"kind", "memory_space", "pin"}),
    ),
    Access.READ: _SLICES,
    Access.WRITE: _SLICES,
    Access.ADD: _SLICES,
    Access.END: (frozenset(),),
}
# How JAX refuses them: to write one, and to use one in a branch or loop.
_REFUSED_IN_VMAP = ("vmapped value on an unbatched", "State effect not supported in vmap")
_NAMES = {access.value: access for access in Access}


def access_of(eqn: core.JaxprEqn) -> Access | None:
    """What an equation does to a reference; None if that is not known."""
    access = _NAMES.get(eqn.primitive.name)
    if access is None or frozenset(eqn.params) not in _PARAMETERS[access]:
        return None
    return access


def is_reference(atom: Any) -> bool:
    """Whether a variable of a jaxpr is a reference."""
    return "Ref" in type(getattr(atom, "aval", None)).__name__


def is_of_vmap(error: Exception) -> bool:
    """Whether JAX says that a function that `jax.vmap` maps cannot use a reference from outside."""
    return any(words in str(error) for words in _REFUSED_IN_VMAP)


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """What one reference stands for, under whatever name the programs inside know it.

    Attributes:
        number: How many were made before it.
    """

    number: int


class Memory:
    """What the cells hold at one point of a program.

    Attributes:
        held: Why the content of each differs between replicas, or None.
        written: The cells that were written since it was asked for last.
    """

    def __init__(self):
        """No cells yet."""
        self.held: dict[Cell, Cause] = {}
        self.written: set[Cell] = set()
        self._num_made = 0

    def make(self, cause: Cause) -> Cell:
        """A new cell that holds a value."""
        cell = Cell(self._num_made)
        self._num_made += 1
        self.held[cell] = cause
        return cell

    def write(self, cell: Cell, cause: Cause, whole: bool) -> None:
        """Replaces what a cell holds, or a part of it."""
        self.held[cell] = cause if whole else self.held.get(cell) or cause
        self.written.add(cell)

    def lose(self, cells: Iterable[Cell]) -> None:
        """Says that of these cells nothing is known any more."""
        for cell in cells:
            self.write(cell, NOT_FOLLOWED, whole=True)

    def watch(self, run: Callable[[], Any]) -> tuple[Any, set[Cell]]:
        """What `run` gives, and which cells it writes."""
        before, self.written = self.written, set()
        result, written = run(), self.written
        self.written = before | written
        return result, written

    def choose(self, which: Cause, branches: Iterable[Callable[[], Any]]) -> list[Any]:
        """Runs branches of which one is taken, each on what is held now, and merges what they do.

        Args:
            which: Why replicas may disagree on the branch: then all that a branch writes differs.
            branches: What may run.
        """
        before, after, results = dict(self.held), [], []
        changed: set[Cell] = set()
        for branch in branches:
            self.held = dict(before)
            result, written = self.watch(branch)
            results.append(result)
            after.append(self.held)
            changed |= written
        self.held = {
            cell: (which if cell in changed else None)
            or next((held[cell] for held in after if held[cell] is not None), None)
            for cell in before
        }
        return results

    def repeat(self, turn: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs a turn of a loop on what is held now, and adds what holds after it.

        Returns:
            What `turn` gives, and whether more cells may differ than before.
        """
        before = dict(self.held)
        result = turn()
        self.held = {cell: cause or self.held[cell] for cell, cause in before.items()}
        return result, any((before[x] is None) != (self.held[x] is None) for x in before)
