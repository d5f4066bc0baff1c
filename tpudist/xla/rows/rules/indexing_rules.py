"""Gathers, scatters and slices at places that are computed.

JAX clamps an index to the last row, or drops what is out of bounds. Both mean the last real row,
not the last padded one.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpudist.xla.rows.evaluator import Operation, Rule
from tpudist.xla.rows.row_sizes import Dim, is_rows

_FILL = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP
_PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _dynamic_slice(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=("slice_sizes",))
    starts = _clamp(operation, operation.values[1:], operation.params["slice_sizes"])
    return operation.bind([operation.values[0], *starts])


def _dynamic_update_slice(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    target, part, *starts = operation.values
    sizes = operation.in_dims[1]
    starts = _clamp(operation, starts, sizes)
    for dim, (size, whole) in enumerate(zip(sizes, operation.in_dims[0], strict=True)):
        if is_rows(size) and size != whole:
            operation.refuse(f"it writes as many elements of dim {dim} as there are rows")
    return operation.bind([target, part, *starts])


def _clamp(operation: Operation, starts: Sequence[Any], sizes: Sequence[Dim]) -> list[Any]:
    clamped = []
    for start, size, whole in zip(starts, sizes, operation.in_dims[0], strict=True):
        if is_rows(whole) and size != whole:
            if is_rows(size):
                operation.refuse("a part whose size depends on the number of rows")
            operation.need(whole, size)  # type: ignore[arg-type]
            last = jnp.maximum(operation.size(whole) - size, 0)
            start = jnp.clip(start, 0, jnp.asarray(last, jnp.asarray(start).dtype))
        elif is_rows(size) and not is_rows(whole):
            operation.refuse("it takes as many elements of another dim as there are rows")
        clamped.append(start)
    return clamped


def _gather(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=("slice_sizes",))
    window = operation.params["slice_sizes"]
    for size, whole in zip(window, operation.in_dims[0], strict=True):
        if is_rows(size) and size != whole:
            operation.refuse("a part whose size depends on the number of rows")
    operand, index = operation.values
    dims = operation.params["dimension_numbers"].start_index_map
    index = _limit(operation, index, dims, window, operation.params["mode"])
    return operation.bind([operand, index])


def _limit(
    operation: Operation, index: Any, dims: Sequence[int], window: Sequence[Dim], mode: Any
) -> Any:
    """Indices that mean in the padded operand what they mean in the real one."""
    sizes = operation.in_dims[0]
    if is_rows(operation.in_dims[1][-1]):
        operation.refuse("its indices have as many components as there are rows")
    if not any(is_rows(sizes[d]) for d in dims):
        return index
    if jnp.dtype(index.dtype).itemsize < 4:
        index = index.astype(jnp.int32)
    columns = []
    for j, d in enumerate(dims):
        column = index[..., j]
        if is_rows(sizes[d]) and window[d] != sizes[d]:
            if is_rows(window[d]):
                operation.refuse("a part whose size depends on the number of rows")
            width = window[d]
            if isinstance(width, int) and width > 1:
                operation.need(sizes[d], width)
            elif mode != _FILL and not any(map(is_rows, operation.out_dims[0])):
                operation.need(sizes[d], 1)  # of no rows none can be taken
            last = jnp.asarray(operation.size(sizes[d]) - window[d], column.dtype)
            if mode == _CLIP:
                column = jnp.clip(column, 0, jnp.maximum(last, 0))
            elif mode == _FILL:
                column = jnp.where(column > last, _out_of_bounds(column), column)
        columns.append(column)
    return jnp.stack(columns, -1)


def _out_of_bounds(index: Any) -> Any:
    return jnp.asarray(jnp.iinfo(index.dtype).max, index.dtype)


def _scatter(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    numbers, mode = operation.params["dimension_numbers"], operation.params["mode"]
    operand, index, updates = operation.values
    of_operand, of_index, of_updates = operation.in_dims
    batching = numbers.operand_batching_dims
    inside = [
        d
        for d in range(len(of_operand))
        if d not in numbers.inserted_window_dims and d not in batching
    ]
    window: list[Dim] = [1] * len(of_operand)
    for d, u in zip(inside, numbers.update_window_dims, strict=True):
        window[d] = of_updates[u]
        if is_rows(window[d]) and window[d] != of_operand[d]:
            updates, window[d] = _fill_window(operation, updates, d, u)
    dims = numbers.scatter_dims_to_operand_dims
    index = _limit(operation, index, dims, window, mode)
    masked = [a for a in range(index.ndim - 1) if is_rows(of_index[a])]
    if not masked:
        return operation.bind([operand, index, updates])
    if not dims:
        operation.refuse("rows are written to one place, by indices without components")
    if mode not in (_FILL, _CLIP, _PROMISE):
        operation.refuse(f"with mode {mode}")
    if mode == _CLIP:
        for j, d in enumerate(dims):
            if not is_rows(of_operand[d]):
                last = operand.shape[d] - window[d]  # type: ignore[operator]
                index = index.at[..., j].set(jnp.clip(index[..., j], 0, last))
    # Padding writes nowhere: its index is out of all bounds.
    for a in masked:
        real = operation.is_real(index.shape, a, of_index[a])
        index = jnp.where(real, index, _out_of_bounds(index))
    return operation.bind(
        [operand, index, updates], mode=_FILL, unique_indices=False, indices_are_sorted=False
    )


def _fill_window(operation: Operation, updates: Any, d: int, u: int) -> Any:
    operation.refuse(
        f"it writes a part of dim {d} whose size depends on the number of rows, as x.at[1:] does"
    )


RULES: dict[str, Rule] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **{
        name: _scatter
        for name in (
            "scatter",
            "scatter-add",
            "scatter_add",
            "scatter-sub",
            "scatter_sub",
            "scatter-mul",
            "scatter_mul",
            "scatter-min",
            "scatter_min",
            "scatter-max",
            "scatter_max",
        )
    },
}
