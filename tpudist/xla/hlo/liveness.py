"""Finds the values in memory at a program's peak, from XLA's buffer assignment.

With `xla_dump_to` the compiler writes the place of each value in memory (`buffer-assignment.txt`)
and its first and last position in the schedule (`live-range.txt`). The sizes are the compiler's
own, including padding.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.buffers import Buffer
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

# The buffer assignment has a line per allocation, followed by the values in it, which are named
# like the instructions of the program:
#   allocation 11: size 16896, preallocated-temp:
#    value: <49 all-gather.17 @1> (size=1048576,offset=0): bf16[1024,512]{1,0:T(8,128)}
# Instead of "preallocated-temp" there may be "parameter 1, shape |...| at ShapeIndex {},
# maybe-live-out", "output shape is |...|", "thread-local", and "color 1" for a memory other than
# HBM. The live ranges are "HloLiveRange (max 15):" with the schedule, then a line
# "name{index}:first-last" per value, then "Live ranges at 9 (peak):", which on a TPU lists the
# values of all memories together, so the peak is computed here.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$")
_ARGUMENT = re.compile(r"\bparameter (\d+)|\bmaybe-live-out")
_COLOR = re.compile(r"\bcolor (\d+)")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^ {>]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^\s+(?P<name>[^ {]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")
# Opcodes that say nothing about what a value is: their result is the value of another instruction,
# or memory that is only reserved ("custom-call" of AllocateBuffer) or filled with one number
# ("broadcast"), in which an accumulator starts.
_FORWARDING = frozenset(
    "parameter get-tuple-element tuple while conditional call bitcast copy copy-start copy-done "
    "async-start async-update async-done custom-call broadcast".split()
)
_MAX_ADDED_CASTS = 8  # in a row; the compiler adds one or two


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in the temporary memory of a program.

    Attributes:
        name: Instruction that computes the value.
        index: Element of the instruction's tuple, such as "3" or "0,1"; "" for the complete result.
        shape: HLO shape.
        num_bytes: Size in memory, with padding.
        offset: First byte in the temporary memory.
        start: First position in the schedule at which the value is in memory.
        end: Last such position.
    """

    name: str
    index: str
    shape: str
    num_bytes: int
    offset: int
    start: int
    end: int


def temporaries(buffers: str, memory_space: int = shapes.HBM) -> list[Value]:
    """Returns the values in the temporary memory of one memory space.

    Args:
        buffers: XLA's buffer assignment followed by its live ranges.
        memory_space: Number of the memory space.
    """
    ranges = {}
    placed = []
    inside = False
    for line in buffers.splitlines():
        if allocation := _ALLOCATION.match(line):
            attributes = allocation[2]
            inside = "preallocated-temp" in attributes and _space(attributes) == memory_space
        elif match := _VALUE.match(line):
            if inside:
                placed.append(match)
        elif match := _RANGE.match(line):
            key = match["name"], match["index"]
            ranges[key] = int(match["start"]), int(match["end"])
    return [
        Value(key[0], key[1], x["shape"], int(x["size"]), int(x["offset"]), *ranges[key])
        for x in placed
        if (key := (x["name"], x["index"] or "")) in ranges
    ]


