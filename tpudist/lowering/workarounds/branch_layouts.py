"""Lets the branches of a `cond` lay out their result each in its own way.

XLA's checks refuse a `cond` of one result if two branches end with operations that say differently
how an array is split: constraints, a user's or those of `lookup_layouts` (`partitioner_bugs`). So
here each branch ends with a barrier, which says nothing of that. Nothing is lost by it, since the
compiler does not fuse over the end of a branch.
"""

import jax
from jax.extend import core
from jax.sharding import AxisType

from tpudist.programs import jaxpr_rewrite, jaxprs
from tpudist.xla.axis_constraint import axes_of


def lay_out_branches(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """A jaxpr with barriers at the ends of branches, those in loops, branches and calls too."""
    return jaxpr_rewrite.rewrite_branches(closed, _needs_barrier, jax.lax.optimization_barrier)


def _needs_barrier(eqn: core.JaxprEqn) -> bool:
    if len(eqn.outvars) != 1:  # several results are one tuple, of which nothing is said
        return False
    with eqn.ctx.manager:
        return bool(axes_of(AxisType.Auto))
