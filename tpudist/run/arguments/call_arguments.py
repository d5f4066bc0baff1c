"""The arguments of one call of `Strategy.run`, sorted by what becomes of them.

Arrays and Python numbers are fed to the compiled program; each replica gets its own part of a
PerReplica; NNX objects are fed as the values of their Variables; everything else (booleans,
strings, functions, Variables, and numbers that the function needs as such) is part of the program's
identity and reaches the function as it is.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpudist.run.arguments import containers
from tpudist.state import nnx_contents
from tpudist.values.per_replica import LocalPart, PerReplica, is_distributed, is_per_replica
from tpudist.xla import integers, tree_depth
from tpudist.xla.settings import Setting

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBER_TYPES = frozenset((int, float, complex))
_LEAF_TYPES = (nnx.State, *nnx_contents.OBJECT_TYPES)
_WHOLE = np.empty(())
_is = operator.is_
_single_array_types: set[type] = set()
# isinstance of an NNX type takes a microsecond, and there may be hundreds of leaves.
_is_leaf_type: dict[type, bool] = {}


def is_leaf(x: Any) -> bool:
    """Whether an argument is taken as a whole, though JAX knows how to take it apart."""
    known = _is_leaf_type.get(type(x))
    if known is None:
        known = _is_leaf_type[type(x)] = is_distributed(x) or isinstance(x, _LEAF_TYPES)
    return known


def _flatten(argument: Any) -> tuple[list[Any], Any]:
    tree_depth.check_depth(argument, "An argument of a replica function", is_leaf)
    return jax.tree.flatten(argument, is_leaf=is_leaf)


class Flattener:
    """Takes the arguments of one function apart, and learns how little of it is needed.

    Asking `is_leaf` at each node of a large state costs more than all else of a call. An argument
    that was a plain pytree of arrays is fed to `jit` whole from then on: `jit` takes it apart in
    C++, and its cache misses if it is something else now, so that it is looked at again.
    """

    def __init__(self):
        """Knows nothing yet."""
        self._plain: set[int] = set()
        # Keys take long to hash, and so have numbers.
        self._numbers = itertools.count()
        self._number_of_key: dict[tuple, int] = {}
        self._keys: dict[int, tuple] = {}
        # By the types of positional arguments that are one element each: the number of their key.
        self._one_each: dict[tuple[type, ...], int] = {}

    def elements(self, args: tuple, kwargs: dict, start: int = 0) -> tuple[list[Any], int]:
        """What is fed for the arguments, of which the first is argument `start`: plain ones whole.

        Also a number for their structure, as far as it was looked at.
        """
        types = None
        if not kwargs and not start:
            types = tuple(map(type, args))
            known = self._one_each.get(types)
            if known is not None:
                return list(args), known
        plain = self._plain
        elements: list[Any] = []
        key: list[Any] = []
        for i, arg in enumerate((*args, kwargs) if kwargs else args, start):
            if type(arg) in _single_array_types or i in plain:
                elements.append(arg)
                key.append(None)
            else:
                some, treedef = _flatten(arg)
                elements += some
                key.append((treedef, tuple(map(type, some))))
        whole_key = (len(args), *key)
        number = self._number_of_key.get(whole_key)
        if number is None:
            number = self._number_of_key.setdefault(whole_key, next(self._numbers))
            self._keys[number] = whole_key
        if types is not None and len(elements) == len(args) and all(map(_is, elements, args)):
            self._one_each[types] = number
        return elements, number

    def leaves(self, args: tuple, kwargs: dict) -> tuple[list[Any], tuple]:
        """All flat arguments, and how they were nested; learns which are plain."""
        leaves: list[Any] = []
        structure: list[Any] = []
        self._one_each.clear()  # what is plain may change
        for i, arg in enumerate((*args, kwargs) if kwargs else args):
            some, treedef = _flatten(arg)
            for x in some:
                integers.refuse_masks_and_buffers(x, "An argument of a replica function")
            if isinstance(arg, _ARRAY_TYPES):
                _single_array_types.add(type(arg))
            if all(isinstance(x, _ARRAY_TYPES) for x in some):
                self._plain.add(i)
            else:
                self._plain.discard(i)
            leaves += some
            structure.append(treedef)
        return leaves, tuple(structure)

    def kinds_of_elements(
        self,
        elements: Sequence[Any],
        number: int,
        structure: tuple,
        numbers: Collection[int],
    ) -> "Kinds":
        """The kinds of what `elements` gave; a plain argument counts as an array.

        Args:
            elements: See there.
            number: See there.
            structure: How all the leaves are nested, as `leaves` gives it.
            numbers: Which of all the leaves are numbers that are fed.
        """
        looked_at: list[Any] = []
        fed: set[int] = set()
        leaf = 0
        for item, treedef in zip(self._keys[number][1:], structure, strict=True):
            if item is None:
                looked_at.append(_WHOLE)
            else:
                first = len(looked_at)
                looked_at += elements[first : first + treedef.num_leaves]
                fed |= {first + i for i in range(treedef.num_leaves) if leaf + i in numbers}
            leaf += treedef.num_leaves
        return Kinds.of(looked_at, fed)


def unflatten(
    leaves: Sequence[Any], structure: tuple, num_args: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `Flattener.leaves`: positional and keyword arguments."""
    made: list[Any] = []
    position = 0
    for treedef in structure:
        end = position + treedef.num_leaves
        made.append(treedef.unflatten(leaves[position:end]))
        position = end
    return tuple(made[:num_args]), made[num_args] if len(made) > num_args else {}