def total_bytes(buffers: str) -> int:
    """Returns the bytes that a program needs in the device's main memory; 0 without buffers."""
    return sum(
        int(allocation[1])
        for allocation in map(_ALLOCATION.match, buffers.splitlines())
        if allocation and _space(allocation[2]) == shapes.HBM
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes of a program in one memory space, as in `compiled_program.MemoryStats`."""

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0


def sizes(buffers: str, memory_space: int = shapes.HBM) -> Sizes:
    """Returns the bytes of arguments, outputs and temporaries in one memory space."""
    arguments = outputs = aliased = temporary = 0
    for allocation in map(_ALLOCATION.match, buffers.splitlines()):
        if allocation is None or _space(allocation[2]) != memory_space:
            continue
        size, attributes = int(allocation[1]), allocation[2]
        is_argument, is_output = "parameter " in attributes, "maybe-live-out" in attributes
        arguments += size * is_argument
        outputs += size * is_output
        aliased += size * (is_argument and is_output)
        temporary += size * ("preallocated-temp" in attributes)
    return Sizes(arguments, outputs, aliased, temporary)


def peak(values: Iterable[Value]) -> tuple[int, int]:
    """Returns the largest number of bytes in use at one time, and that position in the schedule.

    Values that share memory, such as the state of a loop before and after it, count once.
    """
    largest_total, peak_time, total = 0, 0, 0
    # For each offset, how many live values have each size.
    live: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    # A sweep over the schedule. An instruction reads its operands while it writes its result, so a
    # value is freed one position after its end. At equal positions frees come before allocations,
    # because -1 sorts before 1.
    starts = [(x.start, 1, x) for x in values]
    ends = [(x.end + 1, -1, x) for _, _, x in starts]
    for time, change, value in sorted(starts + ends, key=lambda x: x[:2]):
        # Only values at the same offset can overlap while both are live: they share their memory,
        # so the largest live one counts. It may end before the others, hence the counter and not a
        # maximum.
        sizes = live[value.offset]
        before = max(sizes, default=0)
        sizes[value.num_bytes] += change
        if not sizes[value.num_bytes]:
            del sizes[value.num_bytes]
        total += max(sizes, default=0) - before
        if total > largest_total:
            largest_total, peak_time = total, time
    return largest_total, peak_time


def largest(buffers: str, module: Module | None = None, names: Sequence[str] = ()) -> list[Buffer]:
    """Returns the temporaries in the device's main memory at the peak, largest first.

    Args:
        buffers: See `temporaries`.
        module: The program, for the operation and source line of each value.
        names: The user's names of the arguments, in order.
    """
    values = temporaries(buffers)
    _, time = peak(values)
    described = _Descriptions(module, names)
    at_offset: dict[int, list[Value]] = collections.defaultdict(list)
    for value in values:
        at_offset[value.offset].append(value)
    largest_values = []
    for sharing in at_offset.values():
        live = [x for x in sharing if x.start <= time <= x.end]
        if live:
            value = max(live, key=lambda x: x.num_bytes)
            # The memory of a tuple is a table of addresses; its elements are values of their own.
            if not value.shape.startswith("("):
                largest_values.append(described.buffer(value, sharing))
    return sorted(largest_values, key=lambda x: -x.num_bytes)


def arguments(
    buffers: str, module: Module | None = None, names: Sequence[str] = ()
) -> list[Buffer]:
    """Returns the arguments, and the outputs that do not reuse their memory, largest first.

    Args:
        buffers: See `temporaries`.
        module: The program, for the operation and source line of each value.
        names: The user's names of the arguments, in order.
    """
    described = _Descriptions(module, names)
    found = []
    # Size and name of the current allocation, until the value that fills it is found.
    size, name = None, ""
    for line in buffers.splitlines():
        if allocation := _ALLOCATION.match(line):
            argument = _ARGUMENT.search(allocation[2])
            is_in_hbm = argument and _space(allocation[2]) == shapes.HBM
            size = int(allocation[1]) if is_in_hbm else None
            number = int(argument[1]) if argument and argument[1] else None
            name = names[number] if number is not None and number < len(names) else ""
        elif size is not None and (match := _VALUE.match(line)):
            if int(match["size"]) == size and int(match["offset"]) == 0:
                value = Value(match["name"], "", match["shape"], size, 0, 0, 0)
                buffer = described.buffer(value)
                found.append(dataclasses.replace(buffer, name=name or buffer.name))
                size = None
    return sorted(found, key=lambda x: -x.num_bytes)


class _Descriptions:
    """Describes values by the instructions of their program."""

    def __init__(self, module: Module | None, names: Sequence[str]):
        self._names = names
        self._entry = module.entry.name if module else ""
        self._instructions = {
            name: instruction
            for computation in (module.computations.values() if module else ())
            for name, instruction in computation.instructions.items()
        }

    def buffer(self, value: Value, sharing: Sequence[Value] = ()) -> Buffer:
        """Describes a value by the instruction that computed it.

        Args:
            value: The value.
            sharing: Values that have the same offset in memory, at any time.
        """
        # The value of a loop or a tuple element was computed by another instruction in the same
        # memory. Of those with the same size, the most similar and nearest one is a good guess.
        maker = value
        if not self._computes(value):
            makers = [x for x in sharing if x.num_bytes == value.num_bytes and self._computes(x)]
            maker = min(makers, key=lambda x: _difference(x, value), default=value)
        instruction = self._nearest_named(maker.name)
        return Buffer(
            name=maker.name,
            shape=value.shape,
            num_bytes=value.num_bytes,
            unpadded_bytes=shapes.num_bytes(value.shape),
            op_name=self._op_name(instruction) if instruction else "",
            source=instruction.source if instruction else None,
        )

    def _computes(self, value: Value) -> bool:
        instruction = self._instructions.get(value.name)
        return instruction is not None and instruction.opcode not in _FORWARDING

    def _nearest_named(self, name: str) -> Instruction | None:
        """Returns the nearest instruction with an `op_name`, following first operands.

        The compiler gives no `op_name` to casts that it adds. The result may have none either.
        """
        instruction = self._instructions.get(name)
        for _ in range(_MAX_ADDED_CASTS):
            if instruction is None or instruction.op_name or not instruction.operands:
                break
            instruction = self._instructions.get(instruction.operands[0])
        return instruction

    def _op_name(self, instruction: Instruction) -> str:
        if instruction.opcode == "parameter" and instruction.computation == self._entry:
            number = int(instruction.arguments)
            if number < len(self._names):
                return self._names[number]
        return instruction.op_name


def _difference(maker: Value, value: Value) -> tuple[bool, int]:
    """Returns a sort key: the same shape first, then the nearest start in the schedule."""
    return maker.shape != value.shape, abs(maker.start - value.start)


def _space(allocation: str) -> int:
    """Returns the number of the memory space of an allocation."""
    color = _COLOR.search(allocation)
    return int(color[1]) if color else shapes.HBM
