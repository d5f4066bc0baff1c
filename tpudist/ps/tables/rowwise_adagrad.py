"""Row-wise Adagrad: one number per row says how large its gradients were."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowwiseAdagradState(NamedTuple):
    """What is kept for a row."""

    sum_of_mean_squares: jax.Array
    """Scalar: the mean of the squares of each gradient, summed."""


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> optax.GradientTransformation:
    """Adagrad on a row of a table, with one accumulator rather than one per element.

    For `RowOptimizer` alone: on a whole table it would be one accumulator for all rows. As
    `optax.adagrad` otherwise, and as the exact row-wise Adagrad of TorchRec and FBGEMM.
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