def leaves_of(argnums: Sequence[int], structure: tuple) -> frozenset[int]:
    """Positions among `Flattener.leaves` of those of some arguments; of no such argument, none."""
    ends = list(itertools.accumulate((treedef.num_leaves for treedef in structure), initial=0))
    spans = list(itertools.pairwise(ends))
    return frozenset(leaf for i in argnums if 0 <= i < len(spans) for leaf in range(*spans[i]))


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Positions of the flat arguments by kind. Depends on their types only, so it is made once."""

    dynamic: tuple[int, ...]  # arrays, numbers, per_replica and states: what is fed, in order
    arrays: tuple[int, ...]
    numbers: tuple[int, ...]  # of Python's, which JAX takes as arrays of a weak type
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
        """Whether all arguments are arrays, or fed as such."""
        return not (self.per_replica or self.objects or self.states or self.static)

    def are_arrays_of(self, other: "Kinds") -> bool:
        """Whether these are the kinds of `other`, but for arrays in the place of some numbers.

        As of a state that began with a Python number and came back from its step.
        """
        fields = ("dynamic", "per_replica", "objects", "states", "static")
        if any(getattr(self, name) != getattr(other, name) for name in fields):
            return False
        return set(self.numbers) < set(other.numbers)

    @classmethod
    def of(cls, leaves: Sequence[Any], numbers: Collection[int] = ()) -> "Kinds":
        """Sorts `leaves`; those at `numbers` are Python numbers that are fed."""
        found: dict[str, list[int]] = {field.name: [] for field in dataclasses.fields(cls)}
        for i, x in enumerate(leaves):
            kind = "numbers" if i in numbers else _kind(x)
            found[kind].append(i)
            if kind in ("arrays", "numbers", "per_replica", "states"):
                found["dynamic"].append(i)
        return cls(**{name: tuple(indices) for name, indices in found.items()})


def _kind(x: Any) -> str:
    if isinstance(x, PerReplica):
        return "per_replica"
    if isinstance(x, nnx_contents.OBJECT_TYPES):
        return "objects"
    if isinstance(x, nnx.State):
        return "states"
    return "arrays" if isinstance(x, _ARRAY_TYPES) else "static"


def numbers_in_state(kinds: Kinds, structure: tuple) -> list[int]:
    """The positions, among the arrays that are fed, of numbers that are a part of an argument."""
    if kinds.states:  # each may be several arrays
        return []
    first = itertools.accumulate((treedef.num_leaves for treedef in structure), initial=0)
    leaf = jax.tree.structure(0)
    alone = {i for i, treedef in zip(first, structure, strict=False) if treedef == leaf}
    return [k for k, i in enumerate(kinds.dynamic) if i in kinds.numbers and i not in alone]


def is_number(x: Any) -> bool:
    """Whether an argument is a number of Python's own: no subclass, and no boolean."""
    return type(x) in _NUMBER_TYPES


