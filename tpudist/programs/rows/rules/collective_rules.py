"""Rules of collectives: they combine values with rows only if all replicas have equally many."""

import itertools
from collections.abc import Sequence
from typing import Any

from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import is_rows


def _combine(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    for dim in filter(is_rows, itertools.chain(*operation.in_dims)):
        operation.require_equal(dim)
    return operation.bind()


def _gather(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    along = operation.params["all_gather_dimension"]
    for dims in operation.in_dims:
        for d, dim in enumerate(dims):
            if is_rows(dim) and operation.params["tiled"] and d == along:
                operation.refuse(
                    "jax.lax.all_gather joins the rows of all replicas with their padding: use "
                    "tpudist.get_replica_context().all_gather"
                )
            if is_rows(dim):
                operation.require_equal(dim)
    return operation.bind()


def _refuse_division(operation: Operation) -> Sequence[Any]:
    operation.refuse("rows are divided between replicas")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "ppermute"), _combine),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gather),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), _refuse_division),
}
