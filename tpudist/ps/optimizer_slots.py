"""OptimizerSlots: the state of an optimizer on all servers, as one state for a checkpoint.

Each server has the state for its variables, and parts of variables. Rows of the complete state are
joined and divided like the rows of the variables. Arrays that belong to no variable, such as the
count of steps, are the same on all servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from tpudist.array_types import PyTree, Shape
from tpudist.ps.independence import find_name, name_on_server, names_of_state
from tpudist.ps.server_array import ArraysInCheckpoint
from tpudist.ps.server_variable import ServerVariable
from tpudist.ps.servers import Servers

Place = tuple[int, int]
"""Number of a server, and index of the array among the leaves of its state."""


@dataclasses.dataclass
class Slot:
    """One array of the complete state, and its places.

    Attributes:
        shape: Shape of the complete array.
        dtype: Dtype of the array.
        places: Places that have its rows, in their order, or that each have all of it.
        split_at: Rows at which it is split into parts; None if each place has all of it.
    """

    shape: Shape
    dtype: DTypeLike
    places: list[Place] = dataclasses.field(default_factory=list)
    split_at: list[int] | None = None


class _Located(NamedTuple):
    """An array in the state of one server: a part of an array of the complete state, or all of it.

    Attributes:
        part: Number of the part of the variable to which it belongs; 0 if it belongs to none.
        place: Place of the array.
        shape: Shape of the array.
    """

    part: int
    place: Place
    shape: Shape


class OptimizerSlots:
    """The state of one optimizer for some variables.

    Args:
        servers: Servers of the strategy.
        number: Number of the optimizer.
        tx: Transformation of the optimizer.
        variables: All variables that it updates, in the order of `apply_gradients`, by the names
            that its state has for them in other strategies.

    Raises:
        ValueError: If it has state for other variables, or state that cannot be in a checkpoint.
    """

    def __init__(
        self,
        servers: Servers,
        number: int,
        tx: optax.GradientTransformation,
        variables: Mapping[str, ServerVariable],
    ):
        self._servers, self._number = servers, number
        self._parts = {n: v.parts for n, v in variables.items()}
        self._parts_by_server: dict[int, list[tuple[str, ServerVariable]]] = {}
        for name, parts in self._parts.items():
            for part in parts:
                self._parts_by_server.setdefault(part.home.server, []).append((name, part))
        self._check_groups()
        # The state as it would be in one place, only as shapes.
        whole = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in variables.items()}
        self._state = jax.eval_shape(tx.init, whole)
        self._slots = self._make_slots()
        self._place_slots(self._locate(tx), jax.tree.leaves(names_of_state(self._state, whole)))
        self._read_arrays: dict[int, list[np.ndarray]] | None = None

    def tree(self, sharding: jax.sharding.Sharding) -> PyTree:
        """Returns the state, with arrays of a checkpoint that are restored to `sharding` first."""
        arrays = ArraysInCheckpoint(self)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: arrays.array(_name(path), x.shape, x.dtype, sharding), self._state
        )

    def read(self, key: Hashable) -> np.ndarray:
        """Returns one array of the state, as it was at the first call: one object per checkpoint.

        Raises:
            ValueError: If servers disagree about an array that each of them has.
        """
        if self._read_arrays is None:  # one call per server, so that its arrays are consistent
            self._read_arrays = {
                server: self._servers.read_optimizer(server, self._number, self._numbers(server))
                for server in self._parts_by_server
            }
        slot = self._slots[str(key)]
        parts = [self._read_arrays[server][index] for server, index in slot.places]
        if slot.split_at is not None:
            return np.concatenate(parts)
        # Such as a count of steps. Servers count separately, and agree between closures if each
        # closure updates all of them.
        for (server, _), x in zip(slot.places, parts, strict=True):
            if not np.array_equal(x, parts[0], equal_nan=x.dtype.kind in "fc"):
                raise ValueError(
                    f"The state of an optimizer cannot be saved: for {key}, server "
                    f"{slot.places[0][0]} has {parts[0]}, but server {server} has {x}. Servers "
                    f"agree only after all functions have finished: call join first."
                )
        return parts[0]

    def write_all(self, values: dict[Hashable, np.ndarray]) -> None:
        """Sends arrays of the state to the servers; other arrays do not change."""
        by_server: dict[int, dict[int, np.ndarray]] = {
            server: {} for server in self._parts_by_server
        }
        for key, value in values.items():
            slot = self._slots[str(key)]
            parts = [value] * len(slot.places)
            if slot.split_at is not None:
                parts = np.split(value, slot.split_at)
            for (server, index), x in zip(slot.places, parts, strict=True):
                by_server[server][index] = x
        for server, arrays in by_server.items():
            numbers = self._numbers(server)
            self._servers.restore_optimizer(server, self._number, numbers, arrays)

    def _numbers(self, server: int) -> tuple[int, ...]:
        return tuple(part.home.number for _, part in self._parts_by_server[server])

    def _check_groups(self) -> None:
        for server, known in enumerate(self._servers.variables_of_optimizer(self._number)):
            here = self._numbers(server) if server in self._parts_by_server else ()
            others = [numbers for numbers in known if numbers != here]
            if others:
                raise ValueError(
                    f"The state of an optimizer cannot be saved for the Variables "
                    f"{list(self._parts)}, which on server {server} are {here}: it has updated "
                    f"{others} there. Pass optimizer.build all the Variables that apply_gradients "
                    f"receives, in the same order."
                )

    def _make_slots(self) -> dict[str, Slot]:
        """Returns the arrays of the complete state by name, without places."""
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        slots = {_name(path): Slot(x.shape, x.dtype) for path, x in leaves}
        for name, slot in slots.items():
            if jax.numpy.issubdtype(slot.dtype, jax.dtypes.prng_key):
                raise ValueError(
                    f"The state of an optimizer cannot be saved: {name} in it is a random key, "
                    f"with which each server draws its own numbers. Remove the noise from the "
                    f"transformation."
                )
        return slots

    def _locate(self, tx: optax.GradientTransformation) -> dict[str, list[_Located]]:
        """Returns the arrays of all servers, by their name in the complete state."""
        # A server names variables by their numbers, and has a part where the complete state has a
        # variable.
        part_numbers = {
            name_on_server(part.home.number): i
            for parts in self._parts.values()
            for i, part in enumerate(parts)
        }
        found: dict[str, list[_Located]] = {name: [] for name in self._slots}
        for server, named in self._parts_by_server.items():
            names = {name_on_server(part.home.number): name for name, part in named}
            shapes = {
                name_on_server(part.home.number): jax.ShapeDtypeStruct(part.shape, part.dtype)
                for _, part in named
            }
            state = jax.eval_shape(tx.init, shapes)
            owners = jax.tree.leaves(names_of_state(state, shapes))
            for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
                located = _Located(part_numbers.get(owners[i], 0), (server, i), x.shape)
                found.setdefault(_name(path, names), []).append(located)
        return found

    def _place_slots(self, found: Mapping[str, list[_Located]], owners: list[str]) -> None:
        """Adds the places of all slots, whose variables are `owners` (empty for no variable)."""
        counts = {
            name: len(self._parts[owner]) if owner else len(self._parts_by_server)
            for name, owner in zip(self._slots, owners, strict=True)
        }
        found_counts = {name: len(located) for name, located in found.items()}
        if found_counts != counts:
            raise ValueError(
                f"The state of an optimizer cannot be saved: it has {list(counts)} in one place, "
                f"but other arrays on servers: {found_counts}. "
                f"Its transformation reads the names of Variables, which are numbers on servers. "
                f"Save only the Variables."
            )
        for owner, (name, slot) in zip(owners, self._slots.items(), strict=True):
            located = sorted(found[name], key=lambda x: x.part)
            slot.places = [x.place for x in located]
            slot.split_at = self._find_splits(owner, name, slot, [x.shape for x in located])

    def _find_splits(
        self, owner: str, name: str, slot: Slot, shapes: list[Shape]
    ) -> list[int] | None:
        parts = self._parts.get(owner, [])
        if all(shape == slot.shape for shape in shapes):
            return None  # one part, or an array that every part has completely
        num_rows = [part.shape[0] for part in parts]
        if shapes != [part.shape for part in parts] or slot.shape[:1] != (sum(num_rows),):
            raise ValueError(
                f"The state of an optimizer cannot be saved: {name} in it has the shapes {shapes} "
                f"for parts of a Variable, but {slot.shape} for the complete Variable. It must "
                f"have one element per element of the Variable, or be the same for all parts. "
                f"Create the Variable without a partitioner."
            )
        return np.cumsum(num_rows[:-1]).tolist()


def _name(path: jax.tree_util.KeyPath, names: Mapping[str, str] | None = None) -> str:
    """Returns the name of a leaf by its path, with names of variables replaced by `names`."""
    if names:
        i, name = find_name(path, names)
        if name:
            path = (*path[:i], jax.tree_util.DictKey(names[name]), *path[i + 1 :])
    return jax.tree_util.keystr(path)
