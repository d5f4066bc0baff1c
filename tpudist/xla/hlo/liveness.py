"""What a compiled program holds at its peak, read from XLA's own buffer assignment.

With `xla_dump_to` the compiler writes which value lives where in memory (`buffer-assignment.txt`)
and from when to when (`live-range.txt`). Both together say which values fill the memory when it is
fullest. The sizes are the compiler's own, padding included.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.buffers import Buffer
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$")
_ARGUMENT = re.compile(r"\bparameter (\d+)|\bmaybe-live-out")
_COLOR = re.compile(r"\bcolor (\d+)")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^ {>]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^\s+(?P<name>[^ {]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")
# They hand on what another instruction made.
_HANDED_ON = frozenset(
    "parameter get-tuple-element tuple while conditional call bitcast copy copy-start copy-done "
    "async-start async-update async-done custom-call broadcast".split()
)
# So many in a row are looked through.
_MOST_ADDED = 8


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program in its temporary memory.

    Attributes:
        name: The instruction that makes it.
        index: Which element of the instruction's tuple it is, such as "3" or "0,1"; "" for all.
        shape: Its HLO shape.
        num_bytes: Its size in memory, with padding.
        offset: Where in the temporary memory it begins.
        start: The first position in the schedule at which it is held.
        end: The last such position.
    """

    name: str
    index: str
    shape: str
    num_bytes: int
    offset: int
    start: int
    end: int


def temporaries(buffers: str, color: int = shapes.HBM) -> list[Value]:
    """The values in the temporary memory of one memory space.

    Args:
        buffers: What XLA wrote: its buffer assignment and its live ranges, one after the other.
        color: The memory space.
    """
    ranges = {}
    placed = []
    inside = False
    for line in buffers.splitlines():
        if allocation := _ALLOCATION.match(line):
            inside = "preallocated-temp" in allocation[2] and _color(allocation[2]) == color
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
    """What the program needs of the device's main memory in all; 0 without buffers."""
    return sum(
        int(allocation[1])
        for allocation in map(_ALLOCATION.match, buffers.splitlines())
        if allocation and _color(allocation[2]) == shapes.HBM
    )


def peak(values: Iterable[Value]) -> tuple[int, int]:
    """The most bytes that the values take at one time, and that time.

    Values that share their memory, as a loop's state and what the loop makes of it, count once.
    """
    most, time, total = 0, 0, 0
    held: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    # An instruction still reads what ends with it while it writes what begins with it: memory is
    # given back one position after the end, and there before any is taken (-1 sorts before 1).
    starts = [(x.start, 1, x) for x in values]
    ends = [(x.end + 1, -1, x) for _, _, x in starts]
    for when, change, value in sorted(starts + ends, key=lambda x: x[:2]):
        # Of the values at one place, which share it, the largest counts; it may end before others.
        sizes = held[value.offset]
        before = max(sizes, default=0)
        sizes[value.num_bytes] += change
        if not sizes[value.num_bytes]:
            del sizes[value.num_bytes]
        total += max(sizes, default=0) - before
        if total > most:
            most, time = total, when
    return most, time


def largest(buffers: str, module: Module | None = None, names: Sequence[str] = ()) -> list[Buffer]:
    """The temporaries in the device's main memory at the peak, largest first.

    Args:
        buffers: See `temporaries`.
        module: The program, which knows what each value is for.
        names: What the user calls its arguments, in their order.
    """
    values = temporaries(buffers)
    _, time = peak(values)
    described = _Descriptions(module, names)
    at_offset: dict[int, list[Value]] = collections.defaultdict(list)
    for value in values:
        at_offset[value.offset].append(value)
    found = []
    for sharing in at_offset.values():
        held = [x for x in sharing if x.start <= time <= x.end]
        if held:
            value = max(held, key=lambda x: x.num_bytes)
            if not value.shape.startswith("("):  # a table of the elements' addresses
                found.append(described.buffer(value, sharing))
    return sorted(found, key=lambda x: -x.num_bytes)


def arguments(
    buffers: str, module: Module | None = None, names: Sequence[str] = ()
) -> list[Buffer]:
    """The program's arguments, and its outputs that do not reuse their memory, largest first.

    Args:
        buffers: See `temporaries`.
        module: The program, which knows what each value is for.
        names: What the user calls the arguments, in their order.
    """
    described = _Descriptions(module, names)
    found = []
    size, name = None, ""
    for line in buffers.splitlines():
        if allocation := _ALLOCATION.match(line):
            wanted = _ARGUMENT.search(allocation[2])
            is_here = wanted and _color(allocation[2]) == shapes.HBM
            size = int(allocation[1]) if is_here else None
            number = int(wanted[1]) if wanted and wanted[1] else len(names)
            name = names[number] if number < len(names) else ""
        elif size is not None and (match := _VALUE.match(line)):
            if int(match["size"]) == size and int(match["offset"]) == 0:
                value = Value(match["name"], "", match["shape"], size, 0, 0, 0)
                buffer = described.buffer(value)
                found.append(dataclasses.replace(buffer, name=name or buffer.name))
                size = None
    return sorted(found, key=lambda x: -x.num_bytes)


class _Descriptions:
    """Says what values are for, from the program that holds them."""

    def __init__(self, module: Module | None, names: Sequence[str]):
        self._names = names
        self._entry = module.entry.name if module else ""
        self._instructions = {
            name: instruction
            for computation in (module.computations.values() if module else ())
            for name, instruction in computation.instructions.items()
        }

    def buffer(self, value: Value, sharing: Sequence[Value] = ()) -> Buffer:
        """Describes a value by the instruction that computed it, also if it was handed on since.

        Args:
            value: The value.
            sharing: The values that begin at the same place in memory, at any time.
        """
        maker = value
        if not self._computes(value):
            made = [x for x in sharing if x.num_bytes == value.num_bytes and self._computes(x)]
            maker = min(made, key=lambda x: _difference(x, value), default=value)
        instruction = self._skip_casts(maker.name)
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
        return instruction is not None and instruction.opcode not in _HANDED_ON

    def _skip_casts(self, name: str) -> Instruction | None:
        """What the compiler added, such as a cast, stands for the operand that it casts."""
        instruction = self._instructions.get(name)
        for _ in range(_MOST_ADDED):
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
    """How little reason there is to think that `maker` is what `value` was before."""
    return maker.shape != value.shape, abs(maker.start - value.start)


def _color(allocation: str) -> int:
    found = _COLOR.search(allocation)
    return int(found[1]) if found else shapes.HBM
