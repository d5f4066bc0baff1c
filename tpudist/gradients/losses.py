"""Losses that are divided by the number of examples on all replicas, without padding.

Each replica divides the loss of its own examples by the number of all examples. The sum of the
losses, and of their gradients, over replicas then equals the result of one device for the batch.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tpudist import context
from tpudist.options import shorten
from tpudist.xla.traces import is_traced


def compute_average_loss(
    per_example_loss: jax.Array,
    sample_weight: jax.Array | float | None = None,
    global_batch_size: int | None = None,
) -> jax.Array:
    """Returns this replica's share of the average loss over the global batch.

    Sum it, and its gradients, over the replicas (`SUM`, not `MEAN`). The padding of a partial batch
    counts nothing, in the sum or in the denominator.

    Args:
        per_example_loss: `[examples, ...]`; floating point.
        sample_weight: Weights that broadcast from the left: `[examples]`, or a scalar.
        global_batch_size: Number to divide by. None means the number of real examples on all
            replicas (times the other dims of `per_example_loss`, as in a mean of all elements).

    Returns:
        A scalar, of at least float32.

    Raises:
        RuntimeError: If called in cross-replica context.
        ValueError: If the loss has no example dim or is not floating point, or `global_batch_size`
            is not positive.

    Matches `tf.nn.compute_average_loss`, whose default denominator counts padding.
    """
    replica = context.get_replica_context()
    if replica is None:
        raise RuntimeError(
            "compute_average_loss was called in cross-replica context, but it computes one "
            "replica's share of a loss. Call it in the function that strategy.run runs."
        )
    loss = jnp.asarray(per_example_loss)
    if loss.ndim == 0 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"compute_average_loss received a per-example loss {loss.dtype}{list(loss.shape)}. The "
            "loss must be floating point with the examples in dim 0. Do not average it before."
        )
    if global_batch_size is not None and not _is_positive_number(global_batch_size):
        raise ValueError(
            f"compute_average_loss(global_batch_size={shorten(global_batch_size)}): "
            "global_batch_size must be a positive number."
        )
    if jnp.finfo(loss.dtype).bits < 32:
        loss = loss.astype(jnp.float32)  # counts need the precision
    if sample_weight is not None:
        loss = loss * _append_dims(jnp.asarray(sample_weight, loss.dtype), loss)
    if global_batch_size is None:
        count = replica.num_examples(loss) * math.prod(loss.shape[1:])
    else:
        count = global_batch_size
    # A batch may have no real rows at all at the end of an epoch: its loss is 0, not NaN.
    return loss.sum() / jnp.maximum(jnp.asarray(count, loss.dtype), 1)


def scale_regularization_loss(regularization_loss: jax.Array) -> jax.Array:
    """Returns this replica's share of a loss that does not depend on the examples.

    Weight decay is such a loss. It is divided by the number of replicas (times the number of
    microbatches), because gradients are summed over them.

    Raises:
        RuntimeError: If called in cross-replica context.

    Matches `tf.nn.scale_regularization_loss`.
    """
    replica = context.get_replica_context()
    if replica is None:
        raise RuntimeError(
            "scale_regularization_loss was called in cross-replica context, but it computes one "
            "replica's share of a loss. Call it in the function that strategy.run runs."
        )
    shares = replica.num_replicas_in_sync * context.num_parts()
    return jnp.sum(jnp.asarray(regularization_loss)) / shares


def _is_positive_number(x: object) -> bool:
    if isinstance(x, jax.Array):
        return x.ndim == 0 and (is_traced(x) or bool(x > 0))
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        return False
    return bool(0 < x < float("inf"))


def _append_dims(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)) if x.ndim else x
