"""Parses the text of a compiled program: its instructions, their order and their run counts.

The text is a schedule: the instructions of a computation run in the order in which they appear. A
loop appears once, and `trip_counts` reads its run count from its condition. The contents of a
fusion are not instructions of the schedule; they define what the fusion computes.

Shapes are per device. Source: `jax.stages.Compiled.as_text()`; syntax: xla/hlo/parser.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from tpudist.xla.hlo import replica_groups, source_lines
from tpudist.xla.hlo.choices import Choices, Shares
from tpudist.xla.hlo.instructions import Computation, Instruction
from tpudist.xla.hlo.trip_counts import count_trips

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_BRACKETS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
# The line that closes a computation. Metadata of a kernel may have lines that begin with "}", too,
# so what follows the brace counts.
_CLOSED = re.compile(r"\}(?:$|, execution_thread| //)")
_OPERAND = re.compile(r"%([\w.-]+)")
_NAME = re.compile(r"(?:^|(?<= )|(?<=/))([\w.-]+)(?=,|$)")
# Number of instructions that `origin` follows in one direction. Chains of copies that the compiler
# adds are shorter.
_MAX_DISTANCE_TO_ORIGIN = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
        name: Name of the program, such as "jit_step".
        computations: All computations by name.
        entry: Computation that a step runs.
        num_devices: Number of devices that the program was compiled for.
        sources: Tables of source lines.
        choices: Choices that the text does not show.
        has_cycles: Whether the compiler has estimated cycles, which it does when it generates
            machine code.
    """

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    sources: source_lines.Sources
    choices: Choices = Choices()
    has_cycles: bool = True

    @functools.cached_property
    def trip_counts(self) -> dict[str, int | None]:
        """Number of times that each `while` runs its body, by name; None if it is unknown."""
        return count_trips(self.computations)

    @functools.cached_property
    def unknown_trip_counts(self) -> tuple[str, ...]:
        """The `op_name`, or name, of each of the `unknown_loops`."""
        return tuple(loop.op_name or loop.name for loop in self.unknown_loops)

    @property
    def unknown_loops(self) -> list[Instruction]:
        """The loops with an unknown trip count, which count once."""
        return [loop for name, loop in self.loops.items() if self.trip_counts[name] is None]

    @functools.cached_property
    def loops(self) -> dict[str, Instruction]:
        """Each `while`, by name."""
        return {
            i.name: i
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "while"
        }

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results `instruction` reads."""
        siblings = self.computations[instruction.computation].instructions
        return [siblings[name] for name in instruction.operands if name in siblings]

    def shares_of(self, conditional: Instruction) -> Shares | None:
        """Returns the shares of the branches, in the order of the text; None if unknown."""
        shares = self.choices.branches.get(len(conditional.called))
        which = self.operands_of(conditional)[:1]
        if shares and which and which[0].arrays[:1] and which[0].arrays[0].dtype == "pred":
            return shares[::-1]  # the first branch is that for true
        return shares

    def contents_of(self, fusion: Instruction) -> Computation:
        """Returns the computation that a fusion computes."""
        return self.computations[fusion.callee("calls") or ""]

    def parts_of(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions of a fusion, also of those inside it; else the instruction."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for inner in self.contents_of(instruction).instructions.values():
            yield from self.parts_of(inner)

    def origin(self, instruction: Instruction) -> Instruction:
        """Returns the nearest instruction with source lines; `instruction` itself if none has any.

        The compiler gives no source lines to the instructions that it adds.
        """
        # An added instruction usually works on the result of an instruction with lines. The
        # exception, since libtpu 0.0.50, is an all-gather of a parameter: a parameter has no lines,
        # but the user of the gathered value does, so the search goes forward as well. A parameter
        # itself has many users, so its first user says nothing about it.
        forward = () if instruction.opcode == "parameter" else (self._first_user,)
        for follow in (self._source_operand, *forward):
            nearest: Instruction | None = instruction
            for _ in range(_MAX_DISTANCE_TO_ORIGIN):
                if origin := next((i for i in self._inside(nearest) if i.stack), None):
                    return origin
                nearest = follow(nearest)
                if nearest is None:
                    break
        return instruction

    def _first_user(self, instruction: Instruction) -> Instruction | None:
        users = self.computations[instruction.computation].users
        return next(iter(users.get(instruction.name, ())), None)

    def _source_operand(self, instruction: Instruction) -> Instruction | None:
        """Returns the operand whose data an instruction passes on; usually its first operand."""
        # The second operand of an update is the new data. For an element of a tuple, it is the
        # operand of the tuple at that index; a tuple that is the state of a loop is built at the
        # end of the loop's body.
        operands = self.operands_of(instruction)
        if instruction.opcode.removesuffix("-start") == "dynamic-update-slice":
            operands = operands[1:]
        operand = next(iter(operands), None)
        index = instruction.attribute("index")
        if operand is None or instruction.opcode != "get-tuple-element" or index is None:
            return operand
        maker = operand
        if operand.opcode == "while":
            maker = self.computations[operand.callee("body") or ""].root
        elif operand.opcode == "parameter" and operand.computation in self._bodies:
            maker = self.computations[operand.computation].root  # of the previous iteration
        if maker.opcode != "tuple":
            return operand
        return self.operands_of(maker)[int(index)]

    @functools.cached_property
    def _bodies(self) -> set[str]:
        return {loop.callee("body") or "" for loop in self.loops.values()}

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instruction and, if it is a fusion, its contents, the root first."""
        yield instruction
        callee = self.computations.get(instruction.callee("calls") or "")
        if instruction.opcode == "fusion" and callee:
            yield from reversed(callee.instructions.values())


