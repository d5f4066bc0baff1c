"""RowOptimizer: Optax on some rows of a table, each of which is a parameter of its own.

Init and update of an Optax transformation are mapped over rows, so that no row can see another one,
and all that is kept has a row for each row of the table. Three things follow from it. Counts are
those of a row: the bias correction of Adam is right for a row that is seldom seen, and a schedule
goes on with the updates of a row. What clips by a global norm clips by the norm of a row. And a row
that is not touched stays as it is, without decay or momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpudist.array_types import PyTree
from tpudist.programs import jaxprs

_DRAW = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}


class Rows(NamedTuple):
    """Rows of a table, and what an optimizer keeps of them."""

    values: Any
    """`[row, dim]`."""
    slots: PyTree
    """Of arrays `[row, ...]`."""


@dataclass(frozen=True)
class RowOptimizer:
    """A transformation of Optax's that is applied to each row by itself, in float32.

    Two of the same transformation are equal, and share what was compiled.

    Raises:
        TypeError: It is no transformation.
        ValueError: It draws random numbers, which would be the same ones for all rows.
    """

    transformation: optax.GradientTransformation

    def __post_init__(self) -> None:
        if not isinstance(self.transformation, optax.GradientTransformation):
            raise TypeError(
                f"The optimizer of a table is {self.transformation!r} of type "
                f"{type(self.transformation).__name__}, but must be an Optax transformation. Pass "
                f"one, such as optax.adagrad(0.1)."
            )
        row = jax.ShapeDtypeStruct((2,), jnp.float32)
        closed = jax.make_jaxpr(self._change)(row, jax.eval_shape(self.init, row), row)
        if any(eqn.primitive.name in _DRAW for eqn in jaxprs.walk(closed)):
            raise ValueError(
                "The optimizer of a table draws random numbers. Each row has its own state with "
                "the same initial key, so all rows would draw the same numbers. Remove the noise "
                "from the optimizer, and add it to the gradients before you push them."
            )

    def init(self, value: jax.Array) -> PyTree:
        """What is kept of a new row `[dim]`."""
        return self.transformation.init(value.astype(jnp.float32))

    def update(self, table: Rows, indices: jax.Array, gradients: jax.Array) -> Rows:
        """The table after gradients `[n, dim]` of rows `indices`, of which none is there twice.

        Indices past the end have no effect. For `jax.jit`, which is given `table` to overwrite.
        """
        rows = gather(table, indices)
        changes, slots = jax.vmap(self._change)(rows.values, rows.slots, gradients)
        slots = scatter(table.slots, indices, slots)
        if table.values.dtype == changes.dtype:  # the same sums, and XLA need not gather the rows
            values = table.values.at[indices].add(changes, mode="drop", unique_indices=True)
        else:
            values = scatter(table.values, indices, rows.values + changes)
        return Rows(values, slots)

    def _change(
        self, value: jax.Array, slots: PyTree, gradient: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        row = value.astype(jnp.float32)
        change: Any
        change, slots = self.transformation.update(gradient.astype(jnp.float32), slots, row)
        return change, slots


def gather(table: PyTree, indices: jax.Array) -> PyTree:
    """The rows at `indices` of each array; for those past the end the last one."""
    return jax.tree.map(lambda x: x.at[indices].get(mode="clip"), table)


def scatter(table: PyTree, indices: jax.Array, rows: PyTree) -> PyTree:
    """The arrays with `rows` at `indices`, all of which differ; those past the end are left out."""
    return jax.tree.map(
        lambda x, y: x.at[indices].set(y.astype(x.dtype), mode="drop", unique_indices=True),
        table,
        rows,
    )
