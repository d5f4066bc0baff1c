"""The parts of all replicas one after another, in a trace."""

from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.xla import collectives
from tpudist.xla.packing import Packing


def all_gather(value: PyTree, axis: int, packing: Packing | None = None) -> PyTree:
    """As `collectives.all_gather`, without the padding of partial batches.

    Those are gathered array by array, in whatever packs XLA makes of them: `packing` is for full
    batches.
    """
    frame = context.current().frame
    if frame is None or not frame.has_partial_batch:
        return collectives.all_gather(value, axis, packing)

    def gather(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not -x.ndim <= axis < x.ndim:
            return collectives.all_gather(x, axis, packing)  # which says what is wrong
        return frame.gather_rows(x, axis % x.ndim)

    return jax.tree.map(gather, value)
