"""Rules of operations that move rows: slices, pads, concatenations, reshapes.

JAX's operation on the padded array leaves padding between real rows, or before them. Each rule
moves the real rows to the front of the result.
"""

import functools
import itertools
import operator
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import Dim, RowSize, is_rows


def _reverse(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    (x,) = operation.bind()
    for dim in operation.params["dimensions"]:
        size = operation.in_dims[0][dim]
        if is_rows(size):
            # The real rows are at the end now: roll them to the front.
            twice = lax.concatenate([x, x], dim)
            start = x.shape[dim] - operation.size(size)
            x = lax.dynamic_slice_in_dim(twice, start, x.shape[dim], dim)
    return [x]


def _concatenate(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    dim = operation.params["dimension"]
    if not any(is_rows(dims[dim]) for dims in operation.in_dims[:-1]):
        return operation.bind()
    parts = zip(operation.values, operation.in_dims, strict=True)
    return [_join(operation, [(x, dims[dim]) for x, dims in parts], dim)]


def _join(operation: Operation, parts: Sequence[tuple[jax.Array, Dim]], dim: int) -> jax.Array:
    """Joins arrays so that each begins after the last real row of the one before it."""
    out = lax.concatenate([x for x, _ in parts], dim)
    start: Any = operation.size(parts[0][1])
    for x, size in parts[1:]:
        # Each part overwrites the padding of the part before it, in order. Its own padding ends
        # within the result, so that no start is clamped.
        out = lax.dynamic_update_slice_in_dim(out, x, start, dim)
        start = start + operation.size(size)
    return out


def _tile(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("reps",))
    x = operation.values[0]
    repeats = operation.params["reps"]
    offset = len(repeats) - x.ndim
    for i in reversed(range(len(repeats))):
        dim = i - offset
        size = operation.in_dims[0][dim] if dim >= 0 else 1
        if is_rows(size):
            if is_rows(repeats[i]):
                operation.refuse("rows are repeated as often as there are rows")
            if repeats[i]:
                x = _join(operation, [(x, size)] * repeats[i], dim)
            else:
                x = lax.slice_in_dim(x, 0, 0, axis=dim)
    plain = [
        1 if i >= offset and is_rows(operation.in_dims[0][i - offset]) else times
        for i, times in enumerate(operation.equation.eqn.params["reps"])
    ]
    return [jnp.tile(x, plain)]


def _pad(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("padding_config",))
    config = operation.params["padding_config"]
    x, fill = operation.values
    if type(config) is not tuple or any(type(each) is not tuple for each in config):
        operation.refuse("its padding depends on the number of rows")
    for low, _, interior in config:
        if is_rows(interior) or (is_rows(low) and interior):
            operation.refuse("padding between elements depends on the number of rows")
    if any(is_rows(low) for low, _, _ in config):
        return [_pad_before(operation, config)]
    # Elements before and between the rows do not depend on n. The ones behind them must follow the
    # last real row, so the padding becomes what they are.
    for d, (_, high, interior) in enumerate(config):
        if is_rows(operation.in_dims[0][d]) and (is_rows(high) or high or interior):
            x = operation.evaluator.mask(x, d, operation.in_dims[0][d], fill)
    return operation.bind([x, fill])


def _pad_before(operation: Operation, config: Sequence[tuple[Any, Any, Any]]) -> jax.Array:
    """Pads one dim with a number of elements before it that depends on the rows."""
    padded = [d for d, each in enumerate(config) if each != (0, 0, 0)]
    if len(padded) > 1:
        operation.refuse(
            "it pads several dims, and the padding before one depends on the number of rows"
        )
    (d,) = padded
    low, high, _ = config[d]
    if not is_rows(high) and high < 0:
        operation.refuse(
            "the padding before rows depends on their number, and some rows are removed"
        )
    x, fill = operation.values
    size, (aval,) = operation.in_dims[0][d], operation.out_avals
    if is_rows(size):
        x = operation.evaluator.mask(x, d, size, fill)
    else:
        # `dynamic_update_slice` would move `x` if the result had no room for it.
        operation.require_size(operation.out_dims[0][d], x.shape[d])
    empty = lax.broadcast(fill, aval.shape)
    return lax.dynamic_update_slice_in_dim(empty, x, operation.size(low), d)


def _slice(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("start_indices", "limit_indices", "strides"))
    starts, limits = operation.params["start_indices"], operation.params["limit_indices"]
    x, dims = operation.values[0], operation.in_dims[0]
    strides = operation.params["strides"] or (1,) * len(dims)
    padded_params = operation.equation.eqn.params
    for d, size in enumerate(dims):
        if (starts[d], strides[d]) != (0, 1) or limits[d] != size:
            edges = padded_params["start_indices"][d], padded_params["limit_indices"][d]
            x = _cut(operation, x, size, d, (starts[d], limits[d], strides[d]), edges)
    return [x]


def _split(operation: Operation) -> Sequence[Any]:
    axis = operation.params["axis"]
    size = operation.in_dims[0][axis]
    if not is_rows(size):
        operation.check_params()
        return operation.bind()
    sizes = operation.params["sizes"]
    x = operation.values[0]
    ends = list(itertools.accumulate(sizes, operator.add))
    full_ends = list(itertools.accumulate(operation.equation.eqn.params["sizes"]))
    starts, full_starts = [0, *ends[:-1]], [0, *full_ends[:-1]]
    edges = zip(starts, ends, full_starts, full_ends, strict=True)
    return [_cut(operation, x, size, axis, (a, b, 1), (i, j)) for a, b, i, j in edges]


def _cut(
    operation: Operation,
    x: jax.Array,
    size: Dim,
    d: int,
    labelled: tuple[Any, Any, Any],
    padded_edges: tuple[int, int],
) -> jax.Array:
    """Returns the part `[start:limit:stride]` of dim `d`.

    Args:
        operation: The slice or split.
        x: The padded array.
        size: The size of dim `d`.
        d: The dim.
        labelled: The labelled start, limit and stride.
        padded_edges: Start and limit in the padded array.
    """
    start, limit, stride = labelled
    padded_start, padded_limit = padded_edges
    if is_rows(stride):
        operation.refuse("its strides depend on the number of rows")
    for edge in (start, limit):
        if isinstance(edge, int):
            if not is_rows(limit):
                # `x[:3]` of 2 rows has a size of 2, not 3.
                operation.require_size(size, edge)
        elif not isinstance(edge, RowSize):
            operation.refuse("its start or its end depends on the number of rows")
    if not is_rows(start):
        if is_rows(limit) and not is_rows(size):
            operation.refuse("it takes as many elements of another dim as there are rows")
        return lax.slice_in_dim(x, start, padded_limit, stride, d)
    if stride != 1:
        operation.refuse(
            "it takes rows at a stride, from a start that depends on the number of rows"
        )
    if not is_rows(limit):
        operation.refuse("it takes rows from a start that depends on their number to a fixed end")
    operation.require_size(start, 0)
    length = padded_limit - padded_start
    at = operation.size(start)
    if is_rows(limit - start):
        # `dynamic_slice` would move a start that is too near the end of the padded array.
        extra = [(0, length if i == d else 0) for i in range(x.ndim)]
        x = jnp.pad(x, extra)
    return lax.dynamic_slice_in_dim(x, at, length, d)


def _reshape(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("new_sizes",))
    (x,), (aval,) = operation.values, operation.out_avals
    before, after = operation.in_dims[0], operation.out_dims[0]
    order = operation.params.get("dimensions")
    if order is not None:  # from `vmap` of a convolution, which moves rows next to the channels
        x, before = lax.transpose(x, order), [before[d] for d in order]
    if _keeps_corner(before, after):
        return operation.bind([x], dimensions=None)
    return [reshape_real(operation, x, before, after, aval.shape)]


def reshape_real(
    operation: Operation,
    x: jax.Array,
    before: Sequence[Dim],
    after: Sequence[Dim],
    shape: Sequence[int],
) -> jax.Array:
    """Reshapes the real part of a padded array.

    Args:
        operation: The operation.
        x: The padded array.
        before: The dims of `x`.
        after: The dims of the result.
        shape: The padded shape of the result.
    """
    # Computes, for each element of the result, its position in the real array in row-major order,
    # and from that its position in the padded array (int32: up to 2**31 elements). A gather: slow,
    # but exact.
    real_before = [operation.size(d) for d in before]
    real_after = [operation.size(d) for d in after]
    position = jnp.zeros(shape, jnp.int32)
    for d, stride in enumerate(_strides(real_after)):
        position += lax.broadcasted_iota(jnp.int32, tuple(shape), d) * stride
    source = jnp.zeros(shape, jnp.int32)
    places = zip(real_before, _strides(real_before), _strides(list(x.shape)), strict=True)
    for size, stride, padded_stride in places:
        index = position // jnp.maximum(stride, 1) % jnp.maximum(size, 1)
        source += index * padded_stride
    return jnp.take(x.reshape(-1), source, mode="clip")


def _strides(sizes: list[Any]) -> list[Any]:
    return [functools.reduce(operator.mul, sizes[i + 1 :], 1) for i in range(len(sizes))]


def _keeps_corner(before: Sequence[Dim], after: Sequence[Dim]) -> bool:
    """Returns whether a plain reshape leaves the real rows in the leading corner."""
    # It does if the dims before and after fall into consecutive groups of equal size, and in each
    # group only the first dim depends on the rows. Each round of the outer loop takes at least one
    # dim, and the inner loop multiplies the smaller side until both are equal or dims run out.
    # Sizes are polynomials. Products that are equal at random points are equal: a polynomial of
    # degree 20 is zero at a random point with a probability of 2e-5, and at all four with 2e-19.
    num_symbols = max((x.num_symbols for x in (*before, *after) if is_rows(x)), default=0)
    points = [random.Random(k).choices(range(100, 10**6), k=num_symbols) for k in range(4)]

    def sizes(dim: Dim) -> tuple[Any, ...]:
        return tuple(dim.at(p[: dim.num_symbols]) if is_rows(dim) else dim for p in points)

    i = j = 0
    while i < len(before) or j < len(after):
        left: list[Dim] = []
        right: list[Dim] = []
        left_size = right_size = (1,) * len(points)
        while not (left or right) or left_size != right_size:
            # Any order is right, since the loop ends only if both sides are equal.
            if i < len(before) and (left_size[0] <= right_size[0] or j >= len(after)):
                left, left_size, i = [*left, before[i]], _times(left_size, sizes(before[i])), i + 1
            elif j < len(after):
                right, right_size = [*right, after[j]], _times(right_size, sizes(after[j]))
                j += 1
            else:
                return False
        left, right = [d for d in left if d != 1], [d for d in right if d != 1]
        if left != right and any(map(is_rows, (*left[1:], *right[1:]))):
            return False
    return True


def _times(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x * y for x, y in zip(a, b, strict=True))


RULES: dict[str, Rule] = {
    "rev": _reverse,
    "concatenate": _concatenate,
    "tile": _tile,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "reshape": _reshape,
}
