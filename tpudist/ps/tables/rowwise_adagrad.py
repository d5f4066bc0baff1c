"""Row-wise Adagrad: one accumulator per row of a table."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowwiseAdagradState(NamedTuple):
    """State of a row."""

    sum_of_mean_squares: jax.Array
    """Scalar: sum over all gradients of their mean square."""


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> optax.GradientTransformation:
    """Returns Adagrad for rows of a table, with one accumulator per row instead of one per element.

    Use it only as the optimizer of a table: for a complete variable there would be one accumulator.
    Otherwise it is like `optax.adagrad`. The exact row-wise Adagrad of TorchRec and FBGEMM instead
    adds `eps` after the square root, and its sum starts at 0.

    Args:
        learning_rate: Learning rate, or a schedule over the updates of a row.
        initial_accumulator_value: Initial sum of mean squares.
        eps: Small number that is added to the sum before the square root.
    """

    def init(row: jax.Array) -> RowwiseAdagradState:
        return RowwiseAdagradState(jnp.full((), initial_accumulator_value, row.dtype))

    def update(
        gradient: jax.Array, state: RowwiseAdagradState, row: jax.Array | None = None
    ) -> tuple[jax.Array, RowwiseAdagradState]:
        del row
        total = state.sum_of_mean_squares + jnp.mean(jnp.square(gradient))
        scale = jnp.where(total > 0, jax.lax.rsqrt(total + eps), 0)
        return scale * gradient, RowwiseAdagradState(total)

    scale_by_sum = optax.GradientTransformation(init, update)  # type: ignore[arg-type]
    return optax.chain(scale_by_sum, optax.scale_by_learning_rate(learning_rate))
