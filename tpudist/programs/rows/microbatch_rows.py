"""Splits a batch into microbatches whose numbers of real rows are known in a partial batch.

Part i of n has the rows i, i + n, i + 2 n, ... The size of a part is ceil((rows - i) / n), which
`row_sizes` cannot fit. So splitting and joining are primitives of their own, which exist only in
labelled traces: `rules/microbatch_rules.py` evaluates them, and nothing lowers them.
"""

import jax
from jax.extend import core

TAKE = "tpudist.take_part_of_rows"
JOIN = "tpudist.join_parts_of_rows"

_take = core.Primitive(TAKE)
_join = core.Primitive(JOIN)


@_take.def_abstract_eval
def _(x, part, *, num_parts, rows):
    return x.update(shape=(rows, *x.shape[1:]))


@_join.def_abstract_eval
def _(x, *, rows):
    return x.update(shape=(rows, *x.shape[2:]))


def take(batch: jax.Array, part: jax.Array, num_parts: int, rows: int) -> jax.Array:
    """Returns part number `part` of `num_parts` of a batch; it has `rows` rows in this trace."""
    return _take.bind(batch, part, num_parts=num_parts, rows=rows)


def join(parts: jax.Array, rows: int) -> jax.Array:
    """Joins arrays `[num_parts, rows of a part, ...]` to one of `rows` rows in this trace."""
    return _join.bind(parts, rows=rows)
