"""Estimates the cycles of instructions for which XLA writes no `estimated_cycles`.

These are sorts, gathers, scatters, random bits, and custom calls of XLA's own. Their rules count
the instruction bundles of the machine programs that libtpu 0.0.50 writes for v5e (option
`xla_jf_dump_llo_text`): bundles of each loop times its iterations. A bundle takes at least a cycle.
So the cycles are the compiler's, but the rules extend few sizes to all: a plan lists them as
guessed. A vector register has 1024 numbers, 8 rows of 128 lanes.

- Gather: 568 bundles per 64 single numbers (8.9 each); 14.5 per row of 1024 float32, 40.8 per row
  of 4096 bfloat16. A chip confirms the first: 9,213 cycles for 1,024 numbers on v4
  (ayaka14732.github.io/pallas-tpu-tutorial, chapter 1.9).
- Scatter: 7.5 per single number, 7.0 per row of 256 float32, 72 to 79 per row of 1024.
- Sort: a bitonic network. For n keys, each register passes log2(n) (log2(n) + 1) / 2 stages; 65,536
  keys take 78,130 bundles (9.0 per register and stage), 8,192 keys with their positions 10.7.
- TopK of k: per register 3 bundles, and 4.2 to 5.5 for each of the k.
- RngBitGenerator: 33,000 bundles for 16 Mi numbers (2 per register).
- Linear algebra works on blocks of 128 columns, one column after the other. Bundles per column:
  56 in Cholesky, 31 to invert a triangular block, 348 in LU, 363 in QR, 28 for its helper. EighTpu
  takes 392 per column and sweep, and about ten sweeps (Golub and Van Loan, section 8.5.5).
"""

import dataclasses
import math
import re

from tpudist.xla.estimate import kernels
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction
from tpudist.xla.hlo.shapes import Array

_PER_INDEX = 8  # gather, scatter
_LANES = 128
_REGISTER = 1024
_PER_SORT_STAGE = 9
_PER_RANDOM_REGISTER = 2
_PER_COLUMN = {
    "Cholesky": 56,
    "InvertDiagBlocksLowerTriangular": 31,
    "InvertDiagBlocksUpperTriangular": 31,
    "LuRealDecompositionBlock": 348,
    "QrDecompositionBlock": 363,
    "CompactWyHelper": 28,
    "EighTpu": 10 * 392,
}
# Custom calls that name or annotate values.
_NAMES = frozenset(
    "AllocateBuffer AssumeGatherIndicesInBound ConcatBitcast GatherScatterIndicesBitpacked"
    " PartialReduce X64Combine X64SplitHigh X64SplitLow".split()
)


@dataclasses.dataclass(frozen=True)
class CycleGuess:
    """Cycles of an instruction that XLA does not estimate.

    Attributes:
        what: Kind of operation, such as "sort".
        cycles: Cycles of one run; 0 if only its bytes are known.
    """

    what: str
    cycles: float


def guess(module: Module, instruction: Instruction) -> CycleGuess | None:
    """Returns the cycles of an instruction without `estimated_cycles`, or None.

    The result is None for instructions with XLA's cycles, custom kernels, and operations whose time
    follows from their bytes, such as copies.
    """
    if instruction.cycles is not None or kernels.is_kernel(instruction):
        return None
    guesses = [
        found for part in module.parts_of(instruction) if (found := _guess_one(module, part))
    ]
    if not guesses:
        return None
    longest = max(guesses, key=lambda found: found.cycles)
    return CycleGuess(longest.what, sum(found.cycles for found in guesses))


def gather_cycles(num_slices: float, slice_size: int) -> float:
    """Returns the cycles of a gather of slices."""
    return num_slices * (_PER_INDEX + _rows(slice_size))


def scatter_cycles(num_updates: float, window: int) -> float:
    """Returns the cycles of a scatter of windows."""
    return num_updates * _PER_INDEX * _rows(window)


def _guess_one(module: Module, instruction: Instruction) -> CycleGuess | None:
    opcode = instruction.opcode
    if opcode not in ("gather", "scatter", "sort", "rng-bit-generator", "custom-call"):
        return None
    operands = [operand.arrays[0] for operand in module.operands_of(instruction) if operand.arrays]
    if opcode == "gather":
        slice_size = math.prod(_numbers(instruction, "slice_sizes"))
        num_slices = instruction.arrays[0].num_elements / max(1, slice_size)
        return CycleGuess(opcode, gather_cycles(num_slices, slice_size))
    if opcode == "scatter":
        updates = operands[-1]
        window = math.prod(updates.dims[dim] for dim in _numbers(instruction, "update_window_dims"))
        num_updates = updates.num_elements / max(1, window)
        return CycleGuess(opcode, scatter_cycles(num_updates, window))
    if opcode == "sort":
        (dim,) = _numbers(instruction, "dimensions")
        levels = math.ceil(math.log2(max(2, operands[0].dims[dim])))
        stages = levels * (levels + 1) / 2
        return CycleGuess(opcode, _PER_SORT_STAGE * stages * _registers(operands[0]))
    if opcode == "rng-bit-generator":
        return CycleGuess(
            "random bits", _PER_RANDOM_REGISTER * sum(map(_registers, instruction.arrays))
        )
    return _guess_call(instruction, operands)


def _guess_call(instruction: Instruction, operands: list[Array]) -> CycleGuess | None:
    target = instruction.attribute("custom_call_target") or "unknown"
    if target in _NAMES or not operands or "AsyncCollective" in target:
        return None
    what = f"custom call {target}"
    if target == "TopK":
        kept = instruction.arrays[0].dims[-1]
        return CycleGuess(what, (3 + 5 * kept) * _registers(operands[0]))
    if per_column := _PER_COLUMN.get(target):
        *batch, _, columns = (1, 1, *operands[0].dims)
        return CycleGuess(what, per_column * columns * math.prod(batch))
    return CycleGuess(what, 0.0)


def _registers(array: Array) -> int:
    """Returns the number of vector registers that an array fills; numbers have 32 bits there."""
    return math.ceil(array.num_elements / _REGISTER)


def _rows(num_elements: int) -> int:
    return max(1, math.ceil(num_elements / _LANES))


def _numbers(instruction: Instruction, name: str) -> list[int]:
    """Returns the numbers of an attribute such as `slice_sizes={1,1024}`."""
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", instruction.attributes)
    return [int(number) for number in match[1].split(",") if number] if match else []
