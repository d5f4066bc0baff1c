"""Counts the floating-point operations of instructions: those of matrix multiplications.

A TPU runs every matrix multiplication as a convolution, often one that looks as if most of it were
padding; only positions inside the array count, so that both forms of a multiplication of [m, k] by
[k, n] are 2 m k n operations. Element-wise operations are left out: they are not what a peak in
FLOP/s is about. XLA's own count (`cost_analysis()`) counts the body of a loop once.
"""

import functools
import math
import re

import numpy as np

from tpudist.xla.estimate import kernels
from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTING = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


def step_flops(module: Module) -> float:
    """Operations of one step on one device, loops multiplied by how often they run."""
    return sum(
        run.count * instruction_flops(module, run.instruction) for run in module.executions()
    )


def instruction_flops(module: Module, instruction: Instruction) -> float:
    """Operations of one run of an instruction, what a fusion holds included.

    Loops, calls and conditionals have none of their own: those of their bodies are counted there.
    """
    if instruction.opcode == "fusion":
        callee = module.computations[instruction.callee("calls") or ""]
        return sum(instruction_flops(module, inner) for inner in callee.instructions.values())
    if instruction.opcode in ("dot", "convolution"):
        operands = module.operands_of(instruction)
        lhs, rhs = (operand.arrays[0] for operand in operands[:2])
        count = _dot if instruction.opcode == "dot" else _convolution
        return count(instruction.attributes, lhs.dims, rhs.dims, instruction.arrays[0].dims)
    if instruction.opcode == "custom-call":
        return kernels.flops(module, instruction) or 0.0
    return 0.0


def is_8_bit(module: Module, instruction: Instruction) -> bool:
    """Whether all its matrix multiplications are of 8-bit numbers, whose peak is another."""
    widths = set(_operand_bits(module, instruction))
    return bool(widths) and max(widths) <= 8


def _operand_bits(module: Module, instruction: Instruction) -> list[int]:
    if instruction.opcode == "fusion":
        callee = module.computations[instruction.callee("calls") or ""]
        return [b for inner in callee.instructions.values() for b in _operand_bits(module, inner)]
    if instruction.opcode not in ("dot", "convolution"):
        return []
    operands = module.operands_of(instruction)[:2]
    return [shapes.num_bits(operand.arrays[0].dtype) for operand in operands]


def _dot(
    attributes: str, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> float:
    contracting = _CONTRACTING.search(attributes)
    dims = [int(dim) for dim in contracting[1].split(",") if dim] if contracting else []
    return 2.0 * math.prod(out) * math.prod(lhs[dim] for dim in dims)


def _convolution(
    attributes: str, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> float:
    """As `HloCostAnalysis::HandleConvolution` of XLA counts it."""
    labels = _LABELS.search(attributes)
    assert labels, attributes
    found = _WINDOW.search(attributes)
    window = dict(field.split("=", 1) for field in found[1].split()) if found else {}
    spatial = [label for label in labels[3] if label.isdigit()]
    valid = 1
    for label in spatial:
        place = int(label)
        valid *= _valid_positions(
            lhs[labels[1].index(label)],
            rhs[labels[2].index(label)],
            out[labels[3].index(label)],
            stride=_window_value(window, "stride", place),
            padding=_padding(window, place),
            lhs_dilate=_window_value(window, "lhs_dilate", place),
            rhs_dilate=_window_value(window, "rhs_dilate", place),
        )
    groups = re.search(r"\bbatch_group_count=(\d+)", attributes)
    batch = lhs[labels[1].index("b")] / (int(groups[1]) if groups else 1)
    # The kernel's input features are those of one feature group.
    return 2.0 * batch * rhs[labels[2].index("i")] * rhs[labels[2].index("o")] * valid


def _window_value(window: dict[str, str], field: str, place: int) -> int:
    return int(window[field].split("x")[place]) if field in window else 1


def _padding(window: dict[str, str], place: int) -> int:
    return int(window["pad"].split("x")[place].split("_")[0]) if "pad" in window else 0


@functools.lru_cache(maxsize=1024)
def _valid_positions(
    lhs: int, kernel: int, out: int, *, stride: int, padding: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """How many pairs of an output and a kernel position meet an element, not padding or a hole."""
    if padding == 0 and lhs_dilate == 1 and (out - 1) * stride + (kernel - 1) * rhs_dilate < lhs:
        return out * kernel
    # Both walk over the array in steps of their own, so either may be the loop: the shorter one is.
    many, few = (out, stride), (kernel, rhs_dilate)
    if kernel > out:
        many, few = few, many
    steps = np.arange(many[0]) * many[1] - padding
    total = 0
    for offset in range(0, few[0] * few[1], few[1]):
        places = steps + offset
        # Between the elements of a dilated array are holes.
        inside = (places >= 0) & (places <= (lhs - 1) * lhs_dilate) & (places % lhs_dilate == 0)
        total += int(inside.sum())
    return total
