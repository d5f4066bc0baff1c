"""Losses of Keras that average over a replica's own rows, where their gradients are summed.

TensorFlow refused them in loops of one's own (Keras 2), or divides by the number of replicas (Keras
3), so that rows of a partial batch weigh more; on JAX Keras does neither, and gradients would be as
many times too large as there are replicas.
"""

import functools
from typing import Any

import keras

from tpudist import context
from tpudist.keras import held_variables
from tpudist.xla.hlo.source_lines import line_of_call

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def install() -> None:
    """Puts the hook in place."""
    loss_class: Any = keras.losses.Loss
    plain = loss_class.__call__

    @functools.wraps(plain)
    def call(self, y_true, y_pred, sample_weight=None):
        _check(self)
        return plain(self, y_true, y_pred, sample_weight)

    loss_class.__call__ = call


def _check(loss: Any) -> None:
    """Refuses one that averages, in what `value_and_grad` differentiates on several replicas.

    Raises:
        ValueError: It is one.
    """
    replica = context.current().replica_context
    if (
        replica is None
        or replica.num_replicas_in_sync == 1
        or not held_variables.is_differentiating()
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
