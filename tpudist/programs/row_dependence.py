"""Finds the values that a program computes from some of its inputs, also in loops and calls."""

from collections.abc import Sequence

from jax.extend import core

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, While
from tpudist.programs.jaxprs import Atom, Program


def find_dependent(program: Program, selected: Sequence[bool]) -> set[core.Var]:
    """Returns the variables that may depend on selected inputs, also those inside equations.

    Args:
        program: The program.
        selected: Whether each input is selected.
    """
    # A program in several places has one set of variables: a variable depends if it does in any
    # of the places.
    dependent: set[core.Var] = set()
    _follow(jaxprs.open_jaxpr(program), selected, dependent)
    return dependent


def _follow(jaxpr: core.Jaxpr, inputs: Sequence[bool], dependent: set[core.Var]) -> list[bool]:
    """Adds the dependent variables of a program; returns whether each output depends."""
    dependent.update(x for x, depends in zip(jaxpr.invars, inputs, strict=True) if depends)
    for eqn in jaxpr.eqns:
        operands = [_is_in(x, dependent) for x in eqn.invars]
        if any(operands):  # otherwise nothing inside the equation depends either
            results = _follow_equation(eqn, operands, dependent)
            dependent.update(x for x, depends in zip(eqn.outvars, results, strict=True) if depends)
    return [_is_in(x, dependent) for x in jaxpr.outvars]


def _follow_equation(
    eqn: core.JaxprEqn, operands: list[bool], dependent: set[core.Var]
) -> list[bool]:
    match equation_layouts.structure_of(eqn):
        case Call(body=body):
            return _follow(body, operands, dependent)
        case Cond(bodies=bodies):
            branches = [_follow(body, operands[1:], dependent) for body in bodies]
            return [operands[0] or any(results) for results in zip(*branches, strict=True)]
        case Scan(body=body, num_consts=consts, num_carry=carry):
            return _follow_loop(body, operands, slice(consts, consts + carry), dependent)
        case While() as loop:
            inputs = operands[loop.num_cond_consts :]
            carry = slice(loop.num_body_consts, None)
            results = _follow_loop(loop.body, inputs, carry, dependent)
            cond_inputs = [*operands[: loop.num_cond_consts], *results]
            (stops,) = _follow(loop.cond, cond_inputs, dependent)
            return [stops or depends for depends in results]
    return [True] * len(eqn.outvars)


def _follow_loop(
    body: core.Jaxpr, inputs: list[bool], carry: slice, dependent: set[core.Var]
) -> list[bool]:
    """Follows the body of a loop, whose first results are the next carry."""
    # A fixpoint: a carry that does not depend at the end depends in no iteration. It ends because
    # each round but the last adds a dependent carry.
    while True:
        results = _follow(body, inputs, dependent)
        before = inputs[carry]
        after = [x or y for x, y in zip(before, results, strict=False)]
        if after == before:
            return [*after, *results[len(after) :]]
        inputs = [*inputs[: carry.start], *after, *inputs[carry.start + len(after) :]]


def _is_in(x: Atom, dependent: set[core.Var]) -> bool:
    return not isinstance(x, core.Literal) and x in dependent
