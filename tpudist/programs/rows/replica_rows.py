"""Operations on the rows of all replicas, in a labelled trace.

In a partial batch replicas have different numbers of rows. Their total is not a multiple of one
replica's number, and a value is equal on all replicas only if it does not depend on that number.
These primitives exist only in labelled traces: `rules/replica_rules.py` evaluates them, and nothing
lowers them.
"""

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

GATHER = "tpudist.gather_rows"
"""Joins the rows of all replicas."""
SHARE = "tpudist.share_rows"
"""Sums over the replicas, and gives each replica its own rows of the sum."""
CLAIM = "tpudist.claim_equal"
"""Claims that a value is equal on all replicas."""

_gather = core.Primitive(GATHER)
_share = core.Primitive(SHARE)
_claim = core.Primitive(CLAIM)


def gather(x: jax.Array, dim: int, index: int, rows: int) -> jax.Array:
    """Joins the arrays of all replicas along `dim`.

    Args:
        x: The array of this replica.
        dim: The dim of rows.
        index: Number of this gather in the function.
        rows: Rows of the result in this trace.
    """
    return _gather.bind(x, dim=dim, index=index, rows=rows, own=x.shape[dim])


def claim_equal(x: jax.Array, index: int) -> jax.Array:
    """Returns `x`, and records claim number `index` that it is equal on every replica."""
    return _claim.bind(x, index=index)


def _resize(x, dim: int, size: int):
    return x.update(shape=(*x.shape[:dim], size, *x.shape[dim + 1 :]))


@_gather.def_abstract_eval
def _(x, *, dim, index, rows, own):
    return _resize(x, dim, rows)


@_share.def_abstract_eval
def _(x, *, dim, index, rows, own):
    return _resize(x, dim, own)


@_claim.def_abstract_eval
def _(x, *, index):
    return x.update()


# Gather and share are linear, and each is the transpose of the other: the gradient of a gather sums
# the gradients of all replicas, and each replica gets its own rows of the sum.
ad.deflinear2(_gather, lambda ct, x, **params: [_share.bind(ct, **params)])
ad.deflinear2(_share, lambda ct, x, **params: [_gather.bind(ct, **params)])
ad.deflinear2(_claim, lambda ct, x, **params: [ct])


def _batch(primitive):
    def rule(args, dims, *, dim, **params):
        (x,), (at,) = args, dims
        return primitive.bind(jnp.moveaxis(x, at, 0), dim=dim + 1, **params), 0

    return rule


batching.primitive_batchers[_gather] = _batch(_gather)
batching.primitive_batchers[_share] = _batch(_share)
batching.primitive_batchers[_claim] = lambda args, dims, **params: (
    _claim.bind(*args, **params),
    dims[0],
)
