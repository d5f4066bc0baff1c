"""Writes a program as text that is equal in all processes with an equal program.

JAX's own text of a program is long, and contains addresses and sets whose order differs between
processes. Here an operation is its name, its operands and results, and its parameters: numbers,
words and containers by value, other parameters such as functions by type.
"""

import dataclasses
import enum
import hashlib
import zlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.xla import random_keys
from tpudist.xla.array_attributes import is_weakly_typed

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
MAX_BYTES = 2**24
"""Largest array on the devices of several processes that is compared by value.

It is read back from a device: 16 MiB take milliseconds.
"""
_DIGEST_CHARS = 16  # 64 bits: enough to tell the programs of one run apart
_MAX_WRITTEN = 4  # elements of an array that are written out; larger arrays have a checksum


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """The text of a program.

    Attributes:
        lines: One line per operation. The first line of a program is its inputs, the last one its
            results. The lines of a program inside an operation follow the operation.
        equations: The operation of each line; None for inputs and results.
    """

    lines: tuple[str, ...]
    equations: tuple[core.JaxprEqn | None, ...]

    @property
    def digest(self) -> str:
        """A hash that is equal for equal programs."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:_DIGEST_CHARS]


def write_program(closed: jaxprs.ClosedJaxpr) -> ProgramText:
    """Returns the text of a program, with the constants that this process can read."""
    writer = _Writer([], [], {})
    writer.write(closed)
    return ProgramText(tuple(writer.lines), tuple(writer.equations))


def write_value(value: object) -> str:
    """Returns the text of a value: an array's dtype, shape and numbers or checksum, or its type."""
    # The order matters: some classes of JAX are dataclasses or tuples too.
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _write_array(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.dtype):
        return str(value)
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
    """Returns whether this process has all of an array and compares it by value.

    In the scope of a mesh JAX creates replicated arrays from each process's own value, so the
    values may differ between processes. Arrays above `MAX_BYTES` are not read back from the device.
    """
    if value.is_fully_addressable:
        return True
    return value.is_fully_replicated and value.nbytes <= MAX_BYTES


def addressable_copy(value: jax.Array) -> jax.Array:
    """Returns this process's copy of a readable array."""
    return value if value.is_fully_addressable else value.addressable_data(0)


def _write_array(value: jax.Array | np.ndarray | np.generic) -> str:
    shape = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, Tracer):
        return shape
    if isinstance(value, jax.Array):
        if not is_readable(value):
            return shape
        value = addressable_copy(value)
        if random_keys.is_key(value):
            value = jax.random.key_data(value)
    numbers = np.asarray(value)
    if numbers.dtype == object:
        return shape
    if numbers.size <= _MAX_WRITTEN:
        return f"{shape} {numbers.tolist()}"
    return f"{shape} {zlib.crc32(np.ascontiguousarray(numbers).view(np.uint8).data):08x}"


@dataclasses.dataclass
class _Writer:
    lines: list[str]
    equations: list[core.JaxprEqn | None]
    # By id: a program in several places is written once, at its first place, and later named by
    # that line. The program is kept, so that its id is not used twice.
    known: dict[int, tuple[int, Program]]

    def write(self, program: Program) -> None:
        if id(program) in self.known:
            self._add(f"as line {self.known[id(program)][0]}", None)
            return
        self.known[id(program)] = len(self.lines), program
        opened = jaxprs.open_jaxpr(program)
        constants = [write_value(x) for x in jaxprs.consts_of(program)]
        # Variables are numbered in their order, so equal programs have equal numbers.
        names: dict[core.Var, int] = {}
        inputs = [self._define(x, names) for x in (*opened.constvars, *opened.invars)]
        self._add(f"inputs {inputs} constants {constants}", None)
        for eqn in opened.eqns:
            self._write_equation(eqn, names)
        self._add(f"results {[self._read(x, names) for x in opened.outvars]}", None)

    def _write_equation(self, eqn: core.JaxprEqn, names: dict[core.Var, int]) -> None:
        params = {k: write_value(x) for k, x in sorted(eqn.params.items())}
        operands = ", ".join(self._read(x, names) for x in eqn.invars)
        results = ", ".join(self._define(x, names) for x in eqn.outvars)
        settings = ", ".join(f"{k}={x}" for k, x in params.items() if x)
        self._add(f"{results} = {eqn.primitive.name}({operands}) {settings}", eqn)
        for _, value in sorted(eqn.params.items()):
            for inner in jaxprs.programs_of([value]):
                self.write(inner)

    def _define(self, variable: core.Var, names: dict[core.Var, int]) -> str:
        names[variable] = len(names)
        return f"{len(names) - 1}:{_write_type(variable)}"

    def _read(self, atom: Atom, names: dict[core.Var, int]) -> str:
        if isinstance(atom, core.Literal):
            return f"{write_value(atom.val)}:{_write_type(atom)}"
        return str(names.get(atom, "?"))  # unknown only in a malformed program

    def _add(self, line: str, eqn: core.JaxprEqn | None) -> None:
        self.lines.append(line)
        self.equations.append(eqn)


def _write_type(atom: Atom) -> str:
    dtype = jaxprs.dtype_of(atom)
    if dtype is None:
        return type(atom.aval).__name__
    weak = "~" if is_weakly_typed(atom.aval) else ""
    return f"{weak}{dtype}[{','.join(map(str, jaxprs.shape_of(atom)))}]"
