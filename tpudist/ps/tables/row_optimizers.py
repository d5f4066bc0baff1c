"""RowOptimizer: an Optax transformation that updates each row of a table separately.

Init and update of the transformation are mapped over rows, so that no row affects another one, and
all state has a row per row of the table. Three consequences:

- Counts are per row: the bias correction of Adam is right for rare rows, and a schedule advances
  with the updates of its row.
- Clipping by the global norm clips by the norm of the row.
- A row without a gradient does not change, neither by decay nor by momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpudist.array_types import PyTree
from tpudist.programs import jaxprs

# Primitives of JAX that draw random numbers.
_DRAW = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}


class Rows(NamedTuple):
    """Rows of a table, and their state of the optimizer."""

    values: Any  # jax.Array, np.ndarray or jax.ShapeDtypeStruct
    """`[row, dim]`."""
    slots: PyTree
    """Pytree of arrays `[row, ...]`."""


@dataclass(frozen=True)
class RowOptimizer:
    """An Optax transformation that is applied to each row separately, in float32.

    Two of the same transformation are equal, and share compiled programs.

    Raises:
        TypeError: If `transformation` is not an Optax transformation.
        ValueError: If it draws random numbers, which would be the same for all rows.
    """

    transformation: optax.GradientTransformation

    def __post_init__(self) -> None:
        if not isinstance(self.transformation, optax.GradientTransformation):
            raise TypeError(
                f"The optimizer of a table is {self.transformation!r} of type "
                f"{type(self.transformation).__name__}, but must be an Optax transformation. Pass "
                f"one, such as optax.adagrad(0.1)."
            )
        # Traced once with a small row, only to look for random numbers in the program.
        row = jax.ShapeDtypeStruct((2,), jnp.float32)
        closed = jax.make_jaxpr(self._update)(row, jax.eval_shape(self.init, row), row)
        if any(eqn.primitive.name in _DRAW for eqn in jaxprs.walk(closed)):
            raise ValueError(
                "The optimizer of a table draws random numbers. Each row has its own state with "
                "the same initial key, so all rows would draw the same numbers. Remove the noise "
                "from the optimizer, and add it to the gradients before you push them."
            )

    def init(self, value: jax.Array) -> PyTree:
        """Returns the state of a new row `[dim]`."""
        return self.transformation.init(value.astype(jnp.float32))

    def update(self, table: Rows, indices: jax.Array, gradients: jax.Array) -> Rows:
        """Returns the table after updates of distinct rows `indices` by gradients `[n, dim]`.

        Indices beyond the end have no effect. Call it in `jax.jit`, which donates `table`.
        """
        rows = gather(table, indices)
        updates, slots = jax.vmap(self._update)(rows.values, rows.slots, gradients)
        slots = scatter(table.slots, indices, slots)
        if table.values.dtype == updates.dtype:
            # The same sums as below, but the memory is touched once.
            values = table.values.at[indices].add(updates, mode="drop", unique_indices=True)
        else:
            values = scatter(table.values, indices, rows.values + updates)
        return Rows(values, slots)

    def _update(
        self, value: jax.Array, slots: PyTree, gradient: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        row = value.astype(jnp.float32)
        update: Any
        update, slots = self.transformation.update(gradient.astype(jnp.float32), slots, row)
        return update, slots


def gather(table: PyTree, indices: jax.Array) -> PyTree:
    """Returns the rows at `indices` of each array; indices beyond the end read the last row."""
    return jax.tree.map(lambda x: x.at[indices].get(mode="clip"), table)


def scatter(table: PyTree, indices: jax.Array, rows: PyTree) -> PyTree:
    """Returns the arrays with `rows` at distinct `indices`; indices beyond the end are dropped."""
    return jax.tree.map(
        lambda x, y: x.at[indices].set(y.astype(x.dtype), mode="drop", unique_indices=True),
        table,
        rows,
    )
