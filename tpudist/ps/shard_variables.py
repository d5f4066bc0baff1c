"""ShardVariables: the variables of one server, and the optimizers that update them.

Each array has a version. Readers get the arrays themselves, so an array that was read is never
overwritten; an array that nobody has read is updated in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist.array_types import PyTree
from tpudist.ps.changes import Assignment, Gradients, RowChange
from tpudist.ps.server_optimizer import ServerOptimizer
from tpudist.state import scatter_updates

VERSIONS_PER_INCARNATION = 1 << 40
"""Number of updates that no server survives."""


class ShardVariables:
    """Arrays in host memory, by the number of their variable.

    Args:
        server: Number of the server, for messages.
        incarnation: Number of the server's predecessors.
    """

    def __init__(self, server: int, incarnation: int):
        self._server = server
        self._device = jax.local_devices(backend="cpu")[0]
        self._values: dict[int, jax.Array] = {}
        self._names: dict[int, str] = {}
        self._constraints: dict[int, Callable[[jax.Array], jax.Array]] = {}
        self._versions: dict[int, int] = {}
        # Each incarnation has its own versions, so that a worker's copy from an earlier server
        # never looks current.
        self._next_version = itertools.count(incarnation * VERSIONS_PER_INCARNATION)
        # Variables whose arrays a reader may still have. Only arrays from `pull` outlive the call
        # that returns them.
        self._viewed: set[int] = set()
        self._optimizers: dict[int, ServerOptimizer] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(x.nbytes for x in self._values.values())

    def add(self, number: int, name: str, value: np.ndarray) -> None:
        """Adds a variable with an initial value."""
        # A copy, because CPU arrays may share the memory of NumPy, and arrays are donated. Not
        # committed to the device, so that a worker of this process can copy it to its own.
        with jax.default_device(self._device):
            self._values[number] = jnp.array(value, copy=True)
        self._names[number] = name
        self._versions[number] = next(self._next_version)

    def constrain(self, number: int, constraint: Callable[[jax.Array], jax.Array]) -> None:
        """Applies a function to a variable after each update by an optimizer."""
        self._constraints[number] = constraint

    def define_optimizers(
        self, transformations: Mapping[int, optax.GradientTransformation]
    ) -> None:
        """Adds optimizers, by number, that are not known yet."""
        for number, tx in transformations.items():
            if number not in self._optimizers:
                self._optimizers[number] = ServerOptimizer(tx)

    def clear(self) -> None:
        """Removes all variables and all states of optimizers."""
        for values in (self._values, self._names, self._versions):
            values.clear()
        self._viewed.clear()
        for optimizer in self._optimizers.values():
            optimizer.states.clear()

    # Reading.

    def pull(self, versions: Mapping[int, int]) -> dict[int, tuple[int, jax.Array]]:
        """Returns versions and values of variables whose version differs from the given one.

        The values may still be computed, by updates that the server has started.
        """
        arrays = {}
        for number, known in versions.items():
            if (version := self._versions[number]) != known:
                self._viewed.add(number)
                arrays[number] = version, self._values[number]
        return arrays

    def pull_rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Returns some rows of a variable: `[*indices.shape, ...]`."""
        return np.take(np.asarray(self._values[number]), indices, axis=0)

    def values(self) -> Iterator[tuple[int, str, np.ndarray]]:
        """Yields number, name and value of each variable."""
        for number, value in self._values.items():
            yield number, self._names[number], np.asarray(value)

    def states(self) -> Iterator[tuple[int, tuple[int, ...], list[np.ndarray]]]:
        """Yields number of an optimizer, variables that it updates together, and their state."""
        for number, optimizer in self._optimizers.items():
            for variables, state in optimizer.states.items():
                yield number, variables, [np.asarray(x) for x in jax.tree.leaves(state)]

    def variables_of_optimizer(self, optimizer: int) -> list[tuple[int, ...]]:
        """Returns the groups of variables that an optimizer updates together."""
        return list(self._optimizer(optimizer).states)

    def state(self, optimizer: int, variables: tuple[int, ...]) -> list[np.ndarray]:
        """Returns copies of an optimizer's state for a group of variables, or of its initial state.

        Raises:
            ValueError: If the optimizer updates some of them together with others.
        """
        with jax.default_device(self._device):
            values = [self._values[n] for n in variables]
            state = self._optimizer(optimizer).begin(variables, values)
            return [np.array(x) for x in jax.tree.leaves(state)]

    def restore_state(
        self, optimizer: int, variables: tuple[int, ...], leaves: Sequence[np.ndarray]
    ) -> None:
        """Replaces the state of an optimizer for a group of variables."""
        with jax.default_device(self._device):
            owner = self._optimizer(optimizer)
            state = owner.begin(variables, [self._values[n] for n in variables])
            arrays = [jnp.array(x, copy=True) for x in leaves]
            owner.states[variables] = jax.tree.unflatten(jax.tree.structure(state), arrays)

    # Changing.

    def apply(self, changes: Sequence[Assignment | RowChange | Gradients]) -> None:
        """Applies all changes in their order, or none of them if one raises an error."""
        new: dict[int, jax.Array] = {}
        states: dict[tuple[int, tuple[int, ...]], PyTree] = {}

        def current(number: int) -> jax.Array:
            return new[number] if number in new else self._values[number]

        with jax.default_device(self._device):
            for i, change in enumerate(changes):
                # Only the last change may overwrite arrays: if a later one fails, `_values` must
                # still be intact. If the last one fails, it does while it is traced, before XLA
                # overwrites anything.
                is_last = i == len(changes) - 1
                if isinstance(change, Gradients):
                    # Arrays in `new` were created here, so nobody has seen them; also below.
                    viewed = self._viewed - new.keys()
                    new |= self._update(change, current, viewed, states, is_last)
                elif isinstance(change, RowChange):
                    number = change.variable
                    is_viewed = number in self._viewed and number not in new
                    apply = _apply_in_place if is_last and not is_viewed else _apply
                    arrays = jnp.asarray(change.indices), jnp.asarray(change.values)
                    new[number] = apply(change.op, current(number), *arrays)
                else:
                    number = change.variable
                    new[number] = jnp.array(change.apply(current(number)), copy=True)
        # Everything has succeeded: make the new values visible. Nothing below can raise.
        for (optimizer, numbers), state in states.items():
            self._optimizers[optimizer].states[numbers] = state
        for number, value in new.items():
            self._viewed.discard(number)
            self._values[number] = value
            self._versions[number] = next(self._next_version)

    def _update(
        self,
        change: Gradients,
        current: Callable[[int], jax.Array],
        viewed: set[int],
        states: dict[tuple[int, tuple[int, ...]], PyTree],
        is_last: bool,
    ) -> dict[int, jax.Array]:
        """Returns variables after an update by an optimizer; adds its new state to `states`."""
        numbers = change.variables
        optimizer, values = self._optimizer(change.optimizer), [current(n) for n in numbers]
        key = change.optimizer, numbers
        state = states[key] if key in states else optimizer.begin(numbers, values)
        # A constraint is a user's function and may raise after the update, so nothing may have been
        # overwritten by then.
        constrained = self._constraints.keys() & set(numbers)
        after, states[key] = optimizer.apply(
            change, values, state, viewed, in_place=is_last and not constrained
        )
        return {
            n: self._constraints[n](x) if n in constrained else x
            for n, x in zip(numbers, after, strict=True)
        }

    def _optimizer(self, number: int) -> ServerOptimizer:
        if number not in self._optimizers:
            raise ValueError(
                f"Server {self._server} cannot apply gradients of optimizer {number}, which the "
                f"program has not created (yet). Create all optimizers in the strategy's scope, "
                f"in the same order in each run, before you read or schedule."
            )
        return self._optimizers[number]


_apply = jax.jit(scatter_updates.apply_slices, static_argnums=0)
_apply_in_place = jax.jit(scatter_updates.apply_slices, static_argnums=0, donate_argnums=1)
