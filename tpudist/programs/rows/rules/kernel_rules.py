"""The rule of functions declared with `tpudist.rowwise`: they run on padded rows."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.programs.rows import row_kernels
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.labels import depends_on_rows
from tpudist.programs.rows.row_sizes import Dim, is_rows


def _run(operation: Operation) -> Sequence[Any]:
    params = operation.params
    kernel, levels = params["kernel"], params["levels"]
    if depends_on_rows(params["numbers"]):
        operation.refuse(
            "the function closes over a value that depends on the number of rows. Pass values with "
            "rows as arguments, and derive other values in the function from their shapes"
        )
    operation.check_params()
    _require_declared(
        operation,
        operation.in_dims,
        [ins for ins, _ in levels],
        "an argument, or a value that it closes over,",
    )
    _require_declared(operation, operation.out_dims, [outs for _, outs in levels], "a result")
    values = list(operation.values)
    sizes = [_size_of(operation, level) for level in levels]
    for (ins, _), size in zip(levels, sizes, strict=True):
        for i, dim in enumerate(ins):
            if dim is not None and is_rows(size):
                values[i] = _fill(operation, values[i], dim, size, params["cotangents"][i])
    if 0 in sizes:
        return [jnp.zeros(x.shape, x.dtype) for x in operation.out_avals]
    results = kernel(*values)
    for (_, outs), size in zip(levels, sizes, strict=True):
        for i, dim in enumerate(outs):
            # A sum over no rows is zero; the kernel has summed the padding.
            if dim is None and is_rows(size):
                has_rows = operation.size(size) > 0
                results[i] = jnp.where(has_rows, results[i], jnp.zeros_like(results[i]))
    return results


def _require_declared(
    operation: Operation,
    dims: Sequence[Sequence[Dim]],
    declared: Sequence[row_kernels.Dims],
    role: str,
) -> None:
    for i, sizes in enumerate(dims):
        for d, size in enumerate(sizes):
            if is_rows(size) and d not in [each[i] for each in declared]:
                operation.refuse(
                    f"rows are dim {d} of {role} of {len(sizes)} dims, but its in_dims and "
                    "out_dims do not declare that"
                )


def _size_of(operation: Operation, level: row_kernels.Level) -> Dim:
    """Returns the number of rows of a level, which all its operands and results must have."""
    ins, outs = level
    pairs = itertools.chain(
        zip(operation.in_dims, ins, strict=True), zip(operation.out_dims, outs, strict=True)
    )
    sizes = {dims[d] for dims, d in pairs if d is not None}
    if len(sizes) != 1:
        operation.refuse("its arguments have different numbers of rows than its results")
    return sizes.pop()


def _fill(operation: Operation, x: jax.Array, dim: int, size: Dim, is_cotangent: bool) -> jax.Array:
    """Returns an operand whose padding is a copy of its first row, or zeros if it has no rows."""
    # Not zeros: the derivative of a kernel may be infinite at zero, and 0 times infinity is NaN.
    # The padding of a cotangent is zero, so it adds nothing to sums over the rows.
    real = operation.is_real(x.shape, dim, size)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys, which have no zero
        return jnp.where(real, x, jax.lax.slice_in_dim(x, 0, 1, axis=dim))
    zero = jnp.zeros((), x.dtype)
    if is_cotangent:
        return jnp.where(real, x, zero)
    first = jax.lax.slice_in_dim(x, 0, 1, axis=dim)
    return jnp.where(real, x, jnp.where(operation.size(size) > 0, first, zero))


RULES: dict[str, Rule] = {row_kernels.KERNEL: _run}
