"""Rejects Keras losses that average over a replica's own rows while their gradients are summed.

Gradients would be too large by a factor of the number of replicas. In custom training loops,
TensorFlow rejects such a loss (Keras 2), or divides it by the number of replicas (Keras 3), so that
rows of a partial batch weigh more. On JAX, Keras does neither.
"""

from collections.abc import Callable
from typing import Any

import keras

from tpudist import context
from tpudist.keras import keras_internals, variable_gradients
from tpudist.xla.user_code import line_of_call

# The reductions of Keras 3.15 that divide by a number of rows, or by a sum of weights.
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def install() -> None:
    """Installs the hook."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self, y_true, y_pred, sample_weight=None):
            _check(self)
            return plain(self, y_true, y_pred, sample_weight)

        return call

    keras_internals.replace_method(keras.losses.Loss, "__call__", wrap)


def _check(loss: keras.losses.Loss) -> None:
    """Checks a loss that is called in a replica function.

    Raises:
        ValueError: If it averages, there are several replicas, and `value_and_grad` differentiates.
    """
    replica = context.current().replica_context
    if (
        replica is None
        or replica.num_replicas_in_sync == 1
        or not variable_gradients.is_differentiating()
        or loss.reduction not in _MEANS
    ):
        return
    name = type(loss).__name__
    raise ValueError(
        f"The Keras loss {name}(reduction='{loss.reduction}') was called in a function that "
        f"tpudist.keras.value_and_grad differentiates, at {line_of_call()}. It is a mean over each "
        f"replica's own rows, but gradients are summed over {replica.num_replicas_in_sync} "
        "replicas, so they would be that many times too large. Make it with "
        f"{name}(reduction='none'), and divide by the rows of all replicas: "
        "tpudist.compute_average_loss(losses)."
    )
