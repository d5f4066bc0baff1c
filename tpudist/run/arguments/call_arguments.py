"""The arguments of one call of `Strategy.run`, and their kinds: how each one reaches the program.

Arrays and Python numbers are fed to the compiled program; each replica gets its own part of a
PerReplica; NNX objects are fed as the values of their Variables. Everything else (booleans,
strings, functions, Variables, and numbers whose value the function needs) is part of the program's
identity and reaches the function unchanged.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from tpudist.state import nnx_contents
from tpudist.state.nnx_binding import Binding
from tpudist.values.per_replica import PerReplica
from tpudist.xla.settings import Setting

ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBER_TYPES = frozenset((int, float, complex))


def unflatten(
    leaves: Sequence[Any], structure: tuple, num_args: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments from flat ones: the inverse of `Flattener.leaves`.

    Args:
        leaves: All flat arguments.
        structure: Nesting of `leaves`: one tree for each positional argument, and one for all
            keywords.
        num_args: Number of positional arguments.
    """
    arguments: list[Any] = []
    position = 0
    for treedef in structure:
        end = position + treedef.num_leaves
        arguments.append(treedef.unflatten(leaves[position:end]))
        position = end
    return tuple(arguments[:num_args]), arguments[num_args] if len(arguments) > num_args else {}


def leaves_of(argnums: Sequence[int], structure: tuple) -> frozenset[int]:
    """Returns the positions of the flat arguments that belong to the arguments `argnums`."""
    ends = list(itertools.accumulate((treedef.num_leaves for treedef in structure), initial=0))
    spans = list(itertools.pairwise(ends))
    return frozenset(leaf for i in argnums if 0 <= i < len(spans) for leaf in range(*spans[i]))


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Positions of the flat arguments by kind.

    They depend only on the types of the arguments, so calls with the same types share them.

    Attributes:
        dynamic: The positions of `arrays`, `numbers`, `per_replica` and `states`, in order.
        arrays: Arrays of JAX and NumPy, and shapes.
        numbers: Python numbers, which JAX takes as arrays of a weak type.
        per_replica: PerReplicas.
        objects: NNX objects.
        states: `nnx.State`s.
        static: Everything else, which is part of the program.
    """

    dynamic: tuple[int, ...]
    arrays: tuple[int, ...]
    numbers: tuple[int, ...]
    per_replica: tuple[int, ...]
    objects: tuple[int, ...]
    states: tuple[int, ...]
    static: tuple[int, ...]

    @functools.cached_property
    def fed(self) -> tuple[tuple[int, bool], ...]:
        """The positions of `dynamic`, each with whether it is a PerReplica."""
        return tuple((i, i in self.per_replica) for i in self.dynamic)

    @functools.cached_property
    def only_arrays(self) -> bool:
        """Whether all arguments are arrays, or numbers that are fed as arrays."""
        return not (self.per_replica or self.objects or self.states or self.static)

    def has_arrays_for_numbers_of(self, other: "Kinds") -> bool:
        """Whether these kinds differ from `other` only by arrays in place of some numbers."""
        mine = self.dynamic, self.per_replica, self.objects, self.states, self.static
        theirs = other.dynamic, other.per_replica, other.objects, other.states, other.static
        return mine == theirs and set(self.numbers) < set(other.numbers)

    @classmethod
    def of(cls, leaves: Sequence[Any], numbers: Collection[int] = ()) -> "Kinds":
        """Sorts `leaves`; those at the positions `numbers` are Python numbers that are fed."""
        positions: dict[str, list[int]] = {field.name: [] for field in dataclasses.fields(cls)}
        for i, x in enumerate(leaves):
            kind = "numbers" if i in numbers else _kind(x)
            positions[kind].append(i)
            # `Inputs` feeds the Variables of NNX objects first, so these are not in `dynamic`.
            if kind in ("arrays", "numbers", "per_replica", "states"):
                positions["dynamic"].append(i)
        return cls(**{name: tuple(indices) for name, indices in positions.items()})


def _kind(x: object) -> str:
    if isinstance(x, PerReplica):
        return "per_replica"
    if isinstance(x, nnx_contents.OBJECT_TYPES):
        return "objects"
    if isinstance(x, nnx.State):
        return "states"
    return "arrays" if isinstance(x, ARRAY_TYPES) else "static"


def numbers_in_state(kinds: Kinds, structure: tuple) -> list[int]:
    """Returns the positions, among the arrays that are fed, of numbers inside a larger argument.

    A number that is a positional argument by itself is a hyperparameter. A number inside a pytree
    may be state, which comes back from the step as an array. Keywords are one pytree here.
    """
    if kinds.states:  # each may be several arrays
        return []
    starts = itertools.accumulate((treedef.num_leaves for treedef in structure), initial=0)
    leaf = jax.tree.structure(0)
    # Not strict: `starts` ends with the number of all leaves.
    alone = {i for i, treedef in zip(starts, structure, strict=False) if treedef == leaf}
    return [k for k, i in enumerate(kinds.dynamic) if i in kinds.numbers and i not in alone]


def is_number(x: object) -> bool:
    """Whether an argument is a Python number: not of a subclass, and not a boolean."""
    return type(x) in _NUMBER_TYPES


def is_number_or_array(x: object) -> bool:
    """Whether an argument can be fed in place of a number."""
    return is_number(x) or isinstance(x, ARRAY_TYPES)


def fits(x: object) -> bool:
    """Whether a Python number can be fed: an integer must fit JAX's default dtype."""
    # JAX's default dtype is int32, or int64 if `jax_enable_x64` is on.
    if type(x) is not int or -(2**31) <= x < 2**31:
        return True
    return Setting.ENABLE_X64.read() and -(2**63) <= x < 2**63


# `Flattener` and `FunctionRecord` are in modules that import this one.
class _Flattener(Protocol):
    def leaves(self, args: tuple, kwargs: dict) -> tuple[list[Any], tuple]: ...


class _FunctionWithFlattener(Protocol):
    name: str

    @property
    def flattener(self) -> _Flattener: ...


class RunCall:
    """One call of `run`, for the trace that it may start.

    Attributes:
        function: The record of the function.
        fn: The function as passed; a bound method is a new object at each call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        elements: Values that are fed for the arguments; see `Flattener.elements`.
        kinds: Positions of `elements` by kind. `StepSignature.kinds` are those of all leaves.
        binding: The NNX objects among the arguments; None without any.
        rows: For each partial batch, the real rows of each replica; empty if all are full.
        is_checked: Whether all arguments have been checked, so that a step may be created for them.
    """

    __slots__ = (
        "_leaves",
        "args",
        "binding",
        "elements",
        "fn",
        "function",
        "is_checked",
        "kinds",
        "kwargs",
        "rows",
    )

    def __init__(
        self,
        function: _FunctionWithFlattener,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        elements: list[Any],
        kinds: Kinds,
        binding: Binding | None,
        rows: tuple[tuple[int, ...], ...],
        is_checked: bool,
    ):
        self.function, self.fn, self.args, self.kwargs = function, fn, args, kwargs
        self.elements, self.kinds, self.binding, self.rows = elements, kinds, binding, rows
        self.is_checked = is_checked
        self._leaves: list[Any] | None = None

    def leaves(self) -> list[Any]:
        """Returns all flat arguments, which most calls do not need."""
        leaves = self._leaves
        if leaves is None:
            leaves = self._leaves = self.function.flattener.leaves(self.args, self.kwargs)[0]
        return leaves
