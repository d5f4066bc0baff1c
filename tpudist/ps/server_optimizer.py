"""ServerOptimizer: an Optax transformation and its state, on the server of the variables.

The variables that it updates together are one compiled program. If a gradient has only some rows,
those rows and the corresponding rows of the state are gathered, updated and scattered. No other row
is read or written, so the momenta of other rows do not decay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from tpudist.array_types import PyTree
from tpudist.ps import independence
from tpudist.ps.changes import Gradients
from tpudist.ps.independence import HasShape, name_on_server

MIN_ROWS = 64
"""Smallest number of rows for which a program is compiled. Larger numbers are rounded up to powers
of two, so that few programs are compiled."""


class _RowGradient(NamedTuple):
    """A gradient of some rows of a variable.

    Attributes:
        rows: Distinct rows `[rows]`; padding is beyond the last row of the variable.
        values: Gradients `[values, ...]`.
        groups: Index in `rows` for each of `values`, int32 `[values]`; `len(rows)` for padding.
    """

    rows: Any  # np.ndarray, or jax.Array in the compiled program; also the others
    values: Any
    groups: Any


class ServerOptimizer:
    """Updates variables of one server.

    Args:
        tx: Transformation of the optimizer.

    Attributes:
        states: States of the optimizer, by the group of variables that it updates together.
    """

    def __init__(self, tx: optax.GradientTransformation):
        self._tx = tx
        self.states: dict[tuple[int, ...], PyTree] = {}
        # Donating saves a copy of all states and values, but makes the old ones unusable.
        self._update = jax.jit(self._compute)
        self._update_in_place = jax.jit(self._compute, donate_argnums=(0, 2))

    def begin(self, numbers: tuple[int, ...], values: Sequence[jax.Array]) -> PyTree:
        """Returns the state of a group of variables, or a new one, which is not stored.

        Raises:
            ValueError: If the optimizer updates some of them together with others.
        """
        state = self.states.get(numbers)
        if state is None:
            for others in self.states:
                if set(others) & set(numbers):
                    raise ValueError(
                        f"apply_gradients was first called for variables {others} of a server, "
                        f"but now for {numbers}. Pass all trained Variables in each call, in the "
                        f"same order."
                    )
            state = self._tx.init(_by_name(numbers, values))
            # Donated arrays must be distinct, but JAX may share zeros of one shape.
            state = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
        return state

    def apply(
        self,
        gradients: Gradients,
        values: Sequence[jax.Array],
        state: PyTree,
        viewed: Collection[int],
        *,
        in_place: bool,
    ) -> tuple[list[jax.Array], PyTree]:
        """Returns the new values of the variables, and the new state of the optimizer.

        Args:
            gradients: Gradients of variables of this server.
            values: Current values of the variables.
            state: Current state of the optimizer.
            viewed: Variables whose arrays others may read, so that they are not overwritten.
            in_place: Whether the state and all other arrays may be overwritten.
        """
        numbers = gradients.variables
        dense, rows = {}, {}
        changed = zip(numbers, gradients.values, gradients.indices, strict=True)
        for i, (number, gradient, indices) in enumerate(changed):
            if indices is None:
                dense[name_on_server(number)] = gradient
            else:
                rows[name_on_server(number)] = _find_rows(
                    np.asarray(indices), gradient, values[i].shape[0]
                )
        overwritable, shown = {}, {}
        for number, value in zip(numbers, values, strict=True):
            (shown if number in viewed else overwritable)[name_on_server(number)] = value
        update = self._update_in_place if in_place else self._update
        new, new_state = update(overwritable, shown, state, dense, rows)
        return [new[name_on_server(number)] for number in numbers], new_state

    def _compute(
        self,
        overwritable: dict[str, jax.Array],
        shown: dict[str, jax.Array],
        state: PyTree,
        dense: dict[str, jax.Array],
        rows: dict[str, _RowGradient],
    ) -> tuple[dict[str, jax.Array], PyTree]:
        # `overwritable` is donated, and `shown` is not: another thread may read its arrays. So
        # constraints, which may raise, are applied later, by `ShardVariables`.
        parameters = overwritable | shown
        names = independence.names_of_state(state, parameters)
        gradients = dense | {
            n: jax.ops.segment_sum(x.values, x.groups, len(x.rows)) for n, x in rows.items()
        }

        def take(x: jax.Array, name: str) -> jax.Array:
            if name not in rows:
                return x
            # Padding reads 1: a 0 could divide by zero, and the result is dropped anyway.
            return x.at[rows[name].rows].get(mode="fill", fill_value=1, unique_indices=True)

        def put(old: jax.Array, new: jax.Array, name: str) -> jax.Array:
            if name not in rows:
                return new
            return old.at[rows[name].rows].set(new, mode="drop", unique_indices=True)

        selected = {n: take(x, n) for n, x in parameters.items()}
        updates, new_state = self._tx.update(gradients, jax.tree.map(take, state, names), selected)
        changed: Any = optax.apply_updates(selected, updates)
        values = {n: put(x, changed[n], n) for n, x in parameters.items()}
        return values, jax.tree.map(put, state, new_state, names)


def _find_rows(indices: np.ndarray, values: ArrayLike, num_rows: int) -> _RowGradient:
    """Returns a gradient with distinct rows, padded so that few programs are compiled."""
    indices, values = indices.reshape(-1), np.asarray(values)
    # A compiled step does not check indices: updates out of bounds have no effect, as in JAX.
    is_inside = (indices >= 0) & (indices < num_rows)
    if not is_inside.all():
        indices, values = indices[is_inside], values[is_inside]
    # A row with several gradients is updated once, by their sum: momenta must see one gradient.
    unique, inverse = np.unique(indices, return_inverse=True)
    num_unique, num_values = _round_up(len(unique)), _round_up(len(indices))
    beyond = num_rows + np.arange(num_unique - len(unique))
    groups = np.full(num_values, num_unique, np.int32)
    groups[: len(indices)] = inverse
    padded = np.empty((num_values, *values.shape[1:]), values.dtype)
    padded[: len(indices)] = values
    return _RowGradient(np.concatenate([unique, beyond]).astype(np.int32), padded, groups)


def _round_up(count: int) -> int:
    return max(MIN_ROWS, 1 << max(count - 1, 0).bit_length())


def check_transformation(
    tx: optax.GradientTransformation,
    parameters: Mapping[str, HasShape],
    names: Mapping[str, str],
    parts: Mapping[str, int],
) -> None:
    """Checks that a transformation computes the same on servers as in one place.

    Args:
        tx: The transformation.
        parameters: Variables, or their shapes and dtypes, by key.
        names: Names of the variables.
        parts: Numbers of parts of the variables that are in several.

    Raises:
        ValueError: If it combines several variables, or elements of a variable in several parts.
    """
    result = independence.prove_independence(tx, parameters)
    if result.mixed:
        several = ", ".join(f"'{names[x]}'" for x in result.mixed[:3])
        raise ValueError(
            f"Optimizer: in this transformation, the update of one variable depends on others "
            f"({several}), as with optax.clip_by_global_norm. Servers do not see each other's "
            f"gradients. Clip each gradient separately (optax.clip), or all of them before "
            f"apply_gradients: grads, _ = optax.clip_by_global_norm(1.0).update(grads, "
            f"optax.EmptyState())."
        )
    for key in result.whole:
        if key in parts:
            raise ValueError(
                f"Optimizer: in this transformation, the update of an element of variable "
                f"'{names[key]}' depends on its other elements, but the variable is in "
                f"{parts[key]} parts on servers. Use an elementwise transformation, such as "
                f"optax.adam, or create the variable without a partitioner."
            )


def _by_name(numbers: Sequence[int], values: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return {name_on_server(n): x for n, x in zip(numbers, values, strict=True)}
