"""Which flat inputs a step is fed and overwrites, and where what it writes goes back to."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from tpudist.context.weak_identity import WeakIdentitySet
from tpudist.lowering import placement
from tpudist.run.arguments import inputs
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.state import nnx_binding
from tpudist.state.nnx_binding import Binding
from tpudist.xla.mesh import ReplicaMesh

_is = operator.is_


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """How the values of a call become the inputs of its program, and its outputs state again.

    Values are captured Variables, NNX leaves, arguments and counts of rows; one may be a whole
    pytree. Flat inputs are their arrays. XLA wants those that it may overwrite, the *donated*, as
    an argument of their own: they come first, the *kept* behind them.

    Attributes:
        num_inputs: How many flat inputs there are.
        on_host: The flat inputs that live in host memory. If they are others the plan is void.
        state: What is written back, in the order of the program's first outputs: ("variable",
            Variable, position of its input) or ("nnx", (leaf, array of the leaf), position).
        written_variables: The captured Variables that are assigned, in that order.
        written_leaves: The NNX leaves that are changed, in that order.
        donated: The positions of the donated inputs.
        kept: The positions of the others.
        take_donated: Takes the donated from all flat inputs.
        take_kept: Takes the others.
        places: Of the flat inputs, where replicas span devices: the shardings, None if not known.
    """

    num_inputs: int
    on_host: list[int]
    state: list[tuple[str, Any, int]]
    written_variables: list[Any]
    written_leaves: list[int]
    donated: list[int]
    kept: list[int]
    take_donated: Callable[[list[Any]], list[Any]]
    take_kept: Callable[[list[Any]], list[Any]]
    places: list[Any]
    # Whether an NNX leaf that is changed holds a pytree or a PerReplica, and not one array.
    _holds_trees: bool
    # How the values of calls are nested, by the id of their kinds, which are kept for that; None
    # where each value is one array.
    _nestings: dict[int, tuple[Kinds, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        values: Sequence[Any],
        captured: Sequence[Any],
        written_variables: Collection[Any],
        written_leaves: Collection[int],
        donated_values: Collection[int],
        donates_state: bool,
        mesh: ReplicaMesh,
    ) -> "StepPlan":
        """The plan for these values.

        Args:
            values: See the class.
            captured: The Variables that are the first of them; NNX leaves come next.
            written_variables: Those that the step assigns.
            written_leaves: The NNX leaves that it changes.
            donated_values: Positions of values that are given to XLA beside old state.
            donates_state: Whether old state is given to XLA.
            mesh: The replicas.
        """
        arrays = jax.tree.leaves(list(values))
        flat = inputs.positions(values)
        variables = [i for i, v in enumerate(captured) if v in written_variables]
        leaves = sorted(written_leaves)
        first = len(captured)
        state: list[tuple[str, Any, int]] = [("variable", captured[i], i) for i in variables]
        state += [("nnx", (i, j), at) for i in leaves for j, at in enumerate(flat[first + i])]
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
            _holds_trees=any(not hasattr(values[first + i], "sharding") for i in leaves),
        )

    def flatten(self, values: list[Any], kinds: Kinds) -> list[Any] | None:
        """The flat inputs of a call with arguments of these kinds; None if they do not fit."""
        known = self._nestings.get(id(kinds))
        if known is not None and known[1] is None:
            return values
        # Once: `jit` would do it again, and a dict of 300 arrays takes 0.1 ms each time.
        arrays, nesting = jax.tree.flatten(values)
        if known is None:
            if len(arrays) != self.num_inputs:
                return None
            is_flat = len(arrays) == len(values) and all(map(_is, arrays, values))
            self._nestings[id(kinds)] = kinds, None if is_flat else nesting
        elif nesting != known[1]:
            return None
        return arrays

    def merge_inputs(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """The flat inputs, of donated and kept ones."""
        values: list[Any] = [None] * (len(self.donated) + len(self.kept))
        for i, x in zip([*self.donated, *self.kept], [*donated, *kept], strict=True):
            values[i] = x
        return values

    def unshare(self, donated: list[Any], kept: Sequence[Any], protected: WeakIdentitySet) -> None:
        """Copies what must not be overwritten: values in two places, or read by the user.

        Args:
            donated: The inputs that the program overwrites; changed in place.
            kept: The others.
            protected: The Variables whose arrays the user has.
        """
        # XLA:CPU crashes on a buffer that is donated twice.
        if len({*map(id, donated), *map(id, kept)}) != len(donated) + len(kept):
            seen = set(map(id, kept))
            for i, x in enumerate(donated):
                if id(x) in seen and isinstance(x, jax.Array):
                    donated[i] = x.copy()
                seen.add(id(x))
        if protected:
            for kind, what, position in self.state:
                if kind == "variable" and what in protected and position in self.donated:
                    at = self.donated.index(position)
                    donated[at] = donated[at].copy()

    def write_back(
        self, written: list[Any], binding: Binding | None, protected: WeakIdentitySet
    ) -> None:
        """Makes Variables and NNX objects hold what the program has written.

        Args:
            written: Its first outputs, in the order of `state`.
            binding: The NNX objects.
            protected: The Variables whose arrays the user has: not the new ones.
        """
        variables = self.written_variables
        for v, value in zip(variables, written, strict=False):
            v._value = value
        if protected:
            protected.difference_update(variables)  # nobody has read the new arrays
        if self.written_leaves:
            assert binding is not None, "they belong to the objects that it holds"
            rest = written[len(variables) :]
            if self._holds_trees:
                raw = binding.values()
                held = jax.tree.structure([raw[i] for i in self.written_leaves])
                rest = held.unflatten(rest)
            nnx_binding.write([binding.variables[i] for i in self.written_leaves], rest)

    def shardings(
        self, arrays: Sequence[Any], stacked: Sequence[bool], mesh: ReplicaMesh
    ) -> dict[str, Any]:
        """Where inputs and outputs lie, as keyword arguments of `jit`.

        Args:
            arrays: The flat inputs.
            stacked: Which of them hold one part per replica.
            mesh: The replicas.
        """
        options: dict[str, Any] = {}
        if mesh.devices_per_replica == 1:
            # Said, and not taken from the arguments: an input that lies elsewhere would compile the
            # program once more.
            where = [
                placement.match_memory(x, mesh.stacked if s else mesh.replicated)
                for x, s in zip(arrays, stacked, strict=True)
            ]
            options["in_shardings"] = (self.take_donated(where), self.take_kept(where))
        written = [position for _, _, position in self.state]
        if mesh.devices_per_replica > 1 or any(placement.is_on_host(arrays[k]) for k in written):
            # New state stays where the old one was, so that the next call finds this program.
            options["out_shardings"] = (
                [inputs.sharding_to_keep(arrays[k], mesh) for k in written],
                None,
            )
        return options
