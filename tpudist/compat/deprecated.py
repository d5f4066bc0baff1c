"""Deprecated functions of tf.distribute, for programs that are ported without changes."""

from tpudist.options import warn_of_deprecation
from tpudist.reduce_op import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """Returns SUM, the reduction of the losses of the replicas.

    Mirrors `tf.compat.v1.distribute.get_loss_reduction`.
    """
    warn_of_deprecation(
        "get_loss_reduction", "sum the losses that tpudist.compute_average_loss returns"
    )
    return ReduceOp.SUM
