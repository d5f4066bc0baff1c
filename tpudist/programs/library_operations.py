"""Replaces the primitives of other libraries by the functions of JAX that compute them.

Equinox and Lineax define primitives with their own rules for gradients and batches. In a traced
program only their result matters, and their implementation computes it with functions of JAX. With
these functions in their place, tpudist can follow the program: which values differ between
replicas, which dims are rows, and where it calls back.
"""

import functools
from typing import Any

import jax
from jax.extend import core

from tpudist.programs import jaxpr_rewrite, jaxprs

# Packages whose primitives are known or lowered by the compiler.
_OWN = {"jax", "jaxlib", "tpudist"}
# Real programs nest a few such primitives, as solvers are nested. A primitive whose
# implementation contains itself would expand without end.
_MAX_LEVELS = 32


def expand(closed: jaxprs.ClosedJaxpr) -> jaxprs.ClosedJaxpr:
    """Returns a jaxpr with the functions of JAX in place of other libraries' primitives.

    A primitive stays if its function cannot be traced.
    """
    kept: set[core.Primitive] = set()
    # Each round either expands one level of nesting, or adds a primitive to `kept`. Ends if nothing
    # changes: a program has a finite number of primitives to keep.
    num_levels = 0
    while num_levels < _MAX_LEVELS:
        selects = functools.partial(_is_expandable, kept)
        try:
            expanded = jaxpr_rewrite.rewrite(closed, selects, _compute)
        except (_CannotTrace, jaxpr_rewrite.LargeConstantError) as error:
            kept.add(error.primitive)
            continue
        if expanded is closed:
            break
        closed, num_levels = expanded, num_levels + 1
    return closed


class _CannotTrace(Exception):
    """The function for a primitive cannot be traced."""

    def __init__(self, primitive: core.Primitive):
        super().__init__(primitive)
        self.primitive = primitive


def _is_expandable(kept: set[core.Primitive], eqn: core.JaxprEqn) -> bool:
    return eqn.primitive not in kept and _is_of_library(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _is_of_library(primitive: core.Primitive) -> bool:
    function: Any = primitive.impl
    while isinstance(function, functools.partial):
        function = function.func
    # The implementation is any callable of a library.
    module = getattr(function, "__module__", None) or "jax"
    return module.partition(".")[0] not in _OWN


def _compute(eqn: core.JaxprEqn, *operands: jax.Array) -> Any:
    try:
        results = eqn.primitive.impl(*operands, **eqn.params)
    except Exception as error:  # an implementation may do anything with a traced value
        raise _CannotTrace(eqn.primitive) from error
    return results if eqn.primitive.multiple_results else [results]
