"""Counts the floating-point operations of matrix multiplications.

A TPU runs every matrix multiplication as a convolution, often with a window that is mostly padding.
Only positions inside the array count, so both forms of a multiplication of [m, k] by [k, n] have
2 m k n operations. Elementwise operations are left out, because a chip's peak in FLOP/s does not
count them. XLA's own count (`cost_analysis()`) is not used: it counts the body of a loop once.
"""

import functools
import math
import re

import numpy as np

from tpudist.array_types import Shape
from tpudist.xla.estimate import kernels
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_PRECISION = re.compile(r"\boperand_precision=\{(\w+),(\w+)\}")
# Passes over bfloat16 for a product of float32 (docs.jax.dev: jax.lax.Precision).
_PASSES = {"default": 1, "high": 3, "highest": 6}
_CONTRACTING = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


def instruction_flops(module: Module, instruction: Instruction) -> float:
    """Returns the operations of one run of an instruction, including the contents of a fusion.

    Returns 0 for loops, calls and conditionals, whose bodies are counted separately.
    """
    return sum(_flops_of_part(module, part) for part in module.parts_of(instruction))


def _flops_of_part(module: Module, instruction: Instruction) -> float:
    if instruction.opcode in ("dot", "convolution"):
        operands = module.operands_of(instruction)
        lhs, rhs = (operand.arrays[0] for operand in operands[:2])
        count = _dot if instruction.opcode == "dot" else _convolution
        return count(instruction.attributes, lhs.dims, rhs.dims, instruction.arrays[0].dims)
    if instruction.opcode == "custom-call":
        return kernels.flops(module, instruction) or 0.0
    return 0.0


def kinds_of_products(module: Module, instruction: Instruction) -> set[str]:
    """Returns the kinds of numbers that an instruction multiplies; see `chips.kind_of_products`."""
    kinds = set()
    for part in module.parts_of(instruction):
        if part.opcode in ("dot", "convolution"):
            dtypes = [operand.arrays[0].dtype for operand in module.operands_of(part)[:2]]
            operands = ((shapes.num_bits(x), x.startswith("f")) for x in dtypes)
            kinds.add(chips.kind_of_products(operands))
    return kinds


def num_passes(module: Module, instruction: Instruction) -> int:
    """Returns how often the matrix unit multiplies: more than once for precise float32 products."""
    passes = 1
    for part in module.parts_of(instruction):
        precision = _PRECISION.search(part.attributes)
        if precision and any(x.dtype == "f32" for y in module.operands_of(part) for x in y.arrays):
            passes = max(passes, *(_PASSES.get(x, 1) for x in precision.groups()))
    return passes


def is_convolution(module: Module, instruction: Instruction) -> bool:
    """Returns whether the user convolves: XLA writes each product as a convolution, too."""
    parts = (instruction, *module.parts_of(instruction))
    return any("conv_general_dilated" in part.op_name for part in parts)


def _dot(attributes: str, lhs: Shape, rhs: Shape, out: Shape) -> float:
    contracting = _CONTRACTING.search(attributes)
    dims = [int(dim) for dim in contracting[1].split(",") if dim] if contracting else []
    return 2.0 * math.prod(out) * math.prod(lhs[dim] for dim in dims)


def _convolution(attributes: str, lhs: Shape, rhs: Shape, out: Shape) -> float:
    # Counts like XLA's `HloCostAnalysis::HandleConvolution`. The labels "b01f_01io->b01f" name the
    # dims of left side, kernel and result; digits are spatial dims, the same in all three.
    labels = LABELS.search(attributes)
    assert labels, attributes
    match = _WINDOW.search(attributes)
    window = dict(field.split("=", 1) for field in match[1].split()) if match else {}
    spatial = [label for label in labels[3] if label.isdigit()]
    valid = 1
    for label in spatial:
        dim = int(label)
        valid *= valid_positions(
            lhs[labels[1].index(label)],
            rhs[labels[2].index(label)],
            out[labels[3].index(label)],
            stride=_window_value(window, "stride", dim),
            padding=_padding(window, dim),
            lhs_dilate=_window_value(window, "lhs_dilate", dim),
            rhs_dilate=_window_value(window, "rhs_dilate", dim),
        )
    groups = re.search(r"\bbatch_group_count=(\d+)", attributes)
    batch = lhs[labels[1].index("b")] / (int(groups[1]) if groups else 1)
    # The kernel has the input features of one feature group only, so groups need no division here.
    return 2.0 * batch * rhs[labels[2].index("i")] * rhs[labels[2].index("o")] * valid


def _window_value(window: dict[str, str], field: str, dim: int) -> int:
    return int(window[field].split("x")[dim]) if field in window else 1


def _padding(window: dict[str, str], dim: int) -> int:
    # "pad=1_2x0_0" has "low_high" for each dim. Only the low padding shifts positions.
    return int(window["pad"].split("x")[dim].split("_")[0]) if "pad" in window else 0


@functools.lru_cache(maxsize=1024)
def valid_positions(
    lhs: int, kernel: int, out: int, *, stride: int, padding: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Counts the pairs of an output and a kernel position that hit an element of the array.

    Args:
        lhs: Size of the array along one dim.
        kernel: Size of the window.
        out: Size of the result.
        stride: Distance of two positions of the window.
        padding: Padding before the first element, which may be negative.
        lhs_dilate: Distance of two elements; between them are holes.
        rhs_dilate: Distance of two elements of the window.
    """
    # Without padding, every position is inside.
    if padding == 0 and lhs_dilate == 1 and (out - 1) * stride + (kernel - 1) * rhs_dilate < lhs:
        return out * kernel
    # Output position i and kernel position j read position i * stride + j * rhs_dilate - padding.
    # The formula is symmetric, so the longer of the two is an array and the shorter one the loop.
    longer, shorter = (out, stride), (kernel, rhs_dilate)
    if kernel > out:
        longer, shorter = shorter, longer
    starts = np.arange(longer[0]) * longer[1] - padding
    total = 0
    for offset in range(0, shorter[0] * shorter[1], shorter[1]):
        positions = starts + offset
        # A dilated array has holes between its elements.
        is_inside = (positions >= 0) & (positions <= (lhs - 1) * lhs_dilate)
        total += int((is_inside & (positions % lhs_dilate == 0)).sum())
    return total
