"""Finds the outputs of a call that are state and begin to differ between replicas.

A call may return one value per replica in the place of a value that was equal on all of them. That
is right for gradients and for accumulators, and wrong for parameters whose gradients were not
reduced. The program shows which one it is: how the new value contains the old one.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tpudist.programs import (
    equation_layouts,
    flat_program,
    jaxprs,
    replica_equality,
    row_dependence,
)
from tpudist.programs.flat_program import FlatProgram, is_collective
from tpudist.programs.user_lines import users_line_of
from tpudist.values.drift import Drift, advice_on_value

_CONTRACTIONS = ("dot_general", "conv_general_dilated")
# Primitives whose result still contains an operand unscaled: added, moved, chosen or masked.
_KEEPING = frozenset(
    "add add_any sub neg convert_element_type copy reshape broadcast_in_dim transpose select_n "
    "dynamic_update_slice concatenate slice squeeze expand_dims max min clamp and or not".split()
)


def find_drifting(
    closed: jaxprs.ClosedJaxpr,
    replaced: Mapping[int, int],
    outputs_differ: Sequence[bool],
    causes: Sequence[str | None],
    labels: Mapping[int, str],
    function: str,
    inputs_differ: Sequence[bool],
) -> dict[int, Drift]:
    """Returns the outputs that are drifting state.

    State drifts if its new value differs between replicas and contains the old one as an addend,
    perhaps with a coefficient. Gradients have the shapes of state, but do not contain it.

    An accumulator contains its old value, too, but only feeds itself. So such state drifts only if
    another output depends on it, or its new value is computed from a matrix product with the old
    one, or is an average with other state, such as an average of parameters over steps.

    Args:
        replaced: Outputs that are new state, each with the input that it replaces.
        outputs_differ: For each output, whether it leaves with one part per replica.
        causes: For each output, the cause of a difference between replicas.
        labels: Names of all inputs that are state.
        inputs_differ: For each input, whether replicas have different values.
    """
    drifting = {}
    advice = advice_on_value(labels.values())
    jaxpr = jaxprs.open_jaxpr(closed)
    flat = flat_program.flatten(closed, inline_calls=True)
    local = _find_local(flat, inputs_differ)
    for output, source in replaced.items():
        if not outputs_differ[output] or not _is_carried(flat, source, output, local):
            continue
        is_source = [i == source for i in range(len(jaxpr.invars))]
        averages = _is_averaged(flat, source, output, set(labels))
        contracts = averages or _is_contracted(flat, source, output)
        dependent = row_dependence.find_dependent(closed, is_source)
        # A literal has no hash.
        if contracts or any(
            i != output and not jaxprs.is_literal(x) and x in dependent
            for i, x in enumerate(jaxpr.outvars)
        ):
            eqn = next((e for e in jaxpr.eqns if jaxpr.outvars[output] in e.outvars), None)
            where = "" if eqn is None else users_line_of(eqn)
            cause = causes[output] or "it differs"
            label = labels.get(source, "an argument")
            drifting[output] = Drift(label, function, cause, where, advice)
    return drifting


# The weights of a program are float32, and 0.9 + 0.1 is 1 only up to rounding.
_TOLERANCE = 1e-5

# The functions below read the program once, from inputs to outputs, and mark values that depend on
# marked values. They may mark too little inside loops, whose bodies are one step: then a drift is
# not reported, and no error is raised without a drift.


def _find_local(program: FlatProgram, inputs_differ: Sequence[bool]) -> set[int]:
    """Returns the values that may differ between replicas."""
    local = {x for x, differs in zip(program.inputs, inputs_differ, strict=True) if differs}
    for step in program.steps:
        if replica_equality.makes_equal(step.eqn):
            continue
        if step.eqn.primitive.name == "axis_index" or local.intersection(step.inputs):
            local.update(step.outputs)
    return local


def _is_carried(program: FlatProgram, source: int, output: int, local: set[int]) -> bool:
    """Whether an output contains the input that it replaces as an addend."""
    # A loop or branch counts as carrying all its inputs to all its outputs.
    carried = {program.inputs[source]}
    for step in program.steps:
        if not carried.intersection(step.inputs):
            continue
        name = step.eqn.primitive.name
        # A decay or a mask is equal on all replicas. The product with a value of one replica, such
        # as the rows of its batch, is a part of a gradient.
        factors = (x for x in step.inputs if x not in carried)
        scales = name in ("mul", "div") and not local.intersection(factors)
        holds_program = equation_layouts.structure_of(step.eqn) is not None
        if scales or name in _KEEPING or holds_program or is_collective(step.eqn):
            carried.update(step.outputs)
    return program.outputs[output] in carried


def _is_contracted(program: FlatProgram, source: int, output: int) -> bool:
    """Whether an output depends on an input through a matrix product or convolution."""
    dependent, contracted = {program.inputs[source]}, set()
    for step in program.steps:
        if dependent.intersection(step.inputs):
            dependent.update(step.outputs)
            if step.eqn.primitive.name in _CONTRACTIONS or contracted.intersection(step.inputs):
                contracted.update(step.outputs)
    return program.outputs[output] in contracted


def _is_averaged(program: FlatProgram, source: int, output: int, state: set[int]) -> bool:
    """Whether an output is a weighted average of the input that it replaces and of other state."""
    # The weights of both add up to one. The weights of an accumulator of gradients do not, although
    # gradients may contain a multiple of the parameters.
    # `weights` has for each value the coefficients of the inputs in it, as a linear function of
    # state, as far as these are numbers in the program; `numbers` has those numbers.
    numbers = {i: np.asarray(x).item() for i, x in program.constants.items() if _is_number(x)}
    weights: dict[int, dict[int, float]] = {program.inputs[i]: {i: 1.0} for i in state}
    for step in program.steps:
        name, inputs = step.eqn.primitive.name, step.inputs
        if step.adds or len(step.outputs) != 1:
            continue
        (result,) = step.outputs
        if name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
            if inputs[0] in numbers:
                numbers[result] = numbers[inputs[0]]
            elif inputs[0] in weights:
                weights[result] = weights[inputs[0]]
        elif name in ("mul", "div", "neg"):
            weighted = [x for x in inputs if x in weights]
            factors = [numbers.get(x) for x in inputs if x not in weights]
            if name == "neg" and weighted:
                factors = [-1.0]
            elif name == "div":
                factors = [1 / x if x and inputs[0] in weights else None for x in factors]
            if len(weighted) == len(factors) == 1 and factors[0] is not None:
                weights[result] = {i: x * factors[0] for i, x in weights[weighted[0]].items()}
        elif name in ("add", "add_any", "sub"):
            signs = (1.0, -1.0 if name == "sub" else 1.0)
            total: dict[int, float] = {}
            for operand, sign in zip(inputs, signs, strict=True):
                for i, x in weights.get(operand, {}).items():
                    total[i] = total.get(i, 0.0) + sign * x
            if total:
                weights[result] = total
    shares = weights.get(program.outputs[output], {})
    own = shares.pop(source, 0.0)
    return own != 0 and any(x and abs(own + x - 1) < _TOLERANCE for x in shares.values())


def _is_number(x: object) -> bool:
    return (
        isinstance(x, int | float | np.generic | np.ndarray) and np.isrealobj(x) and np.size(x) == 1
    )
