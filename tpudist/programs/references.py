"""References of JAX (`jax.new_ref`): mutable cells that the equations of a program read and write.

`access_of` classifies an equation. `Memory` tracks the contents of the cells while
`replica_equality` follows a program: the cause of differences between replicas, or None. A write of
the whole cell replaces the cause; a partial write adds its own. Branches and loops are merged.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from jax.extend import core

from tpudist.programs.replica_agreement import Cause

NOT_FOLLOWED = "a mutable array reference, which tpudist does not follow"


class Access(enum.Enum):
    """The effect of an equation on a reference: its first operand, or its result."""

    MAKE = "new_ref"
    READ = "get"
    WRITE = "swap"  # returns the old content
    ADD = "addupdate"
    END = "freeze"  # returns the last content


_SLICES = (frozenset({"tree"}),)
# All known sets of parameters, from jax 0.10.2, 0.11.2 and 0.12.0.1. With other parameters the
# effect is unknown, and the reference is not followed.
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
# JAX's errors for a write in `jax.vmap`, and for a use in a branch or loop in it.
_REFUSED_IN_VMAP = ("vmapped value on an unbatched", "State effect not supported in vmap")
_NAMES = {access.value: access for access in Access}


def access_of(eqn: core.JaxprEqn) -> Access | None:
    """Returns the effect of an equation on a reference; None if it is unknown."""
    access = _NAMES.get(eqn.primitive.name)
    if access is None or frozenset(eqn.params) not in _PARAMETERS[access]:
        return None
    return access


def is_reference(atom: core.Var | core.Literal) -> bool:
    """Returns whether a variable of a jaxpr is a reference."""
    # By name: JAX's class `AbstractRef` is not public.
    return type(atom.aval).__name__.endswith("Ref")


def is_of_vmap(error: Exception) -> bool:
    """Returns whether JAX rejects a reference from outside of a function that `jax.vmap` maps."""
    return any(words in str(error) for words in _REFUSED_IN_VMAP)


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """The identity of a reference, which has other variables in programs inside.

    Attributes:
        number: Position in the order of creation.
    """

    number: int


Result = TypeVar("Result")


class Memory:
    """The contents of the cells at one point of a program.

    Attributes:
        causes: The cause of differences between replicas in each cell, or None.
        written: The cells written since the innermost `watch` began.
    """

    def __init__(self):
        self.causes: dict[Cell, Cause] = {}
        self.written: set[Cell] = set()
        self._num_cells = 0

    def make(self, cause: Cause) -> Cell:
        """Returns a new cell with a content."""
        cell = Cell(self._num_cells)
        self._num_cells += 1
        self.causes[cell] = cause
        return cell

    def write(self, cell: Cell, cause: Cause, whole: bool) -> None:
        """Replaces the content of a cell, or a part of it."""
        self.causes[cell] = cause if whole else self.causes.get(cell) or cause
        self.written.add(cell)

    def forget(self, cells: Iterable[Cell]) -> None:
        """Marks the contents of cells as unknown."""
        for cell in cells:
            self.write(cell, NOT_FOLLOWED, whole=True)

    def watch(self, run: Callable[[], Result]) -> tuple[Result, set[Cell]]:
        """Returns the result of `run`, and the cells that it writes."""
        before, self.written = self.written, set()
        result, written = run(), self.written
        self.written = before | written
        return result, written

    def choose(self, choice: Cause, branches: Iterable[Callable[[], Result]]) -> list[Result]:
        """Runs all branches on the current contents, and merges their effects.

        Args:
            choice: The cause of disagreement about the branch, or None. With a cause, all cells
                that a branch writes differ between replicas.
            branches: The branches; a run takes one of them.
        """
        before, after, results = dict(self.causes), [], []
        changed: set[Cell] = set()
        for branch in branches:
            self.causes = dict(before)
            result, written = self.watch(branch)
            results.append(result)
            after.append(self.causes)
            changed |= written
        # A branch that does not write a cell keeps its cause from before.
        self.causes = {
            cell: (choice if cell in changed else None)
            or next((causes[cell] for causes in after if causes[cell] is not None), None)
            for cell in before
        }
        return results

    def repeat(self, iteration: Callable[[], Result]) -> tuple[Result, bool]:
        """Runs one iteration of a loop on the current contents, and merges its effects.

        Returns:
            The result of `iteration`, and whether more cells may differ than before.
        """
        # A cell that differed before the iteration still may: causes are only added, so a fixpoint
        # over the iterations ends.
        before = dict(self.causes)
        result = iteration()
        self.causes = {cell: cause or self.causes[cell] for cell, cause in before.items()}
        return result, any((before[x] is None) != (self.causes[x] is None) for x in before)
