"""Reads the whole of a program that XLA compiled: what it runs, in which order, and how often.

The text of a compiled program is its schedule: the instructions of a computation run in the order
in which they stand. Loops stand there once; how often they run is read from their conditions. What
is inside a fusion is no instruction of its own, it is how the fusion computes.

Shapes are per device. Source: `jax.stages.Compiled.as_text()`; syntax: xla/hlo/parser.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping

from tpudist.xla.hlo import replica_groups, source_lines, trip_counts
from tpudist.xla.hlo.instructions import Computation, Instruction

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_BRACKETS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
_CLOSED = re.compile(r"\}(?:$|, execution_thread| //)")
_OPERAND = re.compile(r"%([\w.-]+)")
_NAME = re.compile(r"([\w.-]+)\s*(?:,|$)")
_FARTHEST_ORIGIN = 16
# Opcodes whose called computation the device runs in the schedule, rather than per element.
_CALLS = ("call", "call-start", "async-start", "while", "conditional")


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction that a step runs, and how often.

    Attributes:
        instruction: The instruction.
        count: How often a step runs it.
    """

    instruction: Instruction
    count: float


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
        name: Its name, such as "jit_step".
        computations: Its computations by name.
        entry: The computation that a step runs.
        num_devices: Number of devices it was compiled for.
        sources: Its tables of source lines.
        scan_lengths: How often loops run, by the `op_name` of the loop, for those whose trip count
            cannot be read from the text.
    """

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    sources: source_lines.Sources
    scan_lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def trip_counts(self) -> dict[str, int | None]:
        """How often each `while` runs its body, by its name; None where it cannot be read."""
        found = trip_counts.count_trips(self.computations)
        for name, loop in self._loops.items():
            if found[name] is None:
                found[name] = self.scan_lengths.get(loop.op_name)
        return found

    @functools.cached_property
    def unknown_trip_counts(self) -> tuple[str, ...]:
        """The loops, as "op_name" or their name, that count once since nobody knows how often."""
        unknown = (name for name, count in self.trip_counts.items() if count is None)
        return tuple(self._loops[name].op_name or name for name in unknown)

    @functools.cached_property
    def _loops(self) -> dict[str, Instruction]:
        return {
            i.name: i
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "while"
        }

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results `instruction` takes."""
        siblings = self.computations[instruction.computation].instructions
        return [siblings[name] for name in instruction.operands if name in siblings]

    def origin(self, instruction: Instruction) -> Instruction:
        """The instruction that says which source lines `instruction` comes from.

        What the compiler added says nothing, but works on the result of something that does; or,
        as the gather of a parameter since libtpu 0.0.50, is there for something that does. It is
        `instruction` itself where nothing does.
        """
        forward = () if instruction.opcode == "parameter" else (self._first_user,)
        for nearby in (self._source_operand, *forward):
            nearest: Instruction | None = instruction
            for _ in range(_FARTHEST_ORIGIN):
                if found := next((i for i in self._inside(nearest) if i.stack), None):
                    return found
                nearest = nearby(nearest)
                if nearest is None:
                    break
        return instruction

    def _first_user(self, instruction: Instruction) -> Instruction | None:
        """The first instruction that works on the result of one."""
        siblings = self.computations[instruction.computation].instructions.values()
        return next((user for user in siblings if instruction.name in user.operands), None)

    def _source_operand(self, instruction: Instruction) -> Instruction | None:
        """What an instruction works on: its first operand, in most cases.

        It is what an update puts in, and the part of a tuple that is named.
        """
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
            maker = self.computations[operand.computation].root  # of the iteration before
        if maker.opcode != "tuple":
            return operand
        return self.operands_of(maker)[int(index)]

    @functools.cached_property
    def _bodies(self) -> set[str]:
        return {loop.callee("body") or "" for loop in self._loops.values()}

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction itself and, if it is a fusion, what it holds, the last one first."""
        yield instruction
        callee = self.computations.get(instruction.callee("calls") or "")
        if instruction.opcode == "fusion" and callee:
            yield from reversed(callee.instructions.values())

    def executions(self, cost: Callable[[Instruction], float] | None = None) -> Iterator[Execution]:
        """Every scheduled instruction of a step, with how often it runs.

        What is inside fusions is left out, and so is the body of what runs per element (the sum of
        a reduction). Of a conditional, the most expensive branch is taken.

        Args:
            cost: What one run of an instruction costs, to choose branches by; XLA's estimated
                cycles unless given.
        """
        cost = cost or (lambda instruction: instruction.cycles or 0)
        return self._executions(self.entry, 1.0, cost)

    def _executions(
        self, computation: Computation, count: float, cost: Callable[[Instruction], float]
    ) -> Iterator[Execution]:
        for instruction in computation.instructions.values():
            yield Execution(instruction, count)
            if instruction.opcode not in _CALLS:
                continue
            trips = self.trip_counts[instruction.name] if instruction.opcode == "while" else 1
            inner = count * (1 if trips is None else trips)
            for callee in self.callees_in_schedule(instruction, cost):
                yield from self._executions(callee, inner, cost)

    def callees_in_schedule(
        self, instruction: Instruction, cost: Callable[[Instruction], float]
    ) -> list[Computation]:
        """The computations that the device runs, instruction by instruction, for `instruction`."""
        if instruction.opcode not in _CALLS:
            return []
        callees = [
            self.computations[name] for _, name in instruction.called if name in self.computations
        ]
        if instruction.opcode != "conditional" or not callees:
            return callees

        def branch_cost(branch: Computation) -> float:
            return sum(e.count * cost(e.instruction) for e in self._executions(branch, 1.0, cost))

        return [max(callees, key=branch_cost)]


def parse(text: str, *, scan_lengths: Mapping[str, int] | None = None) -> Module:
    """Reads the text of a compiled program, in time linear in its length.

    Args:
        text: The HLO text of the program, `compiled.as_text()`.
        scan_lengths: How often loops run, by the `op_name` of the loop, for those whose trip count
            cannot be read from the text; `jax.make_jaxpr` knows the lengths of scans.

    Raises:
        ValueError: The text holds no computation to start from.
    """
    sources = source_lines.Sources(text)
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _whole_lines(text):
        if line.startswith("  "):
            if current is not None and (found := _instruction(line, current.name, sources)):
                current.instructions[found.name] = found
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
        replica_groups.num_devices(text),
        sources,
        dict(scan_lengths or {}),
    )


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of the text, those joined over which one instruction is written.

    The metadata of a kernel is written over several lines, of which none but the first is indented.
    """
    whole: list[str] = []
    for line in text.splitlines():
        if whole and not line.startswith("  ") and not _CLOSED.match(line):
            whole.append(line)
            continue
        if whole:
            yield "".join(whole)
        whole = [line] if line.startswith("  ") else []
        if not whole:
            yield line
    yield "".join(whole)


