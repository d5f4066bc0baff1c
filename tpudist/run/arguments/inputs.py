"""The order of the flat inputs of a compiled replica function, after its Variables."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from tpudist.array_types import PyTree
from tpudist.lowering import placement
from tpudist.run.arguments import call_arguments, row_groups
from tpudist.state import nnx_binding
from tpudist.values.per_replica import open_parts
from tpudist.xla.array_attributes import has_shape
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.traces import is_traced


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The flat inputs of a replica function after its Variables, and the arguments made from them.

    In order: the arrays of NNX objects, the arrays of arguments, and the number of real rows of
    each group of batches.

    Attributes:
        nnx_structure: Nesting of the values of NNX objects.
        num_nnx: Number of arrays of NNX objects, which are the first inputs.
        leaves_of_arguments: For each array of arguments, the flat argument that it belongs to.
        stacked: For each input, whether it has one part per replica.
        state_structures: Flat arguments that are an `nnx.State`, with their nesting.
        groups: Partial batches among the arguments; None if all batches are full.
        rows_of_arguments: For each array of arguments, its dims that are rows, with their group.
    """

    nnx_structure: PyTreeDef
    num_nnx: int
    leaves_of_arguments: tuple[int, ...]
    stacked: tuple[bool, ...]
    state_structures: tuple[tuple[int, PyTreeDef], ...]
    groups: row_groups.RowGroups | None
    rows_of_arguments: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(
        cls,
        kinds: call_arguments.Kinds,
        leaves: Sequence[Any],
        binding: nnx_binding.Binding | None,
        groups: row_groups.RowGroups | None,
    ) -> "Inputs":
        """Returns the inputs of a call with these flat arguments."""
        nnx_structure, stacked = open_parts(binding.values() if binding is not None else [])
        opened = {i: open_parts(leaves[i]) for i in kinds.states}
        states = {i: structure for i, (structure, _) in opened.items()}
        per_replica = set(kinds.per_replica)
        with_rows = dict(zip(kinds.per_replica, groups.members, strict=True)) if groups else {}
        arguments: list[int] = []
        rows_of: list[tuple[tuple[int, int], ...]] = []
        for i in kinds.dynamic:
            size = states[i].num_leaves if i in states else 1
            arguments += [i] * size
            rows_of += [with_rows.get(i, ())] * size
            stacked += opened[i][1] if i in states else [i in per_replica]
        stacked += [True] * (len(groups.sizes) if groups else 0)
        return cls(
            nnx_structure,
            nnx_structure.num_leaves,
            tuple(arguments),
            tuple(stacked),
            tuple(states.items()),
            groups,
            tuple(rows_of),
        )

    @functools.cached_property
    def arrays_of_objects(self) -> list[tuple[int, int]]:
        """The arrays of NNX objects, in order: pairs of a leaf and an array of that leaf."""
        sizes = [child.num_leaves for child in self.nnx_structure.children()]
        return [(i, j) for i, size in enumerate(sizes) for j in range(size)]

    @functools.cached_property
    def parts_of_objects(self) -> set[tuple[int, int]]:
        """The arrays of NNX objects that have one part per replica."""
        pairs = zip(self.arrays_of_objects, self.stacked, strict=False)
        return {leaf_and_array for leaf_and_array, is_part in pairs if is_part}

    @property
    def num_groups(self) -> int:
        """Number of partial batches."""
        return len(self.groups.sizes) if self.groups is not None else 0

    def split(self, values: Sequence[Any]) -> tuple[list, list]:
        """Returns the NNX arrays and the argument arrays among `values`."""
        end = self.num_nnx + len(self.leaves_of_arguments)
        return list(values[: self.num_nnx]), list(values[self.num_nnx : end])

    def flat_arguments(
        self,
        leaves: Sequence[Any],
        arrays: Sequence[Any],
        kinds: call_arguments.Kinds,
        copies: Sequence[Any],
    ) -> list[Any]:
        """Returns the flat arguments with traced arrays and copied objects in their places."""
        flat = list(leaves)
        in_states: dict[int, list[Any]] = {}
        states = dict(self.state_structures)
        for i, x in zip(self.leaves_of_arguments, arrays, strict=True):
            if i in states:
                in_states.setdefault(i, []).append(x)
            else:
                flat[i] = x
        for i, structure in states.items():
            flat[i] = structure.unflatten(in_states.get(i, []))
        for i, copy in zip(kinds.objects, copies, strict=True):
            flat[i] = copy
        return flat


def positions(values: Sequence[PyTree]) -> list[list[int]]:
    """Returns for each value, which may be a pytree, the positions of its arrays among all."""
    found, position = [], 0
    for value in values:
        # Arrays of any library, and shapes; a pytree or a Python number has no `shape`.
        size = 1 if has_shape(value) else len(jax.tree.leaves(value))
        found.append(list(range(position, position + size)))
        position += size
    return found


def positions_on_host(values: Sequence[PyTree]) -> list[int]:
    """Returns the positions of the arrays that live in the host's memory."""
    return [i for i, x in enumerate(jax.tree.leaves(values)) if placement.is_on_host(x)]


def make_getter(indices: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """Returns a fast function that selects the elements at `indices` of a list."""
    # A slice, or `itemgetter`, which runs in C. It returns no tuple for fewer than two indices.
    if list(indices) == list(range(len(indices))):
        end = len(indices)
        return lambda values: values[:end]
    if len(indices) > 1:
        getter = operator.itemgetter(*indices)
        return lambda values: list(getter(values))
    return lambda values: [values[i] for i in indices]


def sharding_to_keep(value: object, mesh: ReplicaMesh) -> NamedSharding | None:
    """Returns the sharding of old state on the mesh, which new state must keep; else None."""
    # With another sharding, the next call would miss the cache of `jit`.
    if is_traced(value) or not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh.mesh:
        return sharding
    return None
