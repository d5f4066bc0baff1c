"""Replaces operations that other libraries define by the functions of JAX that compute them.

Equinox and Lineax have primitives of their own, with rules for gradients and batches. Once a
function is traced, what matters is what they compute, which they say in functions of JAX. With
these in its place a program can be followed: which values differ between replicas, which dims are
rows, and where it calls back.
"""

import functools
from typing import Any

import jax
from jax.extend import core

from tpudist.programs import jaxpr_rewrite, jaxprs

# Their primitives are known, or lowered by the compiler.
_OWN = {"jax", "jaxlib", "tpudist"}
# Such operations may be in each other, as solvers are. One that cannot be expanded takes a round.
_MOST_ROUNDS = 32


def expand(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Returns a jaxpr in which functions of JAX stand for the operations of other libraries.

    An operation whose function cannot be traced stays.
    """
    kept: set[Any] = set()
    for _ in range(_MOST_ROUNDS):
        wanted = functools.partial(_is_wanted, kept)
        try:
            expanded = jaxpr_rewrite.rewrite(closed, wanted, _compute)
        except (_CannotTrace, jaxpr_rewrite.MakesConstants) as error:
            kept.add(error.primitive)
            continue
        if expanded is closed:
            break
        closed = expanded
    return closed


class _CannotTrace(Exception):
    """The function for an operation cannot be traced."""

    def __init__(self, primitive: Any):
        super().__init__(primitive)
        self.primitive = primitive


def _is_wanted(kept: set[Any], eqn: core.JaxprEqn) -> bool:
    return eqn.primitive not in kept and _is_of_library(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _is_of_library(primitive: Any) -> bool:
    function = primitive.impl
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or "jax"
    return module.partition(".")[0] not in _OWN


def _compute(eqn: core.JaxprEqn, *operands: jax.Array) -> Any:
    try:
        results = eqn.primitive.impl(*operands, **eqn.params)
    except Exception as error:  # whatever it does with a value that is traced
        raise _CannotTrace(eqn.primitive) from error
    return results if eqn.primitive.multiple_results else [results]
