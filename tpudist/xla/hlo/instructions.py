"""The instructions of a program that XLA compiled, and the computations that they make up.

`hlo_module` reads them from the text of the program.
"""

import dataclasses
import functools
import re

from tpudist.xla.hlo import shapes, source_lines

_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|branch_computations"
    r"|called_computations|select|scatter)=(?:%?([\w.-]+)|\{([^}]*)\})"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1  # of what the TPU7x compiler leaves to SparseCores


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program.

    Attributes:
        name: Its name, unique in the program.
        opcode: Such as "fusion", "all-gather-start" or "while".
        shape: The shape of its result, as text; see `shapes.arrays`.
        operands: Names of the instructions of its computation whose results it takes.
        computation: Name of the computation it stands in.
        is_root: Whether its result is that of the computation.
        arguments: The text between its parentheses: the operands, or a parameter's number, or a
            constant's value.
        attributes: The text after its parentheses.
        line: Its whole line of text.
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
        """The computations it calls: ("body", name), ("calls", name), ..."""
        attributes = self.attributes.partition(", metadata={")[0]
        if "=" not in attributes:
            return ()
        return tuple(
            (role, name)
            for role, one, several in _CALLED.findall(attributes)
            for name in ([one] if one else re.findall(r"%?([\w.-]+)", several))
        )

    def callee(self, role: str) -> str | None:
        """The name of the computation it calls as `role`, or None."""
        return next((name for called_as, name in self.called if called_as == role), None)

    @property
    def op_name(self) -> str:
        """The path of the JAX operation it comes from; empty for what the compiler added."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def stack(self) -> tuple[str, ...]:
        """The source lines "file:line" it comes from, innermost first."""
        return self.sources.lines_of(self.attributes)

    @property
    def source(self) -> str | None:
        """The user's source line, or None."""
        return source_lines.users_line(self.stack)

    @property
    def arrays(self) -> tuple[shapes.Array, ...]:
        """The arrays of its result."""
        return shapes.arrays(self.shape)

    @property
    def cycles(self) -> int | None:
        """The clock cycles that XLA expects one run of it to take; None where XLA says nothing."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match and int(match[1]) != _UNKNOWN_CYCLES else None

    def attribute(self, name: str) -> str | None:
        """The value of a plain attribute, such as "1" of `index=1`; None where there is none."""
        match = re.search(rf'\b{name}="?([\w.-]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of a program: instructions in the order in which they run.

    Attributes:
        name: Its name.
        instructions: Its instructions by name, in order.
    """

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        instructions = list(self.instructions.values())
        return next((i for i in reversed(instructions) if i.is_root), instructions[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(parameter.arguments): parameter for parameter in found}
