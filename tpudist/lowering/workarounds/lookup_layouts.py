"""Lays out what a lookup by index works on, so that XLA's partitioner does not end the process.

`partitioner_bugs` has the bug: a gather or a scatter fails to be partitioned where mesh axes meet
on its table and on its indices, beside a manual axis. So here each axis inside a replica splits one
of the two: axes that split a batch split the indices, and the others split the table, along dims
that are not looked up in. Indices that have nothing to do with the batch are not split at all. What
XLA chooses within that is left to it. Where there is one axis, or one replica, nothing is done.
"""

import functools
from collections.abc import Sequence

import jax
from jax.extend import core
from jax.sharding import AxisType

from tpudist.lowering.workarounds import entry_selection
from tpudist.programs import jaxpr_rewrite, jaxprs, row_dependence
from tpudist.xla.axis_constraint import axes_of, constrain_axes
from tpudist.xla.mesh import BATCH_AXES
from tpudist.xla.settings import Setting

# Axes of tokens: they split what looks up, and not what is looked up in.
_TOKEN_AXES = (*BATCH_AXES, "sequence")
_KINDS = ("add", "sub", "mul", "min", "max")
_LOOKUPS = ("gather", "scatter", *(f"scatter-{kind}" for kind in _KINDS))


def lay_out_lookups(closed: jaxprs.ClosedJaxpr, stacked: Sequence[bool]) -> jaxprs.ClosedJaxpr:
    """A jaxpr with its lookups laid out, those in loops, branches and calls too; see above.

    Args:
        closed: What a replica computes.
        stacked: Which of its inputs are the replica's own, as rows of a batch are.
    """
    if not Setting.USE_SHARDY_PARTITIONER.read():  # the older partitioner does not have the bug
        return closed
    if not any(map(_needs_layout, jaxprs.walk(closed))):
        return closed
    dependent = row_dependence.find_dependent(closed, stacked)

    def lay_out(eqn: core.JaxprEqn, *operands: jax.Array) -> jax.Array:
        return _lay_out(eqn, *operands, by_rows=eqn.invars[1] in dependent)

    return jaxpr_rewrite.rewrite(closed, _needs_layout, lay_out)


def _needs_layout(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a lookup, in a place where the partitioner may fail over it."""
    if eqn.primitive.name not in _LOOKUPS:
        return False
    with eqn.ctx.manager:
        return len(axes_of(AxisType.Auto)) > 1 and bool(axes_of(AxisType.Manual))


def _lay_out(eqn: core.JaxprEqn, *operands: jax.Array, by_rows: bool) -> jax.Array:
    """What the equation computes, with its operands laid out; to be called in its mesh."""
    if entry_selection.picks_entries(eqn):
        return entry_selection.pick(eqn, *operands)
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "gather":
        looked_up, in_indices = numbers.start_index_map, numbers.start_indices_batching_dims
    else:
        looked_up = numbers.scatter_dims_to_operand_dims
        in_indices = numbers.scatter_indices_batching_dims
    automatic = axes_of(AxisType.Auto)
    of_tokens = [axis for axis in automatic if axis in _TOKEN_AXES]
    of_tables = [axis for axis in automatic if axis not in _TOKEN_AXES]
    # The first dim that a table shares with the indices stays split, as that of the batch.
    shared = numbers.operand_batching_dims
    table, indices, *updates = operands
    if by_rows or shared:
        # A batch comes first. Left to XLA, the axes may split another dim, and the bug is back.
        dims = in_indices if shared else range(indices.ndim - 1)
        indices = constrain_axes(indices, of_tokens, dims, whole_axes=of_tables)
        of_table = functools.partial(constrain_axes, axes=of_tokens, dims=shared)
    else:
        # Of numbers such as positions every device has all, and the table may have the rows.
        indices = constrain_axes(indices, automatic)
        of_table = functools.partial(constrain_axes, axes=())
        updates = [_keep_whole_but_windows(x, numbers.update_window_dims) for x in updates]
    table = of_table(table, whole_dims=looked_up)
    found = eqn.primitive.bind(table, indices, *updates, **eqn.params)
    if updates:
        return of_table(found, whole_dims=looked_up)
    if not by_rows:
        return found
    # What is done with the result does not reach back to its operands.
    of_indices = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
    return constrain_axes(found, of_tokens, of_indices[:1], whole_dims=of_indices[1:])


def _keep_whole_but_windows(updates: jax.Array, windows: Sequence[int]) -> jax.Array:
    dims = [dim for dim in range(updates.ndim) if dim not in windows]
    return constrain_axes(updates, (), whole_dims=dims)
