"""Finds state that a program replaces although it is summed over replicas: it may only be added to.

Each replica has only its share of such a sum, so it may add to it and do nothing else. An unknown
operation may be an addition: only values that are certainly not sums are found.
"""

import enum
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.xla import random_keys

# An operation that is in none of the lists may be an addition (`_Dependence.UNKNOWN`).
_KEEP = frozenset(
    "convert_element_type copy copy_p reshape squeeze broadcast_in_dim stop_gradient".split()
)
_NOT_ADDITIONS = frozenset(
    "scatter dynamic_update_slice mul div max min neg rem pow integer_pow square sqrt rsqrt exp "
    "log tanh abs sign floor".split()
)


class _Dependence(enum.Enum):
    FREE = "does not depend on the state"
    ADDED = "zero, with something added"
    SUM = "the state, with something added"
    UNKNOWN = "may be a sum"
    OTHER = "is not a sum"


def replaces_state(closed: jaxprs.ClosedJaxpr, output: int, state: int) -> bool:
    """Returns whether an output is certainly not an input with something added to it.

    Args:
        closed: The program of one replica.
        output: Number of the output that is the new state.
        state: Number of the input that is the old state.
    """
    jaxpr = jaxprs.open_jaxpr(closed)
    dependences: dict[core.Var, _Dependence] = {jaxpr.invars[state]: _Dependence.SUM}

    def read(x: jaxprs.Atom) -> _Dependence:
        if isinstance(x, core.Literal):
            # A zero is a state that was reset: a sum with it is a sum of the state too.
            return _Dependence.FREE if np.any(x.val) else _Dependence.ADDED
        return dependences.get(x, _Dependence.FREE)

    for eqn in jaxpr.eqns:
        result = _dependence_of(eqn.primitive.name, [read(x) for x in eqn.invars])
        if result is not _Dependence.FREE:
            dependences.update(dict.fromkeys(eqn.outvars, result))
    return read(jaxpr.outvars[output]) in (_Dependence.FREE, _Dependence.OTHER)


class Watch:
    """Follows the values computed from some states, while operations are evaluated one by one.

    Args:
        states: The states by number.
    """

    def __init__(self, states: Mapping[int, jax.Array]):
        self._kept: list[object] = [*states.values()]  # alive, so that no id is used twice
        self._dependences = {i: {id(x): _Dependence.SUM} for i, x in states.items()}

    def note(self, primitive: str, inputs: Sequence[object], outputs: Sequence[object]) -> None:
        """Records that an operation was evaluated."""
        for dependences in self._dependences.values():
            result = _dependence_of(primitive, [_read_value(dependences, x) for x in inputs])
            if result is not _Dependence.FREE:
                self._kept += outputs
                for x in outputs:
                    dependences.setdefault(id(x), result)

    def find_replaced(self, values: Mapping[int, object]) -> set[int]:
        """Returns the states whose new value is certainly not a sum with the old one."""
        return {
            i
            for i, dependences in self._dependences.items()
            if _read_value(dependences, values[i]) in (_Dependence.FREE, _Dependence.OTHER)
        }


def _read_value(dependences: Mapping[int, _Dependence], x: object) -> _Dependence:
    known = dependences.get(id(x))
    if known is not None:
        return known
    if isinstance(x, jax.Array) and (x.ndim or x.committed or random_keys.is_key(x)):
        return _Dependence.FREE
    return _Dependence.FREE if np.asarray(x).any() else _Dependence.ADDED


def _dependence_of(primitive: str, operands: Sequence[_Dependence]) -> _Dependence:
    depends = [x not in (_Dependence.FREE, _Dependence.ADDED) for x in operands]
    if primitive in ("add", "add_any", "sub"):
        # In `x - state` the sign of the state changes.
        if _Dependence.OTHER in operands or (primitive == "sub" and depends[1]):
            return _Dependence.OTHER
        if all(depends):
            # State plus state counts it twice. `UNKNOWN` may be, for example, half of it.
            is_double = operands == [_Dependence.SUM, _Dependence.SUM]
            return _Dependence.OTHER if is_double else _Dependence.UNKNOWN
        if any(depends):
            return operands[depends.index(True)]
        # A zero plus x may be a state that was reset, plus x.
        return _Dependence.ADDED if _Dependence.ADDED in operands else _Dependence.FREE
    if primitive in _KEEP:
        return operands[0]
    if not any(depends):
        return _Dependence.FREE
    is_other = primitive in _NOT_ADDITIONS or _Dependence.OTHER in operands
    return _Dependence.OTHER if is_other else _Dependence.UNKNOWN
