"""OptimizerSlots: the state of an optimizer on all servers, as it would be in one place.

Each server has the state for the variables, and the parts of variables, that it holds. Together
they are the state for all of them: rows are put together and divided as those of their variables
are, and what belongs to no variable, such as a count of steps, is the same on all servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from tpudist.array_types import PyTree
from tpudist.ps import independence
from tpudist.ps.server_array import ArraysInCheckpoint
from tpudist.ps.server_variable import ServerVariable
from tpudist.ps.servers import Servers

Place = tuple[int, int]
"""A server, and which of the arrays of its state."""


@dataclasses.dataclass
class Slot:
    """One array of the whole state, and where it is.

    Attributes:
        shape: Of the whole.
        dtype: Of its elements.
        places: Where the servers have it: rows of it in their order, or all of it each.
        starts: At which rows the parts after the first begin; None if each place has all.
    """

    shape: tuple[int, ...]
    dtype: Any
    places: list[Place] = dataclasses.field(default_factory=list)
    starts: list[int] | None = None


class OptimizerSlots:
    """The state of one optimizer for some variables."""

    def __init__(
        self,
        servers: Servers,
        number: int,
        tx: optax.GradientTransformation,
        variables: Mapping[str, ServerVariable],
    ):
        """Finds out what is where, and asks servers which variables they have state for.

        Args:
            servers: Of the strategy.
            number: Of the optimizer.
            tx: The optimizer's transformation.
            variables: All that it updates, in the order of `apply_gradients`, by the names that
                its state has for them in other strategies.

        Raises:
            ValueError: There is state for other variables, or such as has no place in a checkpoint.
        """
        self._servers, self._number = servers, number
        self._parts = {n: getattr(v, "variables", [v]) for n, v in variables.items()}
        self._of_server: dict[int, list[tuple[str, ServerVariable]]] = {}
        for name, parts in self._parts.items():
            for part in parts:
                self._of_server.setdefault(part.home.server, []).append((name, part))
        self._refuse_others()
        whole = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in variables.items()}
        self._state = jax.eval_shape(tx.init, whole)
        self._slots = self._find_slots(tx, whole)
        self._found: dict[int, list[np.ndarray]] | None = None

    def tree(self, sharding: jax.sharding.Sharding) -> PyTree:
        """The state, with arrays of a checkpoint that are restored by `sharding` first."""
        arrays = ArraysInCheckpoint(self)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: arrays.array(_name(path), x.shape, x.dtype, sharding), self._state
        )

    def read(self, key: Hashable) -> np.ndarray:
        """One array of the state.

        Raises:
            ValueError: Servers do not have the same where each has all of it.
        """
        if self._found is None:  # in one moment, rather than array by array
            self._found = {
                server: self._servers.read_optimizer(server, self._number, self._numbers(server))
                for server in self._of_server
            }
        slot = self._slots[str(key)]
        parts = [self._found[server][index] for server, index in slot.places]
        if slot.starts is not None:
            return np.concatenate(parts)
        for (server, _), x in zip(slot.places, parts, strict=True):
            if not np.array_equal(x, parts[0], equal_nan=x.dtype.kind in "fc"):
                raise ValueError(
                    f"The state of an optimizer cannot be saved: for {key}, server "
                    f"{slot.places[0][0]} has {parts[0]}, but server {server} has {x}. Servers "
                    f"agree only after all functions have finished: call join first."
                )
        return parts[0]

    def write_all(self, values: dict[Hashable, Any]) -> None:
        """Has servers take arrays of the state; the others stay as they are."""
        by_server: dict[int, dict[int, np.ndarray]] = {server: {} for server in self._of_server}
        for key, value in values.items():
            slot = self._slots[str(key)]
            parts = [value] * len(slot.places)
            if slot.starts is not None:
                parts = np.split(value, slot.starts)
            for (server, index), x in zip(slot.places, parts, strict=True):
                by_server[server][index] = x
        for server, arrays in by_server.items():
            numbers = self._numbers(server)
            self._servers.restore_optimizer(server, self._number, numbers, arrays)

    def _numbers(self, server: int) -> tuple[int, ...]:
        return tuple(part.home.number for _, part in self._of_server[server])

    def _refuse_others(self) -> None:
        for server, known in enumerate(self._servers.variables_of_optimizer(self._number)):
            here = self._numbers(server) if server in self._of_server else ()
            others = [numbers for numbers in known if numbers != here]
            if others:
                raise ValueError(
                    f"The state of an optimizer cannot be saved for the Variables "
                    f"{list(self._parts)}, which on server {server} are {here}: it has updated "
                    f"{others} there. Pass optimizer.build all the Variables that apply_gradients "
                    f"receives, in the same order."
                )

    def _find_slots(
        self, tx: optax.GradientTransformation, whole: Mapping[str, Any]
    ) -> dict[str, Slot]:
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        slots = {_name(path): Slot(x.shape, x.dtype) for path, x in leaves}
        for name, slot in slots.items():
            if jax.numpy.issubdtype(slot.dtype, jax.dtypes.prng_key):
                raise ValueError(
                    f"The state of an optimizer cannot be saved: {name} in it is a random key, "
                    f"with which each server draws its own numbers. Remove the noise from the "
                    f"transformation."
                )
        found: dict[str, list[tuple[int, Place, tuple[int, ...]]]] = {name: [] for name in slots}
        ranks = {
            str(part.home.number): i
            for parts in self._parts.values()
            for i, part in enumerate(parts)
        }
        for server, named in self._of_server.items():
            names = {str(part.home.number): name for name, part in named}
            parts = {str(x.home.number): jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in named}
            state = jax.eval_shape(tx.init, parts)
            owners = jax.tree.leaves(independence.names_of_state(state, parts))
            for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
                rank = ranks.get(owners[i], 0)
                name = _name(path, names)
                found.setdefault(name, []).append((rank, (server, i), x.shape))
        owners = jax.tree.leaves(independence.names_of_state(self._state, whole))
        counts = [len(self._parts[x]) if x else len(self._of_server) for x in owners]
        if [len(x) for x in found.values()] != counts:
            raise ValueError(
                f"The state of an optimizer cannot be saved: it has {list(slots)} in one place, "
                f"but other arrays on servers: { {name: len(x) for name, x in found.items()} }. "
                f"Its transformation reads the names of Variables, which are numbers on servers. "
                f"Save only the Variables."
            )
        for owner, (name, slot) in zip(owners, slots.items(), strict=True):
            found[name].sort(key=lambda x: x[0])
            slot.places = [place for _, place, _ in found[name]]
            slot.starts = self._find_starts(
                owner, name, slot, [shape for _, _, shape in found[name]]
            )
        return slots

    def _find_starts(
        self, owner: str, name: str, slot: Slot, shapes: list[tuple[int, ...]]
    ) -> list[int] | None:
        parts = self._parts.get(owner, [])
        if all(shape == slot.shape for shape in shapes):
            return None
        num_rows = [part.shape[0] for part in parts]
        if shapes != [part.shape for part in parts] or slot.shape[:1] != (sum(num_rows),):
            raise ValueError(
                f"The state of an optimizer cannot be saved: {name} in it has the shapes {shapes} "
                f"for parts of a Variable, but {slot.shape} for the complete Variable. It must "
                f"have one element per element of the Variable, or be the same for all parts. "
                f"Create the Variable without a partitioner."
            )
        return np.cumsum(num_rows[:-1]).tolist()


def _name(path: Any, names: Mapping[str, str] | None = None) -> str:
    """The name of an array of a state, with those of variables for `names` in it."""
    keys = [getattr(key, "key", None) for key in path]
    known = [i for i, key in enumerate(keys) if names and isinstance(key, str) and key in names]
    if names and known:  # the first, as in `names_of_state`
        path = list(path)
        path[known[0]] = jax.tree_util.DictKey(names[str(keys[known[0]])])
    return jax.tree_util.keystr(path)