def parse(text: str, *, choices: Choices | None = None, has_cycles: bool = True) -> Module:
    """Parses the text of a compiled program, in time linear in its length.

    Args:
        text: HLO text of the program, `compiled.as_text()`.
        choices: See `Module`.
        has_cycles: See `Module`.

    Raises:
        ValueError: If the text has no ENTRY computation.
    """
    # A computation begins with an unindented line that ends in "{", and ends with "}". Its
    # instructions are indented, one per line. Other unindented lines are the header.
    sources = source_lines.Sources(text)
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _join_lines(text):
        if line.startswith("  "):
            if current is not None and (parsed := _instruction(line, current.name, sources)):
                current.instructions[parsed.name] = parsed
        elif line.startswith("}"):
            current = None
        elif line.endswith("{") and (header := _COMPUTATION.match(line)):
            current = Computation(header["name"], {})
            computations[current.name] = current
            if header["entry"]:
                entry = current
    if entry is None:
        raise ValueError(
            f"A compiled program has an ENTRY computation, but this text of {len(text)} characters "
            f"has none; it begins with {text[:60]!r}. Pass the result of `compiled.as_text()`."
        )
    name = re.match(r"HloModule ([^\s,]+)", text)
    return Module(
        name[1] if name else "",
        computations,
        entry,
        replica_groups.count_devices(text),
        sources,
        choices or Choices(),
        has_cycles,
    )


def _join_lines(text: str) -> Iterator[str]:
    """Yields the lines of the text, with each instruction on one line."""
    # The metadata of a kernel contains line breaks. Only the first line of such an instruction is
    # indented, so an unindented line continues it, unless the line closes the computation.
    instruction: list[str] = []
    for line in text.splitlines():
        if instruction and not line.startswith("  ") and not _CLOSED.match(line):
            instruction.append(line)
            continue
        if instruction:
            yield "".join(instruction)
        instruction = [line] if line.startswith("  ") else []
        if not instruction:
            yield line
    yield "".join(instruction)


def _instruction(line: str, computation: str, sources: source_lines.Sources) -> Instruction | None:
    left, equals, _ = line.partition(" = ")
    if not equals:
        return None
    begin = len(left) + len(" = ")
    # The shape may contain spaces and parentheses, but never " word(", so that is the opcode.
    opcode = _OPCODE.search(line, begin - 1)
    if opcode is None:
        return None
    end = _find_closing(line, opcode.end())
    arguments = line[opcode.end() : end]
    name = left.removeprefix("  ").removeprefix("ROOT ").removeprefix("%")
    return Instruction(
        name=name,
        opcode=opcode[1],
        shape=line[begin : opcode.start()],
        operands=_operands(opcode[1], arguments),
        computation=computation,
        is_root=left.startswith("  ROOT "),
        arguments=arguments,
        attributes=line[end + 1 :],
        line=line,
        sources=sources,
    )


def _operands(opcode: str, arguments: str) -> tuple[str, ...]:
    if opcode in ("parameter", "constant") or not arguments:
        return ()
    # Older texts write operands as "f32[8]{0} %x", newer ones may leave out the shapes, the "%" or
    # both. Without "%", a name is the last word before a comma.
    if "%" in arguments:
        return tuple(_OPERAND.findall(arguments))
    return tuple(_NAME.findall(arguments))


def _find_closing(line: str, begin: int) -> int:
    """Returns the position where the parenthesis that was opened before `begin` is closed."""
    # Nearly always the next ")". Only tuple shapes and strings among the operands need a count.
    close = line.find(")", begin)
    if line.find("(", begin, close) < 0 and line.find('"', begin, close) < 0:
        return close if close >= 0 else len(line)
    depth = 1
    for bracket in _BRACKETS.finditer(line, begin):
        depth += {"(": 1, ")": -1}.get(bracket[0], 0)
        if depth == 0:
            return bracket.start()
    return len(line)
