"""Deprecated functions of tf.distribute, for programs that are ported as they are."""

from tpudist.options import warn_of_deprecation
from tpudist.reduce_op import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """Returns SUM: how the losses of the replicas combine. As `tf.compat.v1.distribute`'s."""
    warn_of_deprecation(
        "get_loss_reduction", "sum the losses that tpudist.compute_average_loss returns"
    )
    return ReduceOp.SUM
