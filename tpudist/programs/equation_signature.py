"""Compares equations of programs by what they compute.

JAX traces the layers of a model one by one, so that alike layers are different objects. Their
signatures are equal: variables are numbered by their first use, and parameters are compared by
value where their type allows it, otherwise by identity.
"""

from typing import Any

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom


class Signature:
    """Writes equations as hashable values that are equal for equal programs.

    Args:
        known: Values of the programs inside equations by their ids, for other signatures of the
            same program; all these programs must stay alive.

    Attributes:
        numbers: The variables that were written, with their numbers.
    """

    def __init__(self, known: dict[int, "Hashed"]):
        self.numbers: dict[core.Var, int] = {}
        self._known = known

    def write_equation(self, eqn: core.JaxprEqn) -> tuple[Any, ...]:
        """Returns a value for an equation."""
        operands = tuple(map(self.write_atom, eqn.invars))
        results = tuple(map(self.write_atom, eqn.outvars))
        params = tuple((name, self._write(value)) for name, value in sorted(eqn.params.items()))
        return eqn.primitive, operands, results, params, eqn.ctx

    def write_atom(self, x: Atom) -> Any:
        """Returns a value for an operand or a result."""
        if isinstance(x, core.Var):
            return self.numbers.setdefault(x, len(self.numbers))
        return x.aval, self._write(jaxprs.literal_value(x))

    def _write(self, value: Any) -> Any:
        """Returns a hashable value that is equal only for parameters with the same effect."""
        if jaxprs.is_program(value):
            if id(value) not in self._known:
                self._known[id(value)] = Hashed(self._write_program(value))
            return self._known[id(value)]
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._write, value))
        if isinstance(value, dict):
            return tuple((key, self._write(x)) for key, x in value.items())
        if isinstance(value, np.ndarray | np.generic | float | complex):
            array = np.asarray(value)  # bytes, because 0.0 equals -0.0
            return type(value), array.dtype, array.shape, array.tobytes()
        try:
            hash(value)
        except TypeError:
            return Identity(value)
        return type(value), value

    def _write_program(self, program: jaxprs.Program) -> Any:
        jaxpr = jaxprs.open_jaxpr(program)
        inner = Signature(self._known)
        inputs = tuple((inner.write_atom(x), x.aval) for x in jaxpr.invars)
        constants = tuple((inner.write_atom(x), x.aval) for x in jaxpr.constvars)
        lines = tuple(map(inner.write_equation, jaxpr.eqns))
        outputs = tuple(map(inner.write_atom, jaxpr.outvars))
        consts = tuple(map(Identity, jaxprs.consts_of(program)))
        return inputs, constants, lines, outputs, consts


class Hashed:
    """A value whose hash is computed once."""

    def __init__(self, value: Any):
        self._value = value
        self._hash = hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class Identity:
    """An object that is equal only to itself. It is kept, so that its id is not used again."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
