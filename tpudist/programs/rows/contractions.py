"""Finds the values that contractions sum over rows, so that they are masked only once.

XLA fuses a mask into an elementwise operation. A matrix product or convolution reads its operands
from memory: a mask at its operand would keep two arrays alive, with and without the mask. So
`evaluator` masks the value where it is computed, and all operations read the masked array.
"""

from collections.abc import Mapping
from typing import Any

from jax.extend import core

from tpudist.programs.rows.labels import LabelledEquation, LabelledProgram
from tpudist.programs.rows.row_sizes import is_rows


def dims_of_sums(equation: LabelledEquation) -> Mapping[int, tuple[int, ...]]:
    """Returns the dims of rows that a contraction sums over, by operand."""
    numbers: Any = equation.params.get("dimension_numbers")
    match equation.eqn.primitive.name:
        case "dot_general":
            (left, right), _ = numbers
        case "conv_general_dilated":
            # All dims of the image but its batch, and the input features of the filter. The rule
            # rejects a filter whose window has rows.
            left, right = numbers.lhs_spec[1:], numbers.rhs_spec[1:2]
        case _:
            return {}
    return {
        i: rows
        for i, dims in enumerate((left, right))
        if (rows := tuple(d for d in dims if is_rows(equation.in_dims[i][d])))
    }


def find_summed(labelled: LabelledProgram) -> dict[core.Var, tuple[int, ...]]:
    """Returns the dims of rows that contractions in a program sum over, by variable."""
    summed: dict[core.Var, tuple[int, ...]] = {}
    for equation in labelled.equations:
        for i, dims in dims_of_sums(equation).items():
            variable = equation.eqn.invars[i]
            if isinstance(variable, core.Var):
                summed[variable] = tuple(sorted({*summed.get(variable, ()), *dims}))
    return summed
