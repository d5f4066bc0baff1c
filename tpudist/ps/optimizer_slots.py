"""OptimizerSlots: the state of an optimizer on all servers, as one state for a checkpoint.

Each server has the state for its variables, and parts of variables. Rows of the complete state are
joined and divided like the rows of the variables. Arrays that belong to no variable, such as the
count of steps, are the same on all servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from tpudist.array_types import PyTree, Shape
from tpudist.ps import independence
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
        starts: First rows of the parts after the first; None if each place has all of it.
    """

    shape: Shape
    dtype: DTypeLike
    places: list[Place] = dataclasses.field(default_factory=list)
    starts: list[int] | None = None


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
        self._of_server: dict[int, list[tuple[str, ServerVariable]]] = {}
        for name, parts in self._parts.items():
            for part in parts:
                self._of_server.setdefault(part.home.server, []).append((name, part))
        self._check_groups()
        # The state as it would be in one place, only as shapes.
        whole = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in variables.items()}
        self._state = jax.eval_shape(tx.init, whole)
        self._slots = self._find_slots(tx, whole)
        self._arrays: dict[int, list[np.ndarray]] | None = None

    def tree(self, sharding: jax.sharding.Sharding) -> PyTree:
        """Returns the state, with arrays of a checkpoint that are restored to `sharding` first."""
        arrays = ArraysInCheckpoint(self)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: arrays.array(_name(path), x.shape, x.dtype, sharding), self._state
        )

    def read(self, key: Hashable) -> np.ndarray:
        """Returns one array of the state.

        Raises:
            ValueError: If servers disagree about an array that each of them has.
        """
        if self._arrays is None:  # one call per server, so that its arrays are consistent
            self._arrays = {
                server: self._servers.read_optimizer(server, self._number, self._numbers(server))
                for server in self._of_server
            }
        slot = self._slots[str(key)]
        parts = [self._arrays[server][index] for server, index in slot.places]
        if slot.starts is not None:
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

    def _check_groups(self) -> None:
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
        self, tx: optax.GradientTransformation, whole: Mapping[str, jax.ShapeDtypeStruct]
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
        # A server names variables by their numbers, and has a part where the complete state has a
        # variable. So each leaf of a server's state is matched by its name; `ranks` orders parts.
        found: dict[str, list[tuple[int, Place, Shape]]] = {name: [] for name in slots}
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
        self, owner: str, name: str, slot: Slot, shapes: list[Shape]
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


def _name(path: jax.tree_util.KeyPath, names: Mapping[str, str] | None = None) -> str:
    """Returns the name of a leaf by its path, with names of variables replaced by `names`."""
    for i, key in enumerate(path):
        if names and isinstance(key, jax.tree_util.DictKey) and key.key in names:
            # Only the first, as in `names_of_state`.
            path = (*path[:i], jax.tree_util.DictKey(names[key.key]), *path[i + 1 :])
            break
    return jax.tree_util.keystr(path)
