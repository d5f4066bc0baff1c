"""Estimates how products and convolutions fill the matrix unit.

A product that adds up fewer numbers than the unit is wide fills a part of it. The rules of
convolutions follow the machine programs that libtpu 0.0.50 writes for v5e:

1. The unit multiplies the input features of a row of the window with the output features. Windows
   of 3 x 3 over 16, 64 and 128 features take 0.9 to 1.1 of the time by this rule.
2. If images fill the lanes of the result, the unit multiplies as many complete positions of the
   window as fit with the images, for each eight output features. Five such convolutions of 3 to 64
   features (3 x 3, 4 x 4 and 7 x 7) take 1.08 to 1.4 times as long as their multiplications. The
   estimate is 1.25 times.
3. If the input features of the kernel are its minor dim, each position of the window is a product
   of its own: 1.8 to 2.1 cycles per position and 8 rows, where this rule has 2 and XLA 16. An
   example is `jnp.convolve`.
4. With fewer than 8 input features, the unit multiplies the whole window, which must first be
   gathered: a cycle per 12 numbers of it and 8 rows. Seven windows of 9 to 256 numbers take 0.6 to
   3.7 times as long, with a median of 1.0.
5. A kernel of booleans, as in `jax.scipy.linalg.toeplitz`, is multiplied on the vector units: 1.7
   cycles per register of results and position of the window, where this rule has 2.

With fewer than 8 input features, XLA's cycles are 0.5 to 18 times those of the machine programs, so
they are not used. If rules 3 to 5 apply to them, the time is guessed.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from tpudist.xla.estimate import flops
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction

_BUNDLES_PER_PRODUCT = 1.25  # rule 2
_FEW, _GATHERED_PER_CYCLE = 8, 12  # rule 4
_SUBLANES, _REGISTER = 8, 1024


@dataclasses.dataclass(frozen=True)
class UnitUse:
    """Use of the matrix unit by an instruction.

    Attributes:
        share: Share of the unit that its products fill.
        cycles: Cycles of other work: numbers that are gathered, or operations on vector units.
        replaces_cycles: Whether these take the place of XLA's cycles.
        bounds_cycles: Whether XLA's cycles may be too many. Programs of groups were not read.
        guess: Name of the guessed part; empty if a rule gives the time.
    """

    share: float = 1.0
    cycles: float = 0.0
    replaces_cycles: bool = False
    bounds_cycles: bool = True
    guess: str = ""


def use_of_unit(module: Module, instruction: Instruction, width: int) -> UnitUse:
    """Returns how the products of an instruction fill a matrix unit."""
    convolves = flops.is_convolution(module, instruction)
    uses = [
        _use_of_part(module, part, labels, width)
        if convolves
        else UnitUse(_share_of_product(module, part, width))
        for part in module.parts_of(instruction)
        if part.opcode == "convolution" and (labels := flops.LABELS.search(part.attributes))
    ]
    return min(uses, key=lambda use: use.share, default=UnitUse())


def _use_of_part(module: Module, part: Instruction, labels: re.Match[str], width: int) -> UnitUse:
    kernel, result = module.operands_of(part)[1].arrays[0], part.arrays[0]
    sizes = dict(zip(labels[2], kernel.dims, strict=True))
    results = dict(zip(labels[3], result.dims, strict=True))
    window = [size for name, size in sizes.items() if name.isdigit()]
    positions = math.prod(size for name, size in results.items() if name.isdigit())
    features, rows, columns = sizes["i"], results["b"], sizes["o"]
    # The gradient of a kernel has a window as large as the images.
    is_few = features < _FEW and bool(window) and math.prod(window) <= positions
    is_grouped = "group_count" in part.attributes
    is_few &= not is_grouped
    guess = "convolution of few features" if is_few else ""
    if is_few and kernel.dtype == "pred":
        registers = positions * math.ceil(rows * columns / _REGISTER)
        return UnitUse(1.0, 2 * registers * math.prod(window), is_few, guess=guess)
    if _minor(result.minor_to_major, labels[3]) == "b":
        share = share_of_window(window, features, columns, width, rows)
        return UnitUse(share, 0.0, is_few, bounds_cycles=not is_grouped)
    if is_grouped:
        return UnitUse(share_of_window(window, features, columns, width), bounds_cycles=False)
    if _minor(kernel.minor_to_major, labels[2]) == "i":
        share = share_of_window((), features, columns, width)
        return UnitUse(
            share * (_fill(rows, _SUBLANES) if is_few else 1.0), 0.0, is_few, guess=guess
        )
    if not is_few:
        return UnitUse(share_of_window(window, features, columns, width))
    numbers = features * math.prod(window)
    share = share_of_window((), numbers, columns, width) * _fill(rows, _SUBLANES)
    gathered = positions * math.ceil(rows / _SUBLANES) * numbers
    return UnitUse(share, gathered / _GATHERED_PER_CYCLE, is_few, guess=guess)


def _share_of_product(module: Module, part: Instruction, width: int) -> float:
    """Returns the share that a matrix product fills: it adds up fewer numbers than the unit."""
    num_results = part.arrays[0].num_elements
    summed = flops.instruction_flops(module, part) / 2 / max(1, num_results)
    return _fill(max(1, round(summed)), width)


def share_of_window(
    window: Sequence[int], inputs: int, outputs: int, width: int, num_images: int = 0
) -> float:
    """Returns the share of a matrix unit that a convolution fills (rules 1 and 2).

    Args:
        window: Sizes of the window.
        inputs: Number of input features.
        outputs: Number of output features.
        width: Width of the unit.
        num_images: Number of images in the lanes of the result; 0 if they have features.
    """
    if not num_images:
        return _fill(max(window, default=1) * inputs, width) * _fill(outputs, width)
    taps = math.prod(window)
    passes = math.ceil(taps / max(1, width // inputs)) * math.ceil(inputs / width)
    filled = taps * inputs / (passes * width) * _fill(num_images, width)
    return filled * _fill(outputs, _SUBLANES) / _BUNDLES_PER_PRODUCT


def _fill(size: int, multiple: int) -> float:
    return size / (math.ceil(size / multiple) * multiple)


def _minor(minor_to_major: tuple[int, ...], labels: str) -> str:
    """Returns the label of the dim that varies fastest in memory."""
    return labels[minor_to_major[0]] if minor_to_major else labels[-1]