def _instruction(line: str, computation: str, sources: source_lines.Sources) -> Instruction | None:
    left, equals, _ = line.partition(" = ")
    if not equals:
        return None
    begin = len(left) + 3
    # The shape may hold spaces and parentheses, but never " word(": that is the opcode.
    opcode = _OPCODE.search(line, begin - 1)
    if opcode is None:
        return None
    end = _find_closing(line, opcode.end())
    arguments = line[opcode.end() : end]
    is_root = left.startswith("  ROOT ")
    return Instruction(
        name=left[7 if is_root else 2 :].lstrip("%"),
        opcode=opcode[1],
        shape=line[begin : opcode.start()],
        operands=_operands(opcode[1], arguments),
        computation=computation,
        is_root=is_root,
        arguments=arguments,
        attributes=line[end + 1 :],
        line=line,
        sources=sources,
    )


def _operands(opcode: str, arguments: str) -> tuple[str, ...]:
    if opcode in ("parameter", "constant") or not arguments:
        return ()
    if "%" in arguments:
        return tuple(_OPERAND.findall(arguments))
    return tuple(_NAME.findall(arguments))


def _find_closing(line: str, begin: int) -> int:
    """Where the parenthesis that was opened before `begin` is closed."""
    close = line.find(")", begin)
    if line.find("(", begin, close) < 0 and line.find('"', begin, close) < 0:
        return close if close >= 0 else len(line)
    depth = 1
    for bracket in _BRACKETS.finditer(line, begin):
        depth += {"(": 1, ")": -1}.get(bracket[0], 0)
        if depth == 0:
            return bracket.start()
    return len(line)
