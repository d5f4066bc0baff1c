"""Finds what a program computes from some of its inputs, at all depths: in loops and calls too."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, While


def find_dependent(jaxpr: Any, given: Sequence[bool]) -> set[core.Var]:
    """The variables that may depend on the inputs that are `given`, also those inside equations.

    A program that is called in several places is taken to be called with all that it is given.
    """
    found: set[core.Var] = set()
    _follow(jaxprs.open_jaxpr(jaxpr), given, found)
    return found


def _follow(jaxpr: core.Jaxpr, given: Sequence[bool], found: set[core.Var]) -> list[bool]:
    """Adds what depends on the inputs, and says which outputs do."""
    found.update(x for x, is_given in zip(jaxpr.invars, given, strict=True) if is_given)
    for eqn in jaxpr.eqns:
        depend = [_is_in(x, found) for x in eqn.invars]
        if any(depend):
            results = _follow_equation(eqn, depend, found)
            found.update(x for x, does in zip(eqn.outvars, results, strict=True) if does)
    return [_is_in(x, found) for x in jaxpr.outvars]


def _follow_equation(eqn: core.JaxprEqn, depend: list[bool], found: set[core.Var]) -> list[bool]:
    match jaxprs.structure_of(eqn):
        case Call(body=body):
            return _follow(body, depend, found)
        case Cond(bodies=bodies):
            branches = [_follow(body, depend[1:], found) for body in bodies]
            return [depend[0] or any(results) for results in zip(*branches, strict=True)]
        case Scan(body=body, num_consts=consts, num_carry=carry):
            return _follow_loop(body, depend, slice(consts, consts + carry), found)
        case While() as loop:
            given = depend[loop.num_cond_consts :]
            carry = slice(loop.num_body_consts, None)
            results = _follow_loop(loop.body, given, carry, found)
            _follow(loop.cond, [*depend[: loop.num_cond_consts], *results], found)
            return results
    return [True] * len(eqn.outvars)


def _follow_loop(
    body: core.Jaxpr, given: list[bool], carry: slice, found: set[core.Var]
) -> list[bool]:
    """The same for a body that hands its first results on, until no more of them depend."""
    while True:
        results = _follow(body, given, found)
        now = given[carry]
        after = [x or y for x, y in zip(now, results, strict=False)]
        if after == now:
            return [*after, *results[len(after) :]]
        given = [*given[: carry.start], *after, *given[carry.start + len(after) :]]


def _is_in(x: Any, found: set[core.Var]) -> bool:
    return not isinstance(x, core.Literal) and x in found
