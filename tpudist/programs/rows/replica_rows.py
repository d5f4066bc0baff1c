"""Operations on the rows of all replicas, in a trace that is labelled.

Of a partial batch replicas have other numbers of rows. How many they have together is no multiple
of one replica's, and a value is equal on all of them only if it does not depend on that number.
These operations are only evaluated by their rules.
"""

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

GATHER = "tpudist.gather_rows"
SHARE = "tpudist.share_rows"
CLAIM = "tpudist.claim_equal"

_gather = core.Primitive(GATHER)
_share = core.Primitive(SHARE)
_claim = core.Primitive(CLAIM)


def gather(x: jax.Array, dim: int, index: int, rows: int) -> jax.Array:
    """The parts of all replicas along a dim, which are `rows` in this trace: gather no. `index`."""
    return _gather.bind(x, dim=dim, index=index, rows=rows, own=x.shape[dim])


def claim_equal(x: jax.Array, index: int) -> jax.Array:
    """An array as it is, said to be equal on every replica: claim no. `index`."""
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


# Each is linear, and the transpose of the other: every replica gets the sum of all gradients for
# its own rows.
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
