"""Lays out the operands of lookups by index so that XLA's partitioner does not end the process.

`partitioner_bugs` reproduces the bug: partitioning a gather or a scatter fails if there is a manual
axis and another mesh axis splits both the table and the indices. So each axis inside a replica
splits only one of the two. Axes that split a batch split the indices. The others split the table,
along dims without lookup. Indices that do not depend on the batch are not split at all. XLA chooses
everything else. With one axis inside a replica, or one replica, this module changes nothing.
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

# Axes that split tokens: they split the indices and not the table. A batch is not split over
# "sequence", but the tokens of each row are.
_TOKEN_AXES = (*BATCH_AXES, "sequence")
_COMBINERS = ("add", "sub", "mul", "min", "max")
_LOOKUPS = ("gather", "scatter", *(f"scatter-{combiner}" for combiner in _COMBINERS))


def lay_out_lookups(closed: jaxprs.ClosedJaxpr, stacked: Sequence[bool]) -> jaxprs.ClosedJaxpr:
    """Lays out the lookups of a jaxpr, at all depths.

    Args:
        closed: Program of one replica.
        stacked: Whether each input belongs to one replica, such as rows of a batch.
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
    """Whether an equation is a lookup under a mesh with which the partitioner may fail."""
    if eqn.primitive.name not in _LOOKUPS:
        return False
    with eqn.ctx.manager:
        return len(axes_of(AxisType.Auto)) > 1 and bool(axes_of(AxisType.Manual))


def _lay_out(eqn: core.JaxprEqn, *operands: jax.Array, by_rows: bool) -> jax.Array:
    """Computes the lookup with its operands laid out, under the mesh of the equation."""
    if entry_selection.picks_entries(eqn):
        return entry_selection.pick(eqn, *operands)
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "gather":
        looked_up, index_batch_dims = numbers.start_index_map, numbers.start_indices_batching_dims
    else:
        looked_up = numbers.scatter_dims_to_operand_dims
        index_batch_dims = numbers.scatter_indices_batching_dims
    automatic = axes_of(AxisType.Auto)
    token_axes = [axis for axis in automatic if axis in _TOKEN_AXES]
    table_axes = [axis for axis in automatic if axis not in _TOKEN_AXES]
    # Batch dims that the table shares with the indices stay split, in both alike. `constrain_axes`
    # splits only the first dim that it can.
    table_batch_dims = numbers.operand_batching_dims
    table, indices, *updates = operands
    if by_rows or table_batch_dims:
        # Without a constraint XLA may split another dim of the indices by these axes, and then the
        # bug occurs again. The first dims are the batch.
        dims = index_batch_dims if table_batch_dims else range(indices.ndim - 1)
        indices = constrain_axes(indices, token_axes, dims, whole_axes=table_axes)
        lay_out_table = functools.partial(constrain_axes, axes=token_axes, dims=table_batch_dims)
    else:
        # Indices such as positions are small: every device has all, and the table may be split.
        indices = constrain_axes(indices, automatic)
        lay_out_table = functools.partial(constrain_axes, axes=())
        updates = [_keep_whole_but_windows(x, numbers.update_window_dims) for x in updates]
    table = lay_out_table(table, whole_dims=looked_up)
    result = eqn.primitive.bind(table, indices, *updates, **eqn.params)
    if updates:
        return lay_out_table(result, whole_dims=looked_up)
    if not by_rows:
        return result
    # Shardings propagate backward, too. This keeps a later operation from splitting the operands.
    index_dims = [dim for dim in range(result.ndim) if dim not in numbers.offset_dims]
    return constrain_axes(result, token_axes, index_dims[:1], whole_dims=index_dims[1:])


def _keep_whole_but_windows(updates: jax.Array, windows: Sequence[int]) -> jax.Array:
    """Constrains the dims of updates that belong to the indices, so that no axis splits them."""
    dims = [dim for dim in range(updates.ndim) if dim not in windows]
    return constrain_axes(updates, (), whole_dims=dims)
