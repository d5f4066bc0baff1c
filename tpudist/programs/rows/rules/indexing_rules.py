"""Gathers, scatters and slices at places that are computed.

JAX clamps an index to the last row, or drops what is out of bounds. Both mean the last real row,
not the last padded one. A part whose size depends on the number of rows is taken, or written, row
by row, so that its padding can be left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import Dim, is_rows

_FILL = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP
_PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _dynamic_slice(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=("slice_sizes",))
    sizes = operation.params["slice_sizes"]
    starts = _clamp(operation, operation.values[1:], sizes)
    x, (aval,) = operation.values[0], operation.out_avals
    for d, size in enumerate(sizes):
        if is_rows(size):
            # The padded part would reach over the end, and be moved.
            x = jnp.pad(x, [(0, aval.shape[d] if i == d else 0) for i in range(x.ndim)])
    return operation.bind([x, *starts])


def _dynamic_update_slice(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    target, part, *starts = operation.values
    sizes, wholes = operation.in_dims[1], operation.in_dims[0]
    starts = _clamp(operation, starts, sizes)
    moved = [d for d, size in enumerate(sizes) if is_rows(size) and size != wholes[d]]
    if not moved:
        return operation.bind([target, part, *starts])
    # What is there already stands where the part has padding.
    room = [(0, part.shape[d] if d in moved else 0) for d in range(part.ndim)]
    padded = jnp.pad(target, room)
    before = lax.dynamic_slice(padded, starts, part.shape)
    for d in moved:
        part = jnp.where(operation.is_real(part.shape, d, sizes[d]), part, before)
    written = lax.dynamic_update_slice(padded, part, starts)
    return [lax.slice(written, [0] * target.ndim, target.shape)]


def _clamp(operation: Operation, starts: Sequence[Any], sizes: Sequence[Dim]) -> list[Any]:
    clamped = []
    for start, size, whole in zip(starts, sizes, operation.in_dims[0], strict=True):
        if size != whole and (is_rows(size) or is_rows(whole)):
            if not is_rows(size):
                operation.need(whole, size)  # type: ignore[arg-type]
            last = jnp.maximum(operation.size(whole) - operation.size(size), 0)
            start = jnp.clip(start, 0, jnp.asarray(last, jnp.asarray(start).dtype))
        clamped.append(start)
    return clamped


@dataclasses.dataclass
class _Window:
    """A gather or scatter of windows, while its windows of rows are taken apart.

    Attributes:
        operation: The gather or scatter.
        index: Its indices `[*batch, component]`.
        index_dims: The dims of the batch, as far as they are to be masked; a window that is taken
            apart is masked already.
        components: The dim of the operand that each component counts in.
        sizes: The size of the window in each dim of the operand.
        places: For each dim of the window: that of the operand, and that of the windows' array.
        batching: The dims of the batch that are those of the operand.
    """

    operation: Operation
    index: Any
    index_dims: list[Dim]
    components: list[int]
    sizes: list[Dim]
    places: list[tuple[int, int]]
    batching: tuple[int, ...]

    def take_apart(self, shape: Sequence[int], mode: Any) -> list[int]:
        """Makes of each window whose size depends on the rows one window for each of its rows.

        Args:
            shape: Of the array of windows: the updates, or what is gathered.
            mode: What is done out of bounds.

        Returns:
            The dims of the operand that it was.
        """
        wholes = self.operation.in_dims[0]
        apart = [
            (d, at)
            for d, at in self.places
            if is_rows(self.sizes[d]) and self.sizes[d] != wholes[d]
        ]
        for d, at in apart:
            self.places.remove((d, at))
            self._insert(d, at, shape, mode)
        return [d for d, _ in apart]

    def _insert(self, d: int, at: int, shape: Sequence[int], mode: Any) -> None:
        operation, whole, size = self.operation, self.operation.in_dims[0][d], self.sizes[d]
        axis = at - sum(place < at for _, place in self.places)
        self.index = _wide(self.index)
        batch = [*self.index.shape[:-1]]
        batch.insert(axis, shape[at])
        index = jnp.broadcast_to(jnp.expand_dims(self.index, axis), (*batch, self.index.shape[-1]))
        if d not in self.components:
            self.components.append(d)
            index = jnp.concatenate([index, jnp.zeros((*batch, 1), index.dtype)], -1)
        j = self.components.index(d)
        last = jnp.maximum(operation.size(whole) - operation.size(size), 0)
        last = jnp.asarray(last, index.dtype)
        start, row = index[..., j], lax.broadcasted_iota(index.dtype, tuple(batch), axis)
        if mode == _CLIP:
            start = jnp.clip(start, 0, last)
        # A window that is not all within bounds is dropped as a whole.
        there = (start >= 0) & (start <= last) & (row < operation.size(size))
        self.index = index.at[..., j].set(jnp.where(there, start + row, _out_of_bounds(index)))
        self.index_dims.insert(axis, shape[at])
        self.batching = tuple(b + (b >= axis) for b in self.batching)
        self.sizes[d] = 1


def _gather(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=("slice_sizes",))
    numbers, mode = operation.params["dimension_numbers"], operation.params["mode"]
    operand, index = operation.values
    inside = _dims_inside(
        operand.ndim, (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    )
    window = _Window(
        operation,
        index,
        list(operation.in_dims[1][:-1]),
        list(numbers.start_index_map),
        list(operation.params["slice_sizes"]),
        list(zip(inside, numbers.offset_dims, strict=True)),
        tuple(numbers.start_indices_batching_dims),
    )
    (aval,) = operation.out_avals
    # XLA takes the nearest row for an index that breaks the promise, and so does JAX then.
    mode = _CLIP if mode == _PROMISE else mode
    apart = window.take_apart(aval.shape, mode)
    index = _limit(operation, window, mode, apart)
    if not apart:
        return operation.bind([operand, index])
    return operation.bind(
        [operand, index],
        dimension_numbers=numbers._replace(
            offset_dims=tuple(at for _, at in window.places),
            collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *apart))),
            start_index_map=tuple(window.components),
            start_indices_batching_dims=window.batching,
        ),
        slice_sizes=tuple(
            1 if d in apart else size
            for d, size in enumerate(operation.equation.eqn.params["slice_sizes"])
        ),
        # What was out of bounds is that still, and all of it; padding may be anything.
        mode=mode,
        unique_indices=False,
        indices_are_sorted=False,
    )


def _dims_inside(ndim: int, others: Sequence[int]) -> list[int]:
    return [d for d in range(ndim) if d not in others]


def _limit(operation: Operation, window: _Window, mode: Any, apart: Sequence[int]) -> Any:
    """Indices that mean in the padded operand what they mean in the real one."""
    sizes, index, dims = operation.in_dims[0], window.index, window.components
    if is_rows(operation.in_dims[1][-1]):
        operation.refuse("its indices have as many components as there are rows")
    if not any(is_rows(sizes[d]) for d in dims if d not in apart):
        return index
    index = _wide(index)
    columns = []
    for j, d in enumerate(dims):
        column = index[..., j]
        width = window.sizes[d]
        if is_rows(sizes[d]) and width != sizes[d] and d not in apart:
            if isinstance(width, int) and width > 1:
                operation.need(sizes[d], width)
            elif mode != _FILL and not any(map(is_rows, operation.out_dims[0])):
                operation.need(sizes[d], 1)  # of no rows none can be taken
            last = jnp.asarray(operation.size(sizes[d]) - width, column.dtype)
            if mode == _CLIP:
                column = jnp.clip(column, 0, jnp.maximum(last, 0))
            elif mode == _FILL:
                column = jnp.where(column > last, _out_of_bounds(column), column)
        columns.append(column)
    return jnp.stack(columns, -1)


def _wide(index: Any) -> Any:
    return index.astype(jnp.int32) if jnp.dtype(index.dtype).itemsize < 4 else index


def _out_of_bounds(index: Any) -> Any:
    return jnp.asarray(jnp.iinfo(index.dtype).max, index.dtype)


def _scatter(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    numbers, mode = operation.params["dimension_numbers"], operation.params["mode"]
    operand, index, updates = operation.values
    of_operand, of_index, of_updates = operation.in_dims
    inside = _dims_inside(
        operand.ndim, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    )
    places = list(zip(inside, numbers.update_window_dims, strict=True))
    sizes: list[Dim] = [1] * operand.ndim
    for d, at in places:
        sizes[d] = of_updates[at]
    window = _Window(
        operation,
        index,
        list(of_index[:-1]),
        list(numbers.scatter_dims_to_operand_dims),
        sizes,
        places,
        tuple(numbers.scatter_indices_batching_dims),
    )
    apart = window.take_apart(updates.shape, mode)
    index = _limit(operation, window, mode, apart)
    masked = [a for a, dim in enumerate(window.index_dims) if is_rows(dim)]
    if not masked and not apart:
        return operation.bind([operand, index, updates])
    dims = window.components
    if not dims:
        operation.refuse("rows are written to one place, by indices without components")
    if mode not in (_FILL, _CLIP, _PROMISE):
        operation.refuse(f"with mode {mode}")
    if mode == _CLIP:
        for j, d in enumerate(dims):
            if not is_rows(of_operand[d]) and d not in apart:
                last = operand.shape[d] - window.sizes[d]  # type: ignore[operator]
                index = index.at[..., j].set(jnp.clip(index[..., j], 0, last))
    # Padding writes nowhere: its index is out of all bounds.
    for a in masked:
        real = operation.is_real(index.shape, a, window.index_dims[a])
        index = jnp.where(real, index, _out_of_bounds(index))
    return operation.bind(
        [operand, index, updates],
        dimension_numbers=numbers._replace(
            update_window_dims=tuple(at for _, at in window.places),
            inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, *apart))),
            scatter_dims_to_operand_dims=tuple(dims),
            scatter_indices_batching_dims=window.batching,
        ),
        mode=_FILL,
        unique_indices=False,
        indices_are_sorted=False,
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
