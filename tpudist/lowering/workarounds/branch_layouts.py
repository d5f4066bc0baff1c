"""Allows each branch of a `cond` to have its own sharding for the result.

A check of XLA fails for a `cond` of one result if two branches end with different sharding
constraints, from the user or from `lookup_layouts` (`partitioner_bugs`). So each branch gets a
barrier at its end, which has no sharding. The barrier costs nothing, because the compiler does not
fuse across the end of a branch.
"""

import jax
from jax.extend import core
from jax.sharding import AxisType

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of


def lay_out_branches(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Adds barriers to the ends of branches, at all depths."""
    return jaxpr_rewrite.rewrite_branches(closed, _needs_barrier, jax.lax.optimization_barrier)


def _needs_barrier(eqn: core.JaxprEqn) -> bool:
    if len(eqn.outvars) != 1:  # several results end in a tuple, which has no sharding
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))
