"""The plan of a step: which flat inputs it is fed and overwrites, and where its outputs go."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from tpudist.array_types import PyTree
from tpudist.context.weak_identity import WeakIdentitySet
from tpudist.lowering import placement
from tpudist.run.arguments import inputs
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.state import nnx_binding
from tpudist.state.nnx_binding import Binding
from tpudist.xla.mesh import ReplicaMesh

_is = operator.is_


class StateSlot(NamedTuple):
    """An array of the state that a step writes back.

    Attributes:
        key: The Variable; or a pair of a leaf of the binding and an array of that leaf.
        position: Position of the input that it replaces.
    """

    key: Any
    position: int

    @property
    def is_variable(self) -> bool:
        """Whether it is a Variable, and not a part of an NNX object."""
        return not isinstance(self.key, tuple)


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """The order of a program's inputs, the inputs that it overwrites, and its new state.

    Values are captured Variables, NNX leaves, arguments and counts of rows; one value may be a
    pytree. Flat inputs are their arrays. JAX donates whole arguments of a jitted function, so the
    inputs that XLA may overwrite, the *donated*, are the first argument, and the *kept* ones the
    second.

    Attributes:
        on_host: Positions of the flat inputs that live in host memory. If they change, a new plan
            is needed.
        state: State to write back, in the order of the program's first outputs.
        written_variables: The captured Variables that are assigned, in that order.
        written_leaves: The NNX leaves that are changed, in that order.
        donated: Positions of the flat inputs that the program overwrites; `kept` has the others.
        take_donated: Returns the donated ones of all flat inputs, and `take_kept` the others.
        places: Shardings of the flat inputs, if replicas span several devices; None for inputs
            whose sharding is not known.
    """

    num_inputs: int
    on_host: list[int]
    state: list[StateSlot]
    written_variables: list[Any]
    written_leaves: list[int]
    donated: list[int]
    kept: list[int]
    take_donated: Callable[[list[Any]], list[Any]]
    take_kept: Callable[[list[Any]], list[Any]]
    places: list[NamedSharding | None]
    # Whether a changed NNX leaf contains a pytree or a PerReplica, and not one array.
    _has_trees: bool
    # Nesting of the values of calls, by the id of their kinds; None if each value is one array. The
    # kinds are stored as well, so that no other object gets the same id.
    _nestings: dict[int, tuple[Kinds, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        values: Sequence[PyTree],
        captured: Sequence[Any],
        written_variables: Collection[Any],
        written_leaves: Collection[int],
        donated_values: Collection[int],
        donates_state: bool,
        mesh: ReplicaMesh,
    ) -> "StepPlan":
        """Returns the plan for the values of a call.

        Args:
            captured: Variables and captured values, which come first in `values`. NNX leaves come
                next.
            donated_values: Positions of values that are donated in addition to old state.
        """
        arrays = jax.tree.leaves(list(values))
        flat = inputs.positions(values)
        variables = [i for i, v in enumerate(captured) if v in written_variables]
        leaves = sorted(written_leaves)
        first = len(captured)
        state = [StateSlot(captured[i], i) for i in variables]
        state += [StateSlot((i, j), at) for i in leaves for j, at in enumerate(flat[first + i])]
        old_state = [*variables, *(first + i for i in leaves)]
        overwritten = [*(old_state if donates_state else []), *donated_values]
        donated = [at for i in overwritten for at in flat[i]]
        kept = sorted(set(range(len(arrays))) - set(donated))
        return cls(
            num_inputs=len(arrays),
            on_host=inputs.positions_on_host(arrays),
            state=state,
            written_variables=[captured[i] for i in variables],
            written_leaves=leaves,
            donated=donated,
            kept=kept,
            take_donated=inputs.make_getter(donated),
            take_kept=inputs.make_getter(kept),
            places=[
                None if placement.is_on_host(x) else inputs.sharding_to_keep(x, mesh)
                for x in arrays
            ]
            if mesh.devices_per_replica > 1
            else [],
            _has_trees=any(
                not isinstance(values[first + i], jax.Array | jax.ShapeDtypeStruct) for i in leaves
            ),
        )

    def flatten(self, values: list[PyTree], kinds: Kinds) -> list[Any] | None:
        """Returns the flat inputs of a call with arguments of these kinds; None if they differ."""
        # By id, because the hash of `Kinds` takes long; calls of one form share one object.
        known = self._nestings.get(id(kinds))
        if known is not None and known[1] is None:
            return values
        # Flattened here, and passed to `jit` flat: both would flatten, and a dict of 300 arrays
        # takes 0.1 ms each time.
        arrays, nesting = jax.tree.flatten(values)
        if known is None:
            # Only the number is compared: the nesting may differ from that of the plan's values,
            # because `jit` gets flat lists.
            if len(arrays) != self.num_inputs:
                return None
            is_flat = len(arrays) == len(values) and all(map(_is, arrays, values))
            self._nestings[id(kinds)] = kinds, None if is_flat else nesting
        elif nesting != known[1]:
            return None
        return arrays

    def structure_for(self, kinds: Kinds) -> Any:
        """Returns the nesting of the values of a call with arguments of these kinds.

        None if each value is one array; `flatten` has been called for these kinds.
        """
        return self._nestings[id(kinds)][1]

    def merge_inputs(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """Returns the flat inputs in the order of the values, from donated and kept ones."""
        values: list[Any] = [None] * (len(self.donated) + len(self.kept))
        for i, x in zip([*self.donated, *self.kept], [*donated, *kept], strict=True):
            values[i] = x
        return values

    def unshare(self, donated: list[Any], kept: Sequence[Any], protected: WeakIdentitySet) -> None:
        """Replaces donated arrays that are shared or protected by copies, in place.

        `protected` are the Variables whose arrays the user has read.
        """
        # XLA:CPU crashes on a buffer that is donated twice, and a kept input must stay readable.
        if len({*map(id, donated), *map(id, kept)}) != len(donated) + len(kept):
            seen = set(map(id, kept))
            for i, x in enumerate(donated):
                if id(x) in seen and isinstance(x, jax.Array):
                    donated[i] = x.copy()
                seen.add(id(x))
        if protected:
            # An array that the user took out of an NNX object is not protected. `missing_arrays`
            # explains the error if it is used after the step has overwritten it.
            for key, position in self.state:
                if key in protected and position in self.donated:
                    at = self.donated.index(position)
                    donated[at] = donated[at].copy()

    def write_back(
        self, written: list[Any], binding: Binding | None, protected: WeakIdentitySet
    ) -> None:
        """Assigns `written`, new state in the order of `state`, to Variables and NNX objects.

        Removes the assigned Variables from `protected`: the user has not read the new arrays.
        """
        variables = self.written_variables
        for v, value in zip(variables, written, strict=False):
            v._value = value
        if protected:
            protected.difference_update(variables)
        if self.written_leaves:
            assert binding is not None, "the leaves belong to its objects"
            rest = written[len(variables) :]
            if self._has_trees:
                raw = binding.values()
                structure = jax.tree.structure([raw[i] for i in self.written_leaves])
                rest = structure.unflatten(rest)
            nnx_binding.write([binding.variables[i] for i in self.written_leaves], rest)

    def shardings(
        self, arrays: Sequence[Any], stacked: Sequence[bool], mesh: ReplicaMesh
    ) -> dict[str, Any]:
        """Returns the shardings of inputs and outputs, as keyword arguments of `jit`.

        `stacked` says for each flat input whether it has one part per replica.
        """
        options: dict[str, Any] = {}
        if mesh.devices_per_replica == 1:
            # Explicit, and not inferred from the arguments: an input on another device would
            # compile the program once more.
            shardings = [
                placement.match_memory(x, mesh.stacked if s else mesh.replicated)
                for x, s in zip(arrays, stacked, strict=True)
            ]
            options["in_shardings"] = (self.take_donated(shardings), self.take_kept(shardings))
        written = [slot.position for slot in self.state]
        if mesh.devices_per_replica > 1 or any(placement.is_on_host(arrays[k]) for k in written):
            # New state keeps the sharding and memory of the old one, so that the next call finds
            # this program in the cache of `jit`.
            options["out_shardings"] = (
                [inputs.sharding_to_keep(arrays[k], mesh) for k in written],
                None,
            )
        return options