def is_number_or_array(x: Any) -> bool:
    """Whether an argument can be fed in the place of a number."""
    return is_number(x) or isinstance(x, _ARRAY_TYPES)


def fits(x: Any) -> bool:
    """Whether a Python number can be fed: an integer must be one of JAX's default dtype."""
    if type(x) is not int or -(2**31) <= x < 2**31:
        return True
    return Setting.ENABLE_X64.read() and -(2**63) <= x < 2**63


class Call:
    """What one call was given, for the trace that it may start.

    Attributes:
        kinds: Of what is fed for the arguments.
        careful: Whether all arguments have been looked at, so that a step may be made for them.
    """

    __slots__ = (
        "_leaves",
        "args",
        "binding",
        "careful",
        "elements",
        "fn",
        "function",
        "kinds",
        "kwargs",
        "rows",
    )

    def __init__(self, function, fn, args, kwargs, elements, kinds, binding, rows, careful):
        """`elements` is what is fed for the arguments, `rows` the real rows of each group."""
        self.function, self.fn, self.args, self.kwargs = function, fn, args, kwargs
        self.elements, self.kinds, self.binding, self.rows = elements, kinds, binding, rows
        self.careful = careful
        self._leaves: list[Any] | None = None

    def leaves(self) -> list[Any]:
        """All flat arguments."""
        leaves = self._leaves
        if leaves is None:
            leaves = self._leaves = self.function.flattener.leaves(self.args, self.kwargs)[0]
        return leaves


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def check_leaves(
    leaves: Sequence[Any], kinds: Kinds, binding: Any, num_replicas: int, name: str
) -> None:
    """Refuses a PerReplica that was made for another number of replicas, and arrays of objects."""
    for i in kinds.arrays:
        if isinstance(leaves[i], np.ndarray | np.generic) and leaves[i].dtype.kind in "OSUMm":
            raise TypeError(
                f"'{name}' received a numpy array of {leaves[i].dtype}, which no device can hold. "
                "Pass numbers, or a list or tuple of Python values."
            )
    for i in kinds.static:
        if containers.holds(leaves[i], _is_array):
            raise TypeError(
                f"'{name}' received a {type(leaves[i]).__name__} that holds an array. JAX cannot "
                "look into it, so the array would be frozen into the program. Register a dataclass "
                "(@jax.tree_util.register_dataclass), or pass a plain dict, list or tuple."
            )
    held = [binding.values() if binding is not None else [], *(leaves[i] for i in kinds.states)]
    held = list(filter(is_per_replica, jax.tree.leaves(held, is_leaf=is_per_replica)))
    for x in held:
        if x.is_padded and not isinstance(x, LocalPart):
            raise ValueError(
                f"'{name}' received an NNX container that holds {x!r}, which is part of a partial "
                "batch. tpudist counts its rows only if it is an argument, or is in a dict, list "
                "or tuple. Take it out of the container, and pass it by itself."
            )
    for x in [*(leaves[i] for i in kinds.per_replica), *held]:
        parts = num_replicas if isinstance(x, LocalPart) else x.array.shape[0]
        if parts != num_replicas:
            raise ValueError(
                f"'{name}' received {x!r}, but runs on {num_replicas} replica(s): the value was "
                "made under another strategy. Distribute it with the strategy that runs the "
                "function."
            )


def check_positions(asked: Sequence[int], field: str, function: str, num_args: int) -> None:
    """Refuses positions of arguments, a field of `RunOptions`, that a call does not have.

    Raises:
        ValueError: It does not.
    """
    if any(not 0 <= i < num_args for i in asked):
        raise ValueError(
            f"RunOptions({field}={asked}): '{function}' received {num_args} positional "
            f"argument(s). Name positions from 0 to {num_args - 1}."
        )
