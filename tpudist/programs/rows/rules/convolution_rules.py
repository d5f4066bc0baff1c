"""Rules of convolutions: rows may be the batch, a dim that is summed over, or groups of channels.

Groups of channels are computed independently. If each row has its own image and filter, as in
gradients per example, `vmap` makes groups of the rows. The number of groups is then the number of
rows times a constant, and the groups of the real rows come first. If a convolution already has
groups, `vmap` may put the rows into each group. Then each group is padded, and the parts of the
result are joined again.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tpudist.programs.rows.contractions import dims_of_sums
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import Dim, RowSize, is_rows
from tpudist.programs.rows.rules.shaping_rules import reshape_real


def _convolve(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("feature_group_count", "batch_group_count"))
    params = operation.params
    spec = params["dimension_numbers"]
    if any(is_rows(operation.in_dims[1][d]) for d in spec.rhs_spec[2:]):
        operation.refuse("its filter is as large as the batch")
    summed = dims_of_sums(operation.equation)
    # JAX allows only one of the two numbers of groups to be other than 1.
    of_batch = params["batch_group_count"] != 1
    if of_batch:
        count, grouped = params["batch_group_count"], (spec.lhs_spec[0], spec.rhs_spec[0])
    else:
        count, grouped = params["feature_group_count"], (spec.lhs_spec[1], spec.rhs_spec[0])
    # Both operands are masked, since 0 times NaN is NaN. Also the dims of groups: XLA may compute
    # all groups as one convolution, with zeros in the filter between them.
    masked = [{*summed.get(i, ()), *((d,) if count != 1 else ())} for i, d in enumerate(grouped)]
    values = [operation.mask(i, sorted(dims), 0) for i, dims in enumerate(masked)]
    if count == 1:
        return operation.bind(values)
    sizes = [dims[d] for dims, d in zip(operation.in_dims, grouped, strict=True)]
    if is_rows(count):
        group_sizes = [size.quotient(count) if is_rows(size) else None for size in sizes]
        if None in group_sizes or any(map(is_rows, group_sizes)):
            operation.refuse(f"it has {count} groups, and the size of a group depends on the rows")
        return operation.bind(values)
    if not any(map(is_rows, sizes)):
        return operation.bind(values)
    if not of_batch and is_rows(sizes[0]):
        operation.refuse("rows are summed over in groups of features")
    for i, (d, size) in enumerate(zip(grouped, sizes, strict=True)):
        if is_rows(size):
            values[i] = _pad_each_group(operation, values[i], operation.in_dims[i], d, count)
    (out,) = operation.bind(values)
    if is_rows(sizes[1]):
        out = _join_groups(operation, out, operation.out_dims[0], spec.out_spec[1], count)
    return [out]


def _pad_each_group(
    operation: Operation, x: jax.Array, dims: Sequence[Dim], d: int, count: int
) -> jax.Array:
    """Moves the padding of dim `d` into its `count` groups of rows, which follow each other."""
    group_size = _size_of_group(operation, dims[d], count)
    shape = (*x.shape[:d], count, x.shape[d] // count, *x.shape[d + 1 :])
    split_dims = (*dims[:d], count, group_size, *dims[d + 1 :])
    return reshape_real(operation, x, dims, split_dims, shape).reshape(x.shape)


def _join_groups(
    operation: Operation, x: jax.Array, dims: Sequence[Dim], d: int, count: int
) -> jax.Array:
    """Undoes `_pad_each_group`: moves the real rows of all groups to the front."""
    group_size = _size_of_group(operation, dims[d], count)
    shape = (*x.shape[:d], count, x.shape[d] // count, *x.shape[d + 1 :])
    split_dims = (*dims[:d], count, group_size, *dims[d + 1 :])
    return reshape_real(operation, x.reshape(shape), split_dims, dims, x.shape)


def _size_of_group(operation: Operation, size: Dim, count: int) -> Dim:
    assert isinstance(size, RowSize), size
    group_size = size.quotient(count)
    if group_size is None:
        operation.refuse(f"its {count} groups do not have equal numbers of rows")
    return group_size


RULES: dict[str, Rule] = {"conv_general_dilated": _convolve}
