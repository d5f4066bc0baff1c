"""Counts the operations of an instruction on the vector units of a TPU.

XLA's cycles for simple elementwise instructions model the memory, not the vector units: by them, a
sum of two bfloat16 arrays of 512 MiB has 0.66 of the measured bandwidth on v5e, and a constant that
is written has 0.29 (`instruction_time`, rule 1). Their operations take a tenth of that time.
"""

import math
import re

from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

# They compute nothing: names, or numbers that the others read.
_FREE = frozenset(
    "parameter constant iota broadcast bitcast tuple get-tuple-element slice dynamic-slice"
    " dynamic-update-slice".split()
)
# Each is one operation per number of its result, as in kernels (`instruction_time`, rule 3).
_ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast-convert cbrt ceil clamp compare convert cosine divide erf"
    " exponential exponential-minus-one floor is-finite log log-plus-one logistic maximum"
    " minimum multiply negate not or pad popcnt power reduce-precision remainder"
    " round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic"
    " shift-right-logical sign sine sqrt subtract tan tanh xor".split()
)
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)([^}]*)\}")
_PADS_ONLY = re.compile(r" pad=([\dx_]+)")  # neither strides nor dilations
_COMBINE = re.compile(r"\bto_apply=%?([\w.-]+)")
# Custom calls that split complex numbers into two arrays, or join them.
_COMPLEX = ('="X64Combine"', '="X64SplitHigh"', '="X64SplitLow"')


def count(module: Module, instruction: Instruction) -> int | None:
    """Returns the number of operations; None if numbers also move, as in a transposed copy."""
    total = 0
    for part in module.parts_of(instruction):
        if part.opcode in _ELEMENTWISE:
            total += sum(map(_elements_in_tiles, part.arrays))
        elif part.opcode == "reduce":
            # The first half of the operands has the arrays, the other half their initial values.
            operands = module.operands_of(part)
            arrays = [x for operand in operands[: len(operands) // 2] for x in operand.arrays]
            total += sum(map(_elements_in_tiles, arrays))
        elif part.opcode == "reduce-window":
            total += _window_operations(module, part)
        elif part.opcode not in _FREE and not is_plain_copy(module, part):
            return None
    return total


def _window_operations(module: Module, instruction: Instruction) -> int:
    """Returns the operations of a `reduce-window`, which combines all numbers of each window.

    They are a lower bound: machine programs for v5e of cumulative sums, maxima and `logaddexp` of
    128 numbers take up to 6 times as long, and that of a max pool of 3 x 3 takes 0.9 times.
    """
    window = _WINDOW.search(instruction.attributes)
    combine = _COMBINE.search(instruction.attributes)
    if window is None or combine is None:
        return 0
    parts = module.computations[combine[1]].instructions.values()
    combines = max(1, sum(part.opcode in _ELEMENTWISE for part in parts))
    sizes = [int(size) for size in window[1].split("x")]
    if pads := _PADS_ONLY.fullmatch(window[2]):
        # XLA writes the sum of a row that it needs for each number of the row, such as in a
        # softmax, as windows that all contain the complete row. Each number is added once.
        starts = [int(pad.partition("_")[0]) for pad in pads[1].split("x")]
        dims = module.operands_of(instruction)[0].arrays[0].dims, instruction.arrays[0].dims
        sizes = [
            1 if start >= result - 1 and size - start >= dim else size
            for size, start, dim, result in zip(sizes, starts, *dims, strict=True)
        ]
    return combines * math.prod(sizes) * sum(map(_elements_in_tiles, instruction.arrays))


def is_plain_copy(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction copies complete tiles: the two minor dims stay the same."""
    if instruction.opcode == "custom-call":
        return any(name in instruction.attributes for name in _COMPLEX)
    operands = module.operands_of(instruction)
    if instruction.opcode != "copy" or not operands or not operands[0].arrays:
        return False
    source, target = operands[0].arrays[0], instruction.arrays[0]
    return source.dims == target.dims and source.minor_to_major[:2] == target.minor_to_major[:2]


def _elements_in_tiles(array: shapes.Array) -> int:
    """Returns the elements of an array in registers, which have complete tiles."""
    return array.padded_bytes * 8 // max(1, shapes.num_bits(array.dtype))
