"""Counts the bytes that instructions move to and from a device's main memory (HBM).

An instruction reads its operands and writes its results, including padding. Arrays in VMEM (memory
space 1) cost nothing. The same holds for tuples, bitcasts and other names of the same memory, such
as a result that is an operand updated in place. If an array is sliced, only the slice is read, and
the complete tiles between its elements.
"""

import dataclasses
import math
import re

from tpudist.xla.estimate import kernels
from tpudist.xla.hlo import collective_ops, shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction

# Opcodes that move nothing: they name values, or their computations and transfers count elsewhere.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all"
    " opt-barrier partition-id replica-id async-start async-update async-done call-update"
    " add-dependency recv rng-get-and-update-state".split()
).union(collective_ops.KINDS)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
# Opcodes that read and write only one part of an array, or that do so asynchronously.
_MOVES = frozenset(
    "dynamic-slice slice gather dynamic-update-slice copy-start slice-start dynamic-slice-start"
    " dynamic-update-slice-start".split()
)
# Opcodes whose result has the elements of their operand: in other memory, or under another name.
_COPIES = ("copy", "convert")
_PASS_ON = (*_COPIES, "bitcast", "reshape")
_RANGE = re.compile(r"\[\d+:\d+(?::(\d+))?\]")
# Custom calls that only name memory.
_NAMES = ('="AllocateBuffer"', '="ConcatBitcast"')


@dataclasses.dataclass(frozen=True)
class CopyEnds:
    """The arrays of a copy, slice or update, asynchronous or not.

    Attributes:
        source: Array that it reads.
        target: Array that it writes.
        moved: The part that it moves: a slice or an update, or all of it.
    """

    source: shapes.Array
    target: shapes.Array
    moved: shapes.Array


def ends_of_copy(module: Module, instruction: Instruction) -> CopyEnds | None:
    """Returns the ends of a copy, slice or update; None if it has no array."""
    first, *others = module.operands_of(instruction)
    if not instruction.arrays or not first.arrays:
        return None
    opcode, operand = instruction.opcode, first.arrays[0]
    if opcode.startswith("dynamic-update-slice"):  # writes its second operand into its first
        update = others[0].arrays[0]
        return CopyEnds(update, operand, update)
    # The result of "copy-start" is (target, source, context), and that of "slice-start" is
    # ((source, indices ...), target, context).
    target = instruction.arrays[-2 if opcode.endswith("slice-start") else 0]
    return CopyEnds(operand, target, target)


def num_bytes(module: Module, instruction: Instruction, memory_space: int = shapes.HBM) -> float:
    """Returns the bytes to and from HBM, or another memory, of one run of an instruction."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0.0
    if any(name in instruction.attributes for name in _NAMES):
        return 0.0
    if opcode == "fusion":
        return _fusion_bytes(module, instruction, memory_space)
    if opcode in _MOVES:
        ends = ends_of_copy(module, instruction)
        assert ends is not None
        if _is_prefetch_of_last_step(module, instruction):
            return 0.0
        read = min(_stride(instruction) * ends.moved.padded_bytes, ends.source.padded_bytes)
        written = ends.moved.padded_bytes
        is_read, is_written = (x.memory_space == memory_space for x in (ends.source, ends.target))
        return float(read * is_read + written * is_written)
    if opcode.endswith("-start"):
        return 0.0  # a collective, which the network's own engine reads and writes
    if kernels.is_kernel(instruction):
        blocks = kernels.block_bytes(module, instruction)
        if blocks is not None:
            return blocks
    return _array_bytes(module, instruction, memory_space)


def _is_prefetch_of_last_step(module: Module, instruction: Instruction) -> bool:
    """Returns whether the end of the step makes this copy of an argument for the next step.

    XLA calls it a cross-program prefetch. The first of many steps makes the copy itself.
    """
    if "cross_program_prefetch_index" not in instruction.attributes:
        return False
    users = module.computations[instruction.computation].users
    return any(
        other is not instruction
        and other.opcode == "copy-start"
        and not any(users.get(done.name) for done in users.get(other.name, ()))
        for other in users[instruction.operands[0]]
    )


def vmem_bytes(module: Module, instruction: Instruction) -> float:
    """Returns the bytes to and from VMEM of one run of an instruction."""
    if instruction.opcode.endswith("-start"):
        return 0.0
    return num_bytes(module, instruction, shapes.VMEM)


def collective_bytes(module: Module, instruction: Instruction) -> float:
    """Returns the bytes of the operands and results in HBM of a collective.

    Returns 0 for the start of an asynchronous fusion, whose operands other operations read, too.
    """
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return _array_bytes(module, instruction, shapes.HBM)
    if opcode.removesuffix("-start") not in collective_ops.KINDS:
        return 0.0
    # The result of the start of a collective is (operands, results, contexts).
    arrays = instruction.arrays
    return float(sum(x.padded_bytes for x in arrays if x.memory_space == shapes.HBM))


def _array_bytes(module: Module, instruction: Instruction, memory_space: int) -> float:
    operands = module.operands_of(instruction)
    arrays = [array for operand in operands for array in operand.arrays] + [*instruction.arrays]
    return float(sum(x.padded_bytes for x in arrays if x.memory_space == memory_space))


def _stride(instruction: Instruction) -> int:
    """Returns the elements that are read per element of a slice: its strides inside of tiles."""
    if instruction.opcode != "slice":
        return 1
    # "slice={[0:2048:2], [0:512]}" has a range for each dim, perhaps with a stride.
    strides = [int(stride or 1) for stride in _RANGE.findall(instruction.attributes)]
    array = instruction.arrays[0]
    order = array.minor_to_major or tuple(reversed(range(len(array.dims))))
    return math.prod(strides[dim] for dim in order[:2])


def uses(module: Module, instruction: Instruction) -> bool:
    """Returns whether an operand or a result is in HBM; scalars are in registers inside a step."""
    values = (*module.operands_of(instruction), instruction)
    return any(x.memory_space == shapes.HBM and x.dims for value in values for x in value.arrays)


def _fusion_bytes(module: Module, fusion: Instruction, memory_space: int) -> float:
    callee = module.contents_of(fusion)
    scope = _Scope(module, callee)
    operands = module.operands_of(fusion)
    total = sum(
        _count_read_bytes(scope, parameter)
        for number, parameter in callee.parameters.items()
        if all(array.memory_space == memory_space for array in operands[number].arrays)
    )
    root = callee.root
    results = [root] * len(fusion.arrays)  # one operation may have several results, as a sort has
    if root.opcode == "tuple":
        results = [callee.instructions[name] for name in root.operands]
    # A result that is a tuple has several arrays; the shape of the fusion lists them all.
    for result, array in zip(results, fusion.arrays, strict=False):
        if array.memory_space == memory_space:
            total += _count_written_bytes(scope, result, array)
    return total


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The contents of a fusion, and the fusion around it whose contents `fusion` belongs to."""

    module: Module
    contents: Computation
    fusion: Instruction | None = None
    around: "_Scope | None" = None

    def inside(self, fusion: Instruction) -> "_Scope":
        return _Scope(self.module, self.module.contents_of(fusion), fusion, self)

    def operand(self, parameter: Instruction) -> "tuple[_Scope, Instruction] | None":
        """Returns what a parameter of an inner fusion is in the fusion around it, and its scope."""
        if self.around is None or self.fusion is None:
            return None
        name = self.fusion.operands[int(parameter.arguments)]
        return self.around, self.around.contents.instructions[name]


