"""A program as texts that are the same in every process that has the same one.

JAX's own print of a program is long, and holds addresses and sets whose order differs from process
to process. Here an operation is its name, what it reads and gives, and those of its parameters that
are numbers, words or made of such; of others, such as functions, it is the type.
"""

import dataclasses
import enum
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tpudist.programs import jaxprs
from tpudist.xla import random_keys

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
MAX_BYTES = 2**24
"""Of an array on the devices of several processes, for it to be compared by value."""
_SHOWN = 4  # elements of an array that are written out


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """What a program computes.

    Attributes:
        lines: One of each operation, those in loops, branches and calls after what holds them; the
            first of each program is its inputs, the last one its results.
        equations: The operation of each line; None for inputs and results.
    """

    lines: tuple[str, ...]
    equations: tuple[core.JaxprEqn | None, ...]

    @property
    def digest(self) -> str:
        """Equal for equal programs."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


def write_program(closed: jaxprs.ClosedJaxpr) -> ProgramText:
    """The text of a program, constants that this process can read included."""
    writer = _Writer([], [], {})
    writer.write(closed)
    return ProgramText(tuple(writer.lines), tuple(writer.equations))


def write_value(value: Any) -> str:
    """An array's dtype, shape and checksum (or numbers, where it has few); else what it is."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _write_array(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, np.dtype | type):
        return getattr(value, "__name__", None) or str(value)
    if isinstance(value, PartitionSpec):
        return str(tuple(value))
    if isinstance(value, Mesh | AbstractMesh):
        return str(tuple(value.shape.items()))
    if isinstance(value, NamedSharding):
        return f"{write_value(value.mesh)} {write_value(value.spec)} {value.memory_kind}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(write_value, value))})"
    if isinstance(value, set | frozenset):
        return f"({', '.join(sorted(map(write_value, value)))})"
    if isinstance(value, Mapping):
        return str(sorted((str(key), write_value(x)) for key, x in value.items()))
    if jaxprs.is_program(value):
        return ""  # written after the line that holds it
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(map(write_value, fields))})"
    return type(value).__name__


def is_readable(value: jax.Array) -> bool:
    """Whether this process has all of an array, and it is compared by value.

    One that all processes have is what each of them has put there: JAX makes such arrays in the
    scope of a mesh. Of those with more than `MAX_BYTES` it is not read back from the device.
    """
    if value.is_fully_addressable:
        return True
    return value.is_fully_replicated and value.nbytes <= MAX_BYTES


def addressable_copy(value: jax.Array) -> jax.Array:
    """What this process has of a readable array."""
    return value if value.is_fully_addressable else value.addressable_data(0)


def _write_array(value: Any) -> str:
    kind = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, Tracer):
        return kind
    if isinstance(value, jax.Array):
        if not is_readable(value):
            return kind
        value = addressable_copy(value)
        if random_keys.is_key(value):
            value = jax.random.key_data(value)
    numbers = np.asarray(value)
    if numbers.dtype == object:
        return kind
    if numbers.size <= _SHOWN:
        return f"{kind} {numbers.tolist()}"
    return f"{kind} {zlib.crc32(np.ascontiguousarray(numbers).view(np.uint8).data):08x}"


@dataclasses.dataclass
class _Writer:
    lines: list[str]
    equations: list[core.JaxprEqn | None]
    # A program that is in several places is written at the first; with itself, lest another one
    # gets its id.
    known: dict[int, tuple[int, Any]]

    def write(self, program: Any) -> None:
        if id(program) in self.known:
            self._add(f"as line {self.known[id(program)][0]}", None)
            return
        self.known[id(program)] = len(self.lines), program
        opened = jaxprs.open_jaxpr(program)
        constants = [write_value(x) for x in getattr(program, "consts", ())]
        names: dict[Any, int] = {}
        inputs = [self._define(x, names) for x in (*opened.constvars, *opened.invars)]
        self._add(f"inputs {inputs} constants {constants}", None)
        for eqn in opened.eqns:
            self._write_equation(eqn, names)
        self._add(f"results {[self._read(x, names) for x in opened.outvars]}", None)

    def _write_equation(self, eqn: core.JaxprEqn, names: dict[Any, int]) -> None:
        params = {k: write_value(x) for k, x in sorted(eqn.params.items())}
        operands = ", ".join(self._read(x, names) for x in eqn.invars)
        results = ", ".join(self._define(x, names) for x in eqn.outvars)
        told = ", ".join(f"{k}={x}" for k, x in params.items() if x)
        self._add(f"{results} = {eqn.primitive.name}({operands}) {told}", eqn)
        for _, value in sorted(eqn.params.items()):
            for inner in jaxprs.programs_of(value):
                self.write(inner)

    def _define(self, variable: Any, names: dict[Any, int]) -> str:
        names[variable] = len(names)
        return f"{len(names) - 1}:{_write_aval(variable.aval)}"

    def _read(self, atom: Any, names: dict[Any, int]) -> str:
        if isinstance(atom, core.Literal):
            return f"{write_value(atom.val)}:{_write_aval(atom.aval)}"
        return str(names.get(atom, "?"))

    def _add(self, line: str, eqn: core.JaxprEqn | None) -> None:
        self.lines.append(line)
        self.equations.append(eqn)


def _write_aval(aval: Any) -> str:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return type(aval).__name__
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return f"{weak}{aval.dtype}[{','.join(map(str, aval.shape))}]"
