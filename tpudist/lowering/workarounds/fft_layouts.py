"""Computes Fourier transforms on each device by itself, of what is split inside a replica.

XLA's partitioner splits a transform over a mesh axis, and on CPU what it makes is refused by checks
of XLA's own, when it is compiled or when it runs (`partitioner_bugs`). So here each device has the
whole of the dims that are transformed, and its part of the rows where there are such.
"""

import jax
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of, axes_that_divide
from tpudist.xla.mesh import BATCH_AXES


def lay_out_transforms(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """A jaxpr with its Fourier transforms laid out, those in loops, branches and calls too."""
    return jaxpr_rewrite.rewrite(closed, _needs_layout, _lay_out)


def _needs_layout(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "fft":
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))


def _lay_out(eqn: core.JaxprEqn, x: jax.Array) -> jax.Array:
    automatic = axes_of(AxisType.Auto)
    has_rows = x.ndim > len(eqn.params["fft_lengths"])
    of_rows = [axis for axis in automatic if axis in BATCH_AXES]
    rows = PartitionSpec(axes_that_divide(x.shape[0], of_rows) if has_rows else None)
    return jax.shard_map(
        lambda x: eqn.primitive.bind(x, **eqn.params),
        in_specs=rows,
        out_specs=rows,
        axis_names=frozenset(automatic),
        check_vma=False,
    )(x)