def _count_read_bytes(scope: _Scope, value: Instruction, *, is_copied: bool = False) -> float:
    """Returns the bytes that a fusion reads of a value in HBM: all of it, or only slices.

    Args:
        scope: Contents of the fusion.
        value: Parameter of the fusion, or the same data under another name.
        is_copied: Whether the data was copied or converted on the way from the parameter.
    """
    full, total = sum(array.padded_bytes for array in value.arrays), 0.0
    for user in scope.contents.users.get(value.name, ()):
        opcode, first = user.opcode, user.operands[0] == value.name
        if opcode in _SLICES and first:
            total += _stride(user) * user.arrays[0].padded_bytes
        elif opcode in _PASS_ON:
            is_copy = is_copied or opcode in _COPIES
            read = _count_read_bytes(scope, user, is_copied=is_copy)
            # Of float32 that is converted to bfloat16, twice the bytes of the result are read.
            total += read * full / max(1, user.arrays[0].padded_bytes)
        elif opcode == "fusion":
            inner = scope.inside(user)
            numbers = [n for n, name in enumerate(user.operands) if name == value.name]
            total += sum(
                _count_read_bytes(inner, inner.contents.parameters[n], is_copied=is_copied)
                for n in numbers
            )
        elif opcode == "tuple" and is_copied:
            return full
        elif (opcode in _UPDATES and first) or opcode in (*collective_ops.KINDS, "tuple"):
            continue  # updated in place, sent by the network's own engine, or only a name
        elif opcode == "custom-call" and "AsyncCollective" in user.attributes:
            continue
        else:
            return full  # one user reads all of it, and the other users share that read
    if value.is_root:
        # The result of an inner fusion, such as a bitcast of a weight, is read where the fusion is.
        if scope.around is not None and scope.fusion is not None:
            total += _count_read_bytes(scope.around, scope.fusion, is_copied=is_copied)
        elif is_copied:
            return full
    return min(full, total)


def _count_written_bytes(scope: _Scope, value: Instruction, array: shapes.Array) -> float:
    """Returns the bytes that a fusion writes of a result in HBM: all of it, or only a slice."""
    instructions, is_copied = scope.contents.instructions, False
    while value.opcode in _PASS_ON:
        is_copied |= value.opcode in _COPIES
        value = instructions[value.operands[0]]
    if value.opcode in _UPDATES and _is_parameter(scope, instructions[value.operands[0]]):
        if value.opcode == "dynamic-update-slice":
            return instructions[value.operands[1]].arrays[0].padded_bytes
        # Reads the old numbers, adds, and writes.
        return 2 * instructions[value.operands[-1]].arrays[0].padded_bytes
    if value.opcode == "fusion":
        inner = scope.inside(value)
        if inner.contents.root.opcode != "tuple":
            return _count_written_bytes(inner, inner.contents.root, array)
    if value.opcode in ("parameter", *collective_ops.KINDS):
        copied = array.padded_bytes if is_copied else 0.0
        operand = scope.operand(value) if value.opcode == "parameter" else None
        return max(_count_written_bytes(*operand, array), copied) if operand else copied
    if value.opcode == "custom-call" and "AsyncCollective" in value.attributes:
        return 0.0
    return array.padded_bytes


def _is_parameter(scope: _Scope, value: Instruction) -> bool:
    """Returns whether a value is memory from outside of a fusion, which it can update in place."""
    while value.opcode in (*_PASS_ON, *_UPDATES):
        value = scope.contents.instructions[value.operands[0]]
    if value.opcode == "fusion":
        inner = scope.inside(value)
        return _is_parameter(inner, inner.contents.root)
    if value.opcode != "parameter":
        return False
    operand = scope.operand(value)
    return operand is None or _is_parameter(*operand)
