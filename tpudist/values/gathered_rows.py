"""Gathers the parts of all replicas in a trace, without the padding of partial batches."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.xla import collectives
from tpudist.xla.packing import Packing


def all_gather(value: PyTree, axis: int, packing: Packing | None = None) -> PyTree:
    """Gathers like `collectives.all_gather`, without the padding of partial batches.

    `packing` applies only to full batches. Partial batches are gathered array by array.
    """
    frame = context.current().frame
    if frame is None or not frame.has_partial_batch:
        return collectives.all_gather(value, axis, packing)

    def gather(x: ArrayLike) -> jax.Array:
        array = jnp.asarray(x)
        if not -array.ndim <= axis < array.ndim:
            return collectives.all_gather(array, axis, packing)  # raises the error
        # The frame knows how many rows are real on each replica. It needs the axis from the front.
        return frame.gather_rows(array, axis % array.ndim)

    return jax.tree.map(gather, value)
