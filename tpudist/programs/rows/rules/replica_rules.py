"""Rules of operations on the rows of all replicas: no padding is left between the replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.programs.replica_equality import claim_equal
from tpudist.programs.rows import replica_rows
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import Dim, RowSize, is_rows, symbol
from tpudist.xla import collectives


def _gather(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("rows", "own"))
    (x,), (aval,) = operation.values, operation.out_avals
    dim, index = operation.params["dim"], operation.params["index"]
    _require_equal_others(operation, dim)
    size = operation.in_dims[0][dim]
    gathered = collectives.all_gather(x, dim)
    total = _symbol_of(operation.out_dims[0][dim])
    if not isinstance(size, RowSize):
        return [gathered]
    if total is None:
        # The result needs a symbol: `partial_batch` traces the function again with one.
        operation.evaluator.requirements.gathered[index] = size
        return [gathered]
    # For each row of the result: the replica that has it, and its place in the padded rows of all.
    starts, ends = _places(operation, size)
    position = jnp.arange(aval.shape[dim])
    replica = jnp.sum(position[:, None] >= ends[None], 1).clip(0, len(ends) - 1)
    source = replica * x.shape[dim] + position - starts[replica]
    return [jnp.take(gathered, source, dim, mode="clip")]


def _share(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("rows", "own"))
    (x,), (aval,) = operation.values, operation.out_avals
    dim = operation.params["dim"]
    _require_equal_others(operation, dim)
    size = operation.out_dims[0][dim]
    summed = collectives.all_reduce(collectives.ReduceOp.SUM, x)
    me = collectives.replica_id()
    if not isinstance(size, RowSize):
        return [jax.lax.dynamic_slice_in_dim(summed, me * size, size, dim)]
    if not is_rows(operation.in_dims[0][dim]) or _symbol_of(operation.in_dims[0][dim]) is None:
        # Only a result of the right shape: the function is traced again, as in `_gather`.
        return [jax.lax.slice_in_dim(summed, 0, aval.shape[dim], axis=dim)]
    starts, _ = _places(operation, size)
    return [jnp.take(summed, starts[me] + jnp.arange(aval.shape[dim]), dim, mode="clip")]


def _claim(operation: Operation) -> Sequence[Any]:
    (x,), index = operation.values, operation.params["index"]
    if any(map(is_rows, operation.in_dims[0])):
        operation.evaluator.requirements.broken_claims.add(index)
        return [x]
    return [claim_equal(x, index)]


def _places(operation: Operation, size: RowSize) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of each replica among the rows of all, and the row after its last."""
    own = jnp.asarray(operation.size(size), jnp.int32)
    ends = jnp.cumsum(collectives.all_gather(own[None], 0))
    return jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]]), ends


def _symbol_of(dim: Dim) -> int | None:
    """Returns the symbol that a size equals, if there is one."""
    if not isinstance(dim, RowSize) or len(dim.symbols) != 1:
        return None
    (i,) = dim.symbols
    return i if dim == symbol(i, dim.num_symbols) else None


def _require_equal_others(operation: Operation, dim: int) -> None:
    for d, size in enumerate(operation.in_dims[0]):
        if d != dim and is_rows(size):
            operation.require_equal(size)


RULES: dict[str, Rule] = {
    replica_rows.GATHER: _gather,
    replica_rows.SHARE: _share,
    replica_rows.CLAIM: _claim,
}
