"""Rules of gathers, scatters and slices at computed positions.

JAX clamps an index to the last row, or drops indices that are out of bounds. Both must refer to the
last real row, not to the last padded one. A window whose size depends on the number of rows is read
or written row by row, so that its padding can be omitted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from tpudist.array_types import Shape
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import Dim, is_rows

_FILL = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP
_PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _dynamic_slice(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("slice_sizes",))
    sizes = operation.params["slice_sizes"]
    starts = _clamp(operation, operation.values[1:], sizes)
    x, (aval,) = operation.values[0], operation.out_avals
    for d, size in enumerate(sizes):
        if is_rows(size):
            # The padded slice may reach over the end of `x`, and `dynamic_slice` would move it.
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
    # The padding of the part must not overwrite the target: there it is the old content. The
    # target is padded first, since the padded part may reach over its end and would be moved.
    padding = [(0, part.shape[d] if d in moved else 0) for d in range(part.ndim)]
    padded = jnp.pad(target, padding)
    content = lax.dynamic_slice(padded, starts, part.shape)
    for d in moved:
        part = jnp.where(operation.is_real(part.shape, d, sizes[d]), part, content)
    written = lax.dynamic_update_slice(padded, part, starts)
    return [lax.slice(written, [0] * target.ndim, target.shape)]


def _clamp(operation: Operation, starts: Sequence[ArrayLike], sizes: Sequence[Dim]) -> list[Any]:
    """Clamps the starts of a slice to the real size, as JAX does to the padded size."""
    clamped = []
    for start, size, whole in zip(starts, sizes, operation.in_dims[0], strict=True):
        if size != whole and (is_rows(size) or is_rows(whole)):
            if isinstance(size, int):
                operation.require_size(whole, size)
            last = jnp.maximum(operation.size(whole) - operation.size(size), 0)
            start = jnp.clip(start, 0, jnp.asarray(last, jnp.asarray(start).dtype))
        clamped.append(start)
    return clamped


@dataclasses.dataclass
class _Window:
    """The window of a gather or scatter.

    Attributes:
        operation: The gather or scatter.
        index: The indices `[*batch, component]`.
        index_dims: Sizes of the batch dims of `index`. A dim that `split_rows` has added has its
            padded size: the indices of its padding are out of bounds already.
        components: Dim of the operand that each component of an index belongs to.
        sizes: Size of the window in each dim of the operand.
        window_dims: Pairs of a dim of the operand and the dim of the array of windows that it
            becomes.
        batching: The batch dims of `index` that are dims of the operand too.
    """

    operation: Operation
    index: Any
    index_dims: list[Dim]
    components: list[int]
    sizes: list[Dim]
    window_dims: list[tuple[int, int]]
    batching: tuple[int, ...]

    def split_rows(self, shape: Shape, mode: lax.GatherScatterMode) -> list[int]:
        """Splits each window whose size depends on the rows into one window per row.

        Changes all attributes but the operation: each row gets its own index, and the dim of the
        windows becomes a batch dim of the indices.

        Args:
            shape: Shape of the array of windows: of the updates, or of the result of a gather.
            mode: Handling of indices that are out of bounds.

        Returns:
            The dims of the operand whose windows were split.
        """
        wholes = self.operation.in_dims[0]
        split = [
            (d, at)
            for d, at in self.window_dims
            if is_rows(self.sizes[d]) and self.sizes[d] != wholes[d]
        ]
        for d, at in split:
            self.window_dims.remove((d, at))
            self._split(d, at, shape, mode)
        return [d for d, _ in split]

    def _split(self, d: int, at: int, shape: Shape, mode: lax.GatherScatterMode) -> None:
        # Adds a batch dim to the indices: the start of the window, plus the number of the row.
        operation, whole, size = self.operation, self.operation.in_dims[0][d], self.sizes[d]
        # The batch dims are all dims of the windows' array except the window dims, in its order.
        axis = at - sum(other < at for _, other in self.window_dims)
        self.index = _widen(self.index)
        batch = list(self.index.shape[:-1])
        batch.insert(axis, shape[at])
        index = jnp.broadcast_to(jnp.expand_dims(self.index, axis), (*batch, self.index.shape[-1]))
        if d not in self.components:
            self.components.append(d)
            index = jnp.concatenate([index, jnp.zeros((*batch, 1), index.dtype)], -1)
        j = self.components.index(d)
        # The last start of a window that is within the real rows.
        last = jnp.maximum(operation.size(whole) - operation.size(size), 0)
        last = jnp.asarray(last, index.dtype)
        start, row = index[..., j], lax.broadcasted_iota(index.dtype, tuple(batch), axis)
        if mode == _CLIP:
            start = jnp.clip(start, 0, last)
        # JAX drops a window as a whole if a part of it is out of bounds. Padding is dropped too.
        is_inside = (start >= 0) & (start <= last) & (row < operation.size(size))
        self.index = index.at[..., j].set(jnp.where(is_inside, start + row, _out_of_bounds(index)))
        self.index_dims.insert(axis, shape[at])
        self.batching = tuple(b + (b >= axis) for b in self.batching)
        self.sizes[d] = 1


def _gather(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("slice_sizes",))
    numbers, mode = operation.params["dimension_numbers"], operation.params["mode"]
    operand, index = operation.values
    inside = _dims_except(
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
    # For an index that breaks the promise, XLA and therefore JAX read the nearest row.
    mode = _CLIP if mode == _PROMISE else mode
    split = window.split_rows(aval.shape, mode)
    index = _limit(operation, window, mode, split)
    if not split:
        return operation.bind([operand, index])
    return operation.bind(
        [operand, index],
        dimension_numbers=numbers._replace(
            offset_dims=tuple(at for _, at in window.window_dims),
            collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *split))),
            start_index_map=tuple(window.components),
            start_indices_batching_dims=window.batching,
        ),
        slice_sizes=tuple(
            1 if d in split else size
            for d, size in enumerate(operation.equation.eqn.params["slice_sizes"])
        ),
        # A window out of bounds stays so in each of its rows. The padding may be anything.
        mode=mode,
        unique_indices=False,
        indices_are_sorted=False,
    )


def _dims_except(ndim: int, others: Sequence[int]) -> list[int]:
    return [d for d in range(ndim) if d not in others]


def _limit(
    operation: Operation, window: _Window, mode: lax.GatherScatterMode, split: Sequence[int]
) -> jax.Array:
    """Returns indices with the effect in the padded operand that they have in the real one."""
    sizes, index, dims = operation.in_dims[0], window.index, window.components
    if is_rows(operation.in_dims[1][-1]):
        operation.refuse("its indices have as many components as there are rows")
    if not any(is_rows(sizes[d]) for d in dims if d not in split):
        return index
    index = _widen(index)
    columns = []
    for j, d in enumerate(dims):
        column = index[..., j]
        width = window.sizes[d]
        if is_rows(sizes[d]) and width != sizes[d] and d not in split:
            if isinstance(width, int) and width > 1:
                operation.require_size(sizes[d], width)
            elif mode != _FILL and not any(map(is_rows, operation.out_dims[0])):
                # There is no nearest row among no rows. (A result with rows is empty then.)
                operation.require_size(sizes[d], 1)
            last = jnp.asarray(operation.size(sizes[d]) - width, column.dtype)
            # With the mode PROMISE, all indices of a scatter are within the real rows already.
            if mode == _CLIP:
                column = jnp.clip(column, 0, jnp.maximum(last, 0))
            elif mode == _FILL:
                column = jnp.where(column > last, _out_of_bounds(column), column)
        columns.append(column)
    return jnp.stack(columns, -1)


def _widen(index: jax.Array) -> jax.Array:
    # An int8 index has no value that is out of the bounds of every operand.
    return index.astype(jnp.int32) if jnp.dtype(index.dtype).itemsize < 4 else index


def _out_of_bounds(index: jax.Array) -> jax.Array:
    return jnp.asarray(jnp.iinfo(index.dtype).max, index.dtype)


def _scatter(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    numbers, mode = operation.params["dimension_numbers"], operation.params["mode"]
    operand, index, updates = operation.values
    of_operand, of_index, of_updates = operation.in_dims
    inside = _dims_except(
        operand.ndim, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    )
    window_dims = list(zip(inside, numbers.update_window_dims, strict=True))
    sizes: list[Dim] = [1] * operand.ndim
    for d, at in window_dims:
        sizes[d] = of_updates[at]
    window = _Window(
        operation,
        index,
        list(of_index[:-1]),
        list(numbers.scatter_dims_to_operand_dims),
        sizes,
        window_dims,
        tuple(numbers.scatter_indices_batching_dims),
    )
    split = window.split_rows(updates.shape, mode)
    index = _limit(operation, window, mode, split)
    masked = [a for a, dim in enumerate(window.index_dims) if is_rows(dim)]
    if not masked and not split:
        return operation.bind([operand, index, updates])
    dims = window.components
    if not dims:
        operation.refuse("rows are written to one place, by indices without components")
    if mode not in (_FILL, _CLIP, _PROMISE):
        operation.refuse(f"with mode {mode}")
    # Padding writes nowhere: its index is out of all bounds, and the mode becomes FILL, which
    # drops it. So the other indices are clipped here. Padding may repeat an index, so the promises
    # of unique and sorted indices are dropped.
    if mode == _CLIP:
        for j, d in enumerate(dims):
            width = window.sizes[d]
            if not is_rows(of_operand[d]) and d not in split:
                assert isinstance(width, int), width
                clipped = jnp.clip(index[..., j], 0, operand.shape[d] - width)
                index = index.at[..., j].set(clipped)
    for a in masked:
        real = operation.is_real(index.shape, a, window.index_dims[a])
        index = jnp.where(real, index, _out_of_bounds(index))
    return operation.bind(
        [operand, index, updates],
        dimension_numbers=numbers._replace(
            update_window_dims=tuple(at for _, at in window.window_dims),
            inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, *split))),
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
    "scatter": _scatter,
    # Versions of JAX differ in the spelling.
    **{
        f"scatter{separator}{kind}": _scatter
        for kind in ("add", "sub", "mul", "min", "max")
        for separator in "-_"
    },
}
