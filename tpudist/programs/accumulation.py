"""Whether a program adds to a state, as an accumulator that is summed over replicas must be.

A replica that holds only its share of a sum may add to it, and nothing else. An operation that this
walk does not know may be an addition: it finds values that certainly are none.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.xla import random_keys

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
        kind = _kind_of(eqn.primitive.name, [read(x) for x in eqn.invars])
        if kind is not _Kind.FREE:
            kinds.update(dict.fromkeys(eqn.outvars, kind))
    return read(jaxpr.outvars[output]) in (_Kind.FREE, _Kind.OTHER)


class Watch:
    """Follows what is computed from some states, where operations are evaluated one by one."""

    def __init__(self, states: Mapping[Any, jax.Array]):
        """Begins with the states, each with any name."""
        self._kept = [*states.values()]  # so that no id is that of another array
        self._kinds = {name: {id(x): _Kind.SUM} for name, x in states.items()}

    def note(self, primitive: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Notes that an operation has been evaluated."""
        for kinds in self._kinds.values():
            kind = _kind_of(primitive, [_read_value(kinds, x) for x in inputs])
            if kind is not _Kind.FREE:
                self._kept += outputs
                for x in outputs:
                    kinds.setdefault(id(x), kind)

    def find_replaced(self, values: Mapping[Any, Any]) -> set[Any]:
        """Returns the names of those whose new value is certainly not the old one and a sum."""
        return {
            name
            for name, kinds in self._kinds.items()
            if _read_value(kinds, values[name]) in (_Kind.FREE, _Kind.OTHER)
        }


def _read_value(kinds: Mapping[int, _Kind], x: Any) -> _Kind:
    known = kinds.get(id(x))
    if known is not None:
        return known
    if isinstance(x, jax.Array) and (x.ndim or x.committed or random_keys.is_key(x)):
        return _Kind.FREE
    return _Kind.FREE if np.asarray(x).any() else _Kind.ADDED


def _kind_of(name: str, given: Sequence[_Kind]) -> _Kind:
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
