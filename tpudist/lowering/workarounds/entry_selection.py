"""Selects one entry of each row by comparison instead of by index, so that rows may be split.

`jnp.take_along_axis(logits, targets[..., None], axis=-1)` is a gather, for which each device would
need complete rows. Instead, the position of each entry is compared with the index, and a masked sum
returns the entry. XLA fuses this with the operation that computes the rows, and gathers nothing.
All other terms of the sum are zero, so the result is bitwise identical; only -0.0 becomes 0.0.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend import core

from tpudist.xla.array_attributes import array_aval

_Mode = jax.lax.GatherScatterMode


def picks_entries(eqn: core.JaxprEqn) -> bool:
    """Whether a gather or scatter-add reads or changes one entry per row, with one index each."""
    table, indices = map(array_aval, eqn.invars[:2])
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "gather":
        looked_up, rows = numbers.start_index_map, numbers.start_indices_batching_dims
        is_entry = not numbers.offset_dims and numbers.collapsed_slice_dims == looked_up
    elif eqn.primitive.name == "scatter-add":
        looked_up = numbers.scatter_dims_to_operand_dims
        rows = numbers.scatter_indices_batching_dims
        is_entry = not numbers.update_window_dims and numbers.inserted_window_dims == looked_up
    else:
        return False
    return (
        is_entry
        and len(looked_up) == 1
        # Integers are left alone: in practice only floats, such as logits, are split along rows.
        and jnp.issubdtype(table.dtype, jnp.floating)
        # All other dims are dims of rows, in the same order in table and indices.
        and len(numbers.operand_batching_dims) == len(table.shape) - 1
        and list(rows) == sorted(rows)
        and list(numbers.operand_batching_dims) == sorted(numbers.operand_batching_dims)
        and math.prod(indices.shape) * table.shape[looked_up[0]] == math.prod(table.shape)
        and eqn.params["mode"] in (_Mode.CLIP, _Mode.FILL_OR_DROP, _Mode.PROMISE_IN_BOUNDS)
    )


def pick(
    eqn: core.JaxprEqn, table: jax.Array, indices: jax.Array, *updates: jax.Array
) -> jax.Array:
    """Computes the result of an equation for which `picks_entries` is true."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    looked_up = numbers.scatter_dims_to_operand_dims if updates else numbers.start_index_map
    (dim,) = looked_up
    size = table.shape[dim]
    rows = tuple(1 if i == dim else n for i, n in enumerate(table.shape))
    index = indices.reshape(rows)
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)  # positions in a long row would wrap around in 8 bits
    if mode == _Mode.CLIP:
        index = jnp.clip(index, 0, size - 1)
    is_selected = jax.lax.broadcasted_iota(index.dtype, table.shape, dim) == index
    if updates:
        return jnp.where(is_selected, table + updates[0].reshape(rows), table)
    entry = jnp.sum(jnp.where(is_selected, table, 0), axis=dim, keepdims=True, dtype=table.dtype)
    if mode == _Mode.FILL_OR_DROP:
        fill = eqn.params["fill_value"]
        is_inside = (index >= 0) & (index < size)
        entry = jnp.where(is_inside, entry, jnp.nan if fill is None else fill)
    return entry.astype(table.dtype).reshape(array_aval(eqn.outvars[0]).shape)
