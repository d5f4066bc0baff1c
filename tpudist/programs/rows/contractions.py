"""What is summed over rows by contractions, whose operands are arrays in memory.

Other operations are fused by XLA with the mask of what they read. A matrix product or convolution
reads arrays: if the mask were put where it reads one, there would be two, with the mask and without
for all others. So it is put where the array is computed, and all read that.
"""

from collections.abc import Mapping
from typing import Any

from jax.extend import core

from tpudist.programs.rows.labels import LabelledEquation, LabelledProgram
from tpudist.programs.rows.row_sizes import is_rows


def dims_of_sums(equation: LabelledEquation) -> Mapping[int, tuple[int, ...]]:
    """For each operand of a contraction the dims of rows that it is summed over."""
    numbers = equation.params.get("dimension_numbers")
    match equation.eqn.primitive.name:
        case "dot_general":
            (left, right), _ = numbers  # type: ignore[misc]
        case "conv_general_dilated":
            left, right = numbers.lhs_spec[1:], numbers.rhs_spec[1:2]  # type: ignore[union-attr]
        case _:
            return {}
    return {
        i: rows
        for i, dims in enumerate((left, right))
        if (rows := tuple(d for d in dims if is_rows(equation.in_dims[i][d])))
    }


def find_summed(labelled: LabelledProgram) -> dict[Any, tuple[int, ...]]:
    """For each variable of a program that contractions sum over rows: over which of its dims."""
    found: dict[Any, tuple[int, ...]] = {}
    for equation in labelled.equations:
        for i, dims in dims_of_sums(equation).items():
            variable = equation.eqn.invars[i]
            if not isinstance(variable, core.Literal):
                found[variable] = tuple(sorted({*found.get(variable, ()), *dims}))
    return found
