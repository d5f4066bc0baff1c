"""Counts the bytes that instructions move to and from a device's main memory (HBM).

An instruction reads its operands and writes its results, including padding. Arrays in VMEM (memory
space 1) cost nothing. The same holds for tuples, bitcasts and other names of the same memory, such
as a result that is an operand updated in place. If an array is sliced, only the slice is read.
"""

import dataclasses

from tpudist.xla.hlo import collective_ops, shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction

# Opcodes that move nothing: they name values, or their computations and transfers count elsewhere.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all"
    " opt-barrier partition-id replica-id async-start async-update async-done add-dependency"
    " recv iota rng-get-and-update-state".split()
).union(collective_ops.KINDS)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
# Opcodes that read and write only one part of an array, or that do so asynchronously.
_MOVES = frozenset(
    "dynamic-slice slice gather dynamic-update-slice copy-start slice-start dynamic-slice-start"
    " dynamic-update-slice-start".split()
)
# Opcodes whose result has the elements of their operand.
_PASS_ON = ("bitcast", "reshape", "copy", "convert")
_ALLOCATES = '="AllocateBuffer"'


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


def num_bytes(module: Module, instruction: Instruction) -> float:
    """Returns the bytes to and from HBM of one run of an instruction."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or _ALLOCATES in instruction.attributes:
        return 0.0
    if opcode == "fusion":
        return _fusion_bytes(module, instruction)
    if opcode in _MOVES:
        ends = ends_of_copy(module, instruction)
        assert ends is not None
        return float(ends.moved.padded_bytes * sum(map(_is_in_hbm, (ends.source, ends.target))))
    if opcode.endswith("-start"):
        return 0.0  # a collective, which the network's own engine reads and writes
    operands = module.operands_of(instruction)
    arrays = [array for operand in operands for array in operand.arrays] + [*instruction.arrays]
    return float(sum(array.padded_bytes for array in arrays if _is_in_hbm(array)))


def _is_in_hbm(array: shapes.Array) -> bool:
    return array.memory_space == shapes.HBM


def _fusion_bytes(module: Module, fusion: Instruction) -> float:
    callee = module.contents_of(fusion)
    total = 0.0
    operands = module.operands_of(fusion)
    for number, parameter in callee.parameters.items():
        if all(_is_in_hbm(array) for array in operands[number].arrays):
            total += _count_read_bytes(module, callee, parameter)
    root = callee.root
    results = [root]
    if root.opcode == "tuple":
        results = [callee.instructions[name] for name in root.operands]
    # A result that is a tuple has several arrays; the shape of the fusion lists them all.
    for result, array in zip(results, fusion.arrays, strict=False):
        if _is_in_hbm(array):
            total += _count_written_bytes(module, callee, result, array)
    return total


def _count_read_bytes(module: Module, computation: Computation, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of a value in HBM: all of it, or only slices."""
    full, total = sum(array.padded_bytes for array in value.arrays), 0.0
    for user in computation.users.get(value.name, ()):
        opcode, first = user.opcode, user.operands[0] == value.name
        if opcode in _SLICES and first:
            total += user.arrays[0].padded_bytes
        elif opcode in _PASS_ON:
            total += _count_read_bytes(module, computation, user)
        elif opcode == "fusion":
            inner = module.contents_of(user)
            numbers = [n for n, name in enumerate(user.operands) if name == value.name]
            total += sum(_count_read_bytes(module, inner, inner.parameters[n]) for n in numbers)
        elif (opcode in _UPDATES and first) or opcode in (*collective_ops.KINDS, "tuple"):
            continue  # updated in place, sent by the network's own engine, or only a name
        elif opcode == "custom-call" and "AsyncCollective" in user.attributes:
            continue
        else:
            return full  # one user reads all of it, and the other users share that read
    return min(full, total)


def _count_written_bytes(
    module: Module, computation: Computation, value: Instruction, array: shapes.Array
) -> float:
    """Returns the bytes that a fusion writes of a result in HBM: all of it, or only a slice."""
    while value.opcode in _PASS_ON:
        value = computation.instructions[value.operands[0]]
    if value.opcode == "dynamic-update-slice":
        return computation.instructions[value.operands[1]].arrays[0].padded_bytes
    if value.opcode == "scatter":  # reads the old numbers, adds, and writes
        return 2 * computation.instructions[value.operands[-1]].arrays[0].padded_bytes
    if value.opcode == "fusion":
        inner = module.contents_of(value)
        if inner.root.opcode != "tuple":
            return _count_written_bytes(module, inner, inner.root, array)
    if value.opcode in ("parameter", *collective_ops.KINDS):
        return 0.0
    if value.opcode == "custom-call" and "AsyncCollective" in value.attributes:
        return 0.0
    return array.padded_bytes
