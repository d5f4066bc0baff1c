"""Flattens the arguments of a function, and learns how little of them a call needs to look at."""

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.run.arguments.call_arguments import ARRAY_TYPES, Kinds
from tpudist.state import nnx_contents
from tpudist.values.per_replica import is_distributed
from tpudist.xla import integers, tree_depth

_LEAF_TYPES = (nnx.State, *nnx_contents.OBJECT_TYPES)
_ARRAY = np.empty(())  # stands for a plain argument, which counts as one array
_is = operator.is_
# Both of these keep the types that they have seen, which are few and are rarely deleted.
# Types whose instances are one array: `type(x) in set` is faster than `isinstance`.
_single_array_types: set[type] = set()
# `isinstance` of an NNX type takes a microsecond, and there may be hundreds of leaves.
_is_leaf_type: dict[type, bool] = {}


def is_leaf(x: object) -> bool:
    """Whether an argument stays whole although JAX can flatten it: NNX objects, PerReplicas."""
    known = _is_leaf_type.get(type(x))
    if known is None:
        known = _is_leaf_type[type(x)] = is_distributed(x) or isinstance(x, _LEAF_TYPES)
    return known


def _flatten(argument: PyTree) -> tuple[list[Any], Any]:
    tree_depth.check_depth(argument, "An argument of a replica function", is_leaf)
    return jax.tree.flatten(argument, is_leaf=is_leaf)


class Flattener:
    """Flattens the arguments of one function.

    To call `is_leaf` at each node of a large state costs more than the rest of a call. So an
    argument that was a plain pytree of arrays is fed to `jit` whole from then on. `jit` flattens it
    in C++, and its cache misses if the argument is something else now; then it is checked again.

    `leaves`, which a checked call uses, learns which arguments are plain. `elements` uses that.
    """

    def __init__(self):
        self._plain: set[int] = set()  # positions of arguments that were plain pytrees
        # Keys of structures take long to hash, so the steps are found by their numbers. Each
        # structure that a call has had is kept: it is small in comparison with a step.
        self._numbers = itertools.count()
        self._number_of_key: dict[tuple, int] = {}
        self._keys: dict[int, tuple] = {}
        # Shortcut for calls whose positional arguments are one element each: by their types, the
        # number of the key.
        self.one_each: dict[tuple[type, ...], int] = {}

    def elements(self, args: tuple, kwargs: dict, start: int = 0) -> tuple[list[Any], int]:
        """Returns the elements that are fed for the arguments, in which plain arguments are whole.

        Args:
            args: Positional arguments, beginning with argument number `start` of the function.

        Returns:
            The elements, and the number of their structure, as far as it was looked at.
        """
        types = None
        if not kwargs and not start:
            types = tuple(map(type, args))
            known = self.one_each.get(types)
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
                leaves, treedef = _flatten(arg)
                elements += leaves
                key.append((treedef, tuple(map(type, leaves))))
        whole_key = (len(args), *key)
        number = self._number_of_key.get(whole_key)
        if number is None:
            number = self._number_of_key.setdefault(whole_key, next(self._numbers))
            self._keys[number] = whole_key
        if types is not None and len(elements) == len(args) and all(map(_is, elements, args)):
            self.one_each[types] = number
        return elements, number

    def leaves(self, args: tuple, kwargs: dict) -> tuple[list[Any], tuple]:
        """Returns all flat arguments and their nesting; learns which arguments are plain."""
        leaves: list[Any] = []
        structure: list[Any] = []
        self.one_each.clear()  # another argument may be plain from now on
        for i, arg in enumerate((*args, kwargs) if kwargs else args):
            own_leaves, treedef = _flatten(arg)
            for x in own_leaves:
                integers.refuse_masks_and_buffers(x, "An argument of a replica function")
            if isinstance(arg, ARRAY_TYPES):
                _single_array_types.add(type(arg))
            if all(isinstance(x, ARRAY_TYPES) for x in own_leaves):
                self._plain.add(i)
            else:
                self._plain.discard(i)
            leaves += own_leaves
            structure.append(treedef)
        return leaves, tuple(structure)

    def kinds_of_elements(
        self,
        elements: Sequence[Any],
        key_number: int,
        structure: tuple,
        fed_numbers: Collection[int],
    ) -> Kinds:
        """Returns the kinds of elements, in which a plain argument counts as one array.

        Args:
            elements: First result of `elements`.
            key_number: Second result of `elements`.
            structure: Nesting of all the leaves, as `leaves` returns it.
            fed_numbers: Positions among all the leaves of Python numbers that are fed.
        """
        flat: list[Any] = []
        fed: set[int] = set()
        leaf = 0
        for item, treedef in zip(self._keys[key_number][1:], structure, strict=True):
            if item is None:
                flat.append(_ARRAY)
            else:
                first = len(flat)
                flat += elements[first : first + treedef.num_leaves]
                fed |= {first + i for i in range(treedef.num_leaves) if leaf + i in fed_numbers}
            leaf += treedef.num_leaves
        return Kinds.of(flat, fed)
