"""Rules of microbatches: the real rows are distributed over the parts as all rows are."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tpudist.programs.rows import microbatch_rows
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import RowSize, is_rows


def _take(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("rows",))
    x, part = operation.values
    num_parts = operation.params["num_parts"]
    of_part = operation.out_dims[0][0]
    if not isinstance(of_part, RowSize) or any(map(is_rows, operation.in_dims[0][1:])):
        operation.refuse("the value that is split into parts is not a batch")
    # The rows of a part are a symbol of their own. Its count is ceil((real - part) / num_parts),
    # and is known from here to the end of the program that takes the part.
    (symbol,) = of_part.symbols
    (aval,) = operation.out_avals
    real = operation.size(operation.in_dims[0][0])
    counts = operation.evaluator.counts
    counts[symbol] = jnp.clip((real - part + num_parts - 1) // num_parts, 0, aval.shape[0])
    return [x.at[part + num_parts * jnp.arange(aval.shape[0])].get(mode="clip")]


def _join(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("rows",))
    (x,), (aval,) = operation.values, operation.out_avals
    if any(map(is_rows, operation.in_dims[0][2:])):
        operation.refuse("its parts have rows in another dim as well")
    # Row r of part i is row r * num_parts + i of the batch: the real rows come first again.
    joined = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])
    missing = max(aval.shape[0] - joined.shape[0], 0)
    joined = jnp.pad(joined, [(0, missing)] + [(0, 0)] * (joined.ndim - 1))
    return [joined[: aval.shape[0]]]


RULES: dict[str, Rule] = {microbatch_rows.TAKE: _take, microbatch_rows.JOIN: _join}
