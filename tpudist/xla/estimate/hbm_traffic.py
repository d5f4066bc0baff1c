"""Counts the bytes that instructions move to and from a device's main memory (HBM).

An instruction reads its operands and writes its results, including padding. Arrays in VMEM (memory
space 1) cost nothing. The same holds for tuples, bitcasts and other names of the same memory, such
as a result that is an operand updated in place. If an array is sliced, only the slice is read.
"""

import functools

from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction

# Opcodes that move nothing: they name values, or their computations and transfers count elsewhere.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all"
    " opt-barrier partition-id replica-id async-start async-update async-done add-dependency"
    " all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute"
    " collective-broadcast send recv iota rng-get-and-update-state".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_SAME_BYTES = ("bitcast", "reshape", "copy", "convert")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_ALLOCATES = '="AllocateBuffer"'


def num_bytes(module: Module, instruction: Instruction) -> float:
    """Returns the bytes to and from HBM of one run of an instruction."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or _ALLOCATES in instruction.attributes:
        return 0.0
    if opcode == "fusion":
        return _fusion_bytes(module, instruction)
    operands = module.operands_of(instruction)
    if opcode in ("slice-start", "dynamic-slice-start", "copy-start"):
        # The results of a copy are (target, source, ...), of a slice (source, ..., target, ...).
        # Both read and write as many bytes as the target has.
        target = instruction.arrays[0 if opcode == "copy-start" else -2]
        ends = operands[0].arrays[0], target
        return sum(target.padded_bytes for end in ends if _is_in_hbm(end))
    if opcode == "dynamic-update-slice-start":
        update, target = operands[1].arrays[0], operands[0].arrays[0]
        return sum(update.padded_bytes for end in (update, target) if _is_in_hbm(end))
    if opcode.endswith("-start"):
        return 0.0  # a collective, which the network's own engine reads and writes
    if opcode in _SLICES:
        result = instruction.arrays[0]
        return sum(
            result.padded_bytes for end in (operands[0].arrays[0], result) if _is_in_hbm(end)
        )
    if opcode == "dynamic-update-slice":
        update = operands[1].arrays[0]
        return sum(
            update.padded_bytes for end in (update, instruction.arrays[0]) if _is_in_hbm(end)
        )
    arrays = [array for operand in operands for array in operand.arrays] + [*instruction.arrays]
    return float(sum(array.padded_bytes for array in arrays if _is_in_hbm(array)))


def _is_in_hbm(array: shapes.Array) -> bool:
    return array.memory_space == shapes.HBM


def _fusion_bytes(module: Module, fusion: Instruction) -> float:
    callee = module.computations[fusion.callee("calls") or ""]
    total = 0.0
    operands = module.operands_of(fusion)
    for number, parameter in callee.parameters.items():
        if all(_is_in_hbm(array) for array in operands[number].arrays):
            total += _count_read_bytes(module, callee, parameter)
    root = callee.root
    results = [root]
    if root.opcode == "tuple":
        results = [callee.instructions[name] for name in root.operands]
    for result, array in zip(results, fusion.arrays, strict=False):
        if _is_in_hbm(array):
            total += _count_written_bytes(module, callee, result, array)
    return total


def _count_read_bytes(module: Module, computation: Computation, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of a value in HBM: all of it, or only slices."""
    full, total = sum(array.padded_bytes for array in value.arrays), 0.0
    for user in _users(computation).get(value.name, ()):
        opcode, first = user.opcode, user.operands[0] == value.name
        if opcode in _SLICES and first:
            total += user.arrays[0].padded_bytes
        elif opcode in _SAME_BYTES:
            total += _count_read_bytes(module, computation, user)
        elif opcode == "fusion":
            inner = module.computations[user.callee("calls") or ""]
            numbers = [n for n, name in enumerate(user.operands) if name == value.name]
            total += sum(_count_read_bytes(module, inner, inner.parameters[n]) for n in numbers)
        elif (opcode in _UPDATES and first) or opcode in (*_COLLECTIVES, "tuple"):
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
    while value.opcode in _SAME_BYTES:
        value = computation.instructions[value.operands[0]]
    if value.opcode == "dynamic-update-slice":
        return computation.instructions[value.operands[1]].arrays[0].padded_bytes
    if value.opcode == "scatter":  # reads the old numbers, adds, and writes
        return 2 * computation.instructions[value.operands[-1]].arrays[0].padded_bytes
    if value.opcode == "fusion":
        inner = module.computations[value.callee("calls") or ""]
        if inner.root.opcode != "tuple":
            return _count_written_bytes(module, inner, inner.root, array)
    if value.opcode in ("parameter", *_COLLECTIVES):
        return 0.0
    if value.opcode == "custom-call" and "AsyncCollective" in value.attributes:
        return 0.0
    return array.padded_bytes


@functools.lru_cache(maxsize=4096)
def _users(computation: Computation) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for instruction in computation.instructions.values():
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    return users
