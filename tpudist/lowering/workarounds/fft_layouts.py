"""Computes Fourier transforms of split arrays on each device separately.

XLA's partitioner splits a transform over a mesh axis. On CPU the result fails a check of XLA, at
compile time or at run time (`partitioner_bugs`). So each device gets the complete dims that are
transformed, and its part of the rows if the array has rows.
"""

import jax
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of, axes_that_divide
from tpudist.xla.mesh import BATCH_AXES


def lay_out_transforms(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Lays out the Fourier transforms of a jaxpr, at all depths."""
    return jaxpr_rewrite.rewrite(closed, _needs_layout, _lay_out)


def _needs_layout(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "fft":
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))


def _lay_out(eqn: core.JaxprEqn, x: jax.Array) -> jax.Array:
    automatic = axes_of(AxisType.Auto)
    # XLA transforms the last dims, so the first dim has rows unless all dims are transformed.
    has_rows = x.ndim > len(eqn.params["fft_lengths"])
    row_axes = [axis for axis in automatic if axis in BATCH_AXES]
    spec = PartitionSpec(axes_that_divide(x.shape[0], row_axes) if has_rows else None)
    return jax.shard_map(
        lambda x: eqn.primitive.bind(x, **eqn.params),
        in_specs=spec,
        out_specs=spec,
        axis_names=frozenset(automatic),
        check_vma=False,
    )(x)
