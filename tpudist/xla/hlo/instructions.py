"""Records for the instructions and computations of a compiled program.

`hlo_module` reads them from the text of the program. Attributes are parsed on access, because
programs are long and most questions concern few of their instructions.
"""

import dataclasses
import functools
import re

from tpudist.xla import user_code
from tpudist.xla.hlo import shapes, source_lines

_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|branch_computations"
    r"|called_computations|select|scatter)=(?:%?([\w.-]+)|\{([^}]*)\})"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The TPU7x compiler writes this number for operations that run on SparseCores.
_UNKNOWN_CYCLES = 2**63 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program.

    Attributes:
        name: Name, unique in the program.
        opcode: Operation, such as "fusion", "all-gather-start" or "while".
        shape: Shape of the result, as text; see `shapes.arrays`.
        operands: Names of the instructions of the same computation whose results it reads.
        computation: Name of the computation that contains it.
        is_root: Whether its result is the result of the computation.
        arguments: Text between the parentheses: the operands, a parameter's number, or a
            constant's value.
        attributes: Text after the parentheses.
        line: Complete line of text.
        sources: Tables of source lines of the program.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    computation: str
    is_root: bool
    arguments: str = dataclasses.field(repr=False)
    attributes: str = dataclasses.field(repr=False)
    line: str = dataclasses.field(repr=False)
    sources: source_lines.Sources = dataclasses.field(repr=False)

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """The called computations: ("body", name), ("calls", name), ..."""
        attributes = self.attributes.partition(", metadata={")[0]
        if "=" not in attributes:
            return ()
        return tuple(
            (role, name)
            for role, single, several in _CALLED.findall(attributes)
            for name in ([single] if single else re.findall(r"%?([\w.-]+)", several))
        )

    def callee(self, role: str) -> str | None:
        """Returns the name of the computation that is called as `role`, or None."""
        return next((name for called_as, name in self.called if called_as == role), None)

    @property
    def op_name(self) -> str:
        """Path of the JAX operation; empty if the compiler added the instruction."""
        match = _OP_NAME.search(self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def stack(self) -> tuple[str, ...]:
        """The source lines "file:line" of the JAX operation, innermost first."""
        return self.sources.lines_of(self.attributes)

    @property
    def source(self) -> str | None:
        """The user's source line, or None."""
        return user_code.users_line(self.stack)

    @property
    def arrays(self) -> tuple[shapes.Array, ...]:
        """The arrays of the result."""
        return shapes.arrays(self.shape)

    @property
    def cycles(self) -> int | None:
        """XLA's estimate of the clock cycles of one run; None if XLA has none."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match and int(match[1]) != _UNKNOWN_CYCLES else None

    def attribute(self, name: str) -> str | None:
        """Returns the value of a plain attribute, such as "1" for `index=1`; None without it."""
        match = re.search(rf'\b{name}="?([\w.-]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of a program: instructions in the order in which they run.

    Attributes:
        name: Name of the computation.
        instructions: Instructions by name, in order.
    """

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        instructions = list(self.instructions.values())
        return next((i for i in reversed(instructions) if i.is_root), instructions[-1])

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result, in order, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        instructions = self.instructions.values()
        return {int(i.arguments): i for i in instructions if i.opcode == "parameter"}
