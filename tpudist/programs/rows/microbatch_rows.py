"""Parts of a batch, for microbatches: of a partial one each part has its own number of real rows.

Part i of n has the rows i, i + n, i + 2 n, ... In a trace that is labelled these are operations of
their own, whose sizes are no quotients; they are only evaluated by their rules.
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
    """Part number `part` of `num_parts` of a batch, which has `rows` rows in this trace."""
    return _take.bind(batch, part, num_parts=num_parts, rows=rows)


def join(parts: jax.Array, rows: int) -> jax.Array:
    """Arrays `[num_parts, rows of a part, ...]` as the whole, of `rows` rows in this trace."""
    return _join.bind(parts, rows=rows)
