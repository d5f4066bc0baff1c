"""ServerOptimizer: an Optax transformation and its state, where the variables are.

What it updates together is one compiled program. Where a gradient is of some rows only, those rows
and the rows of the state that belong to them are taken, updated and put back; no other row is read
or written, so momenta of the others do not decay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpudist.array_types import PyTree
from tpudist.ps import independence
from tpudist.ps.changes import Gradients

MIN_ROWS = 64
"""The least number of rows that a program is compiled for; then twice as many, and so on."""


class ServerOptimizer:
    """Updates variables of one server."""

    def __init__(self, tx: optax.GradientTransformation):
        """Without state yet: each set of variables that are updated together has its own."""
        self._tx = tx
        self.states: dict[tuple[int, ...], PyTree] = {}
        self._update = jax.jit(self._compute)
        self._update_in_place = jax.jit(self._compute, donate_argnums=(0, 2))

    def begin(self, numbers: tuple[int, ...], values: Sequence[jax.Array]) -> PyTree:
        """The state of some variables, which is made, and not kept yet, if there is none.

        Raises:
            ValueError: Some of them are updated together with others.
        """
        found = self.states.get(numbers)
        if found is None:
            for others in self.states:
                if set(others) & set(numbers):
                    raise ValueError(
                        f"apply_gradients was first called for variables {others} of a server, "
                        f"but now for {numbers}. Pass all trained Variables in each call, in the "
                        f"same order."
                    )
            found = self._tx.init(_by_name(numbers, values))
            # What is donated must not be shared, as zeros of one shape may be.
            found = jax.tree.map(lambda x: jnp.array(x, copy=True), found)
        return found

    def apply(
        self,
        gradients: Gradients,
        values: Sequence[jax.Array],
        state: PyTree,
        viewed: Collection[int],
        *,
        in_place: bool,
    ) -> tuple[list[jax.Array], PyTree]:
        """What the variables hold then, and the state of the optimizer.

        Args:
            gradients: Of variables that this server has.
            values: What they hold now.
            state: Of the optimizer.
            viewed: The numbers of those that others may read, which are not overwritten.
            in_place: Whether the state and the others may be.
        """
        numbers = gradients.variables
        dense, rows = {}, {}
        changed = zip(numbers, gradients.values, gradients.indices, strict=True)
        for i, (number, gradient, indices) in enumerate(changed):
            if indices is None:
                dense[str(number)] = gradient
            else:
                rows[str(number)] = _find_rows(np.asarray(indices), gradient, values[i].shape[0])
        free = [i for i, number in enumerate(numbers) if number not in viewed]
        kept = [i for i, number in enumerate(numbers) if number in viewed]
        update = self._update_in_place if in_place else self._update
        new, new_state = update(
            *({str(numbers[i]): values[i] for i in some} for some in (free, kept)),
            state,
            dense,
            rows,
        )
        return [new[str(number)] for number in numbers], new_state

    def _compute(
        self,
        free: dict[str, jax.Array],
        kept: dict[str, jax.Array],
        state: PyTree,
        dense: dict[str, jax.Array],
        rows: dict[str, tuple[jax.Array, jax.Array, jax.Array]],
    ) -> tuple[dict[str, jax.Array], PyTree]:
        parameters = free | kept
        names = independence.names_of_state(state, parameters)
        gradients = dense | {
            n: jax.ops.segment_sum(values, segments, len(where))
            for n, (where, values, segments) in rows.items()
        }

        def take(x: jax.Array, name: str) -> jax.Array:
            if name not in rows:
                return x
            return x.at[rows[name][0]].get(mode="fill", fill_value=1, unique_indices=True)

        def put(old: jax.Array, new: jax.Array, name: str) -> jax.Array:
            if name not in rows:
                return new
            return old.at[rows[name][0]].set(new, mode="drop", unique_indices=True)

        some = {n: take(x, n) for n, x in parameters.items()}
        updates, new_state = self._tx.update(gradients, jax.tree.map(take, state, names), some)
        changed: Any = optax.apply_updates(some, updates)
        values = {n: put(x, changed[n], n) for n, x in parameters.items()}
        return values, jax.tree.map(put, state, new_state, names)


def _find_rows(
    indices: np.ndarray, values: Any, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of which each is there once, values, and to which of the rows each value is added.

    Their numbers are filled up to powers of two, so that few programs are compiled: with rows that
    are past the last one, to which nothing is added, and with values that are added to none.
    """
    indices, values = indices.reshape(-1), np.asarray(values)
    unique, inverse = np.unique(indices, return_inverse=True)
    size, length = _round_up(len(unique)), _round_up(len(indices))
    where = np.concatenate([unique, num_rows + np.arange(size - len(unique))]).astype(np.int32)
    segments = np.full(length, size, np.int32)
    segments[: len(indices)] = inverse
    filled = np.empty((length, *values.shape[1:]), values.dtype)
    filled[: len(indices)] = values
    return where, filled, segments


def _round_up(count: int) -> int:
    return max(MIN_ROWS, 1 << max(count - 1, 0).bit_length())


def check_transformation(
    tx: optax.GradientTransformation,
    parameters: Mapping[str, Any],
    names: Mapping[str, str],
    parts: Mapping[str, int],
) -> None:
    """Refuses a transformation that would do something else on servers than in one place.

    Args:
        tx: The transformation.
        parameters: The variables, or their shapes and dtypes, by a key of each.
        names: Of the variables.
        parts: In how many parts they are, of those that are in several.

    Raises:
        ValueError: It looks at several variables, or at all of one that is in several parts.
    """
    found = independence.prove(tx, parameters)
    if found.mixed:
        several = ", ".join(f"'{names[x]}'" for x in found.mixed[:3])
        raise ValueError(
            f"Optimizer: in this transformation, the update of one variable depends on others "
            f"({several}), as with optax.clip_by_global_norm. Servers do not see each other's "
            f"gradients. Clip each gradient separately (optax.clip), or all of them before "
            f"apply_gradients: grads, _ = optax.clip_by_global_norm(1.0).update(grads, "
            f"optax.EmptyState())."
        )
    for key in found.whole:
        if key in parts:
            raise ValueError(
                f"Optimizer: in this transformation, the update of an element of variable "
                f"'{names[key]}' depends on its other elements, but the variable is in "
                f"{parts[key]} parts on servers. Use an elementwise transformation, such as "
                f"optax.adam, or create the variable without a partitioner."
            )


def _by_name(numbers: Sequence[int], values: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return {str(n): x for n, x in zip(numbers, values, strict=True)}
