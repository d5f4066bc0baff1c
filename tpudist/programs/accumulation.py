"""Whether a program adds to a state, as an accumulator that is summed over replicas must be.

A replica that holds only its share of a sum may add to it, and nothing else. An operation that this
walk does not know may be an addition: it finds values that certainly are none.
"""

import enum
from typing import Any

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs

_KEEP = frozenset(
    "convert_element_type copy copy_p reshape squeeze broadcast_in_dim stop_gradient".split()
)
_NOT_LINEAR = frozenset(
    "scatter dynamic_update_slice mul div max min neg rem pow integer_pow square sqrt rsqrt exp "
    "log tanh abs sign floor".split()
)


class _Kind(enum.Enum):
    FREE = "does not depend on the state"
    ADDED = "zero, with something added"
    SUM = "the state, with something added"
    UNKNOWN = "may be a sum"
    OTHER = "is not a sum"


def replaces_state(closed: jaxprs.ClosedJaxpr, output: int, state: int) -> bool:
    """Whether an output is certainly not an input with something added to it.

    Args:
        closed: The program of one replica.
        output: The number of the output that is the new state.
        state: The number of the input that is the old state.
    """
    jaxpr = jaxprs.open_jaxpr(closed)
    kinds: dict[Any, _Kind] = {jaxpr.invars[state]: _Kind.SUM}

    def read(x: Any) -> _Kind:
        if isinstance(x, core.Literal):
            return _Kind.FREE if np.any(x.val) else _Kind.ADDED  # it was set to zero before
        return kinds.get(x, _Kind.FREE)

    for eqn in jaxpr.eqns:
        kind = _kind_of(eqn, [read(x) for x in eqn.invars])
        if kind is not _Kind.FREE:
            kinds.update(dict.fromkeys(eqn.outvars, kind))
    return read(jaxpr.outvars[output]) in (_Kind.FREE, _Kind.OTHER)


def _kind_of(eqn: core.JaxprEqn, given: list[_Kind]) -> _Kind:
    name = eqn.primitive.name
    depends = [kind not in (_Kind.FREE, _Kind.ADDED) for kind in given]
    if name in ("add", "add_any", "sub"):
        if _Kind.OTHER in given or (name == "sub" and depends[1]):
            return _Kind.OTHER
        if all(depends):
            return _Kind.OTHER if given == [_Kind.SUM, _Kind.SUM] else _Kind.UNKNOWN
        if any(depends):
            return given[depends.index(True)]
        return _Kind.ADDED if _Kind.ADDED in given else _Kind.FREE
    if name in _KEEP:
        return given[0]
    if not any(depends):
        return _Kind.FREE
    return _Kind.OTHER if name in _NOT_LINEAR or _Kind.OTHER in given else _Kind.UNKNOWN
