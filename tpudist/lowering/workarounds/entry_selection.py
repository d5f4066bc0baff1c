"""Picks one entry of each row by comparison instead of by index, so that rows may be split.

`jnp.take_along_axis(logits, targets[..., None], axis=-1)` is a gather, for which rows would have to
be whole on each device. A sum over where the index is compares each entry instead, which XLA fuses
with what made the rows: nothing is gathered, and the entry is the same number to the last bit.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_Mode = jax.lax.GatherScatterMode


def picks_entries(eqn: core.JaxprEqn) -> bool:
    """Whether a gather or a scatter-add is about one entry of each row, told by one number."""
    table, indices = (_aval(x) for x in eqn.invars[:2])
    numbers, is_gather = eqn.params["dimension_numbers"], eqn.primitive.name == "gather"
    if is_gather:
        looked_up, rows = numbers.start_index_map, numbers.start_indices_batching_dims
        one_each = not numbers.offset_dims and numbers.collapsed_slice_dims == looked_up
    elif eqn.primitive.name == "scatter-add":
        looked_up = numbers.scatter_dims_to_operand_dims
        rows = numbers.scatter_indices_batching_dims
        one_each = not numbers.update_window_dims and numbers.inserted_window_dims == looked_up
    else:
        return False
    return (
        one_each
        and len(looked_up) == 1
        and jnp.issubdtype(table.dtype, jnp.floating)
        # All other dims are those of rows, in the same order in both.
        and len(numbers.operand_batching_dims) == len(table.shape) - 1
        and list(rows) == sorted(rows)
        and list(numbers.operand_batching_dims) == sorted(numbers.operand_batching_dims)
        and math.prod(indices.shape) * table.shape[looked_up[0]] == math.prod(table.shape)
        and eqn.params["mode"] in (_Mode.CLIP, _Mode.FILL_OR_DROP, _Mode.PROMISE_IN_BOUNDS)
    )


def pick(eqn: core.JaxprEqn, table: jax.Array, indices: jax.Array, *updates: Any) -> jax.Array:
    """What the equation computes, of which `picks_entries` is true."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    names = ("start_index_map", "scatter_dims_to_operand_dims")
    (dim,) = getattr(numbers, names[bool(updates)])
    size = table.shape[dim]
    rows = tuple(1 if i == dim else n for i, n in enumerate(table.shape))
    at = indices.reshape(rows)
    if mode == _Mode.CLIP:
        at = jnp.clip(at, 0, size - 1)
    is_it = jax.lax.broadcasted_iota(at.dtype, table.shape, dim) == at
    if updates:
        return table + jnp.where(is_it, updates[0].reshape(rows), 0)
    found = jnp.sum(jnp.where(is_it, table, 0), axis=dim, keepdims=True, dtype=table.dtype)
    if mode == _Mode.FILL_OR_DROP:
        fill = eqn.params["fill_value"]
        found = jnp.where((at >= 0) & (at < size), found, jnp.nan if fill is None else fill)
    return found.astype(table.dtype).reshape(_aval(eqn.outvars[0]).shape)


def _aval(x: Any) -> Any:
    return x.aval
