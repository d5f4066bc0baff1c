"""Puts other equations into a jaxpr, at all depths, and leaves all else of it as it is."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, While
from tpudist.programs.references import is_reference
from tpudist.xla import random_keys

_MOST_ELEMENTS = 16
"""Of a constant that equations may build: random keys and the like."""


class MakesConstants(TypeError):
    """The function for an equation makes large arrays as constants, for which there is no place.

    Attributes:
        primitive: The operation of the equation.
    """

    def __init__(self, primitive: Any):
        """See the class."""
        super().__init__(f"The function for '{primitive}' makes large constants.")
        self.primitive = primitive


def rewrite(
    closed: jaxprs.ClosedJaxpr,
    is_wanted: Callable[[core.JaxprEqn], bool],
    instead: Callable[..., Any],
) -> jaxprs.ClosedJaxpr:
    """A jaxpr in which `instead(equation, *operands)` computes the equations that are wanted.

    Also those in loops, branches and calls. It gives as many results as the equation, of the same
    shapes and dtypes. Its operations carry the source line of the equation that they stand for.
    For an equation without operands it is given the arrays that the program it is in is given.
    """
    return _Rewrite(is_wanted, instead, {}).program(closed)


def rewrite_branches(
    closed: jaxprs.ClosedJaxpr,
    is_wanted: Callable[[core.JaxprEqn], bool],
    finish: Callable[..., Any],
) -> jaxprs.ClosedJaxpr:
    """A jaxpr in which each branch of the `cond`s that are wanted gives `finish(result)` instead.

    Also those in loops, branches and calls; of one result each, whose shape and dtype stay.
    """
    return _BranchEnds(is_wanted, finish, {}).program(closed)


@dataclasses.dataclass
class _Rewrite:
    is_wanted: Callable[[core.JaxprEqn], bool]
    instead: Callable[..., Any]
    # What became of a program that is in several places: it stays one, which is lowered once. With
    # the program itself, lest another one gets its id.
    known: dict[int, tuple[Any, Any]]

    def program(self, program: Any) -> Any:
        if id(program) not in self.known:
            self.known[id(program)] = (program, self._program(program))
        return self.known[id(program)][1]

    def _program(self, program: Any) -> Any:
        opened = jaxprs.open_jaxpr(program)
        inputs = [x for x in opened.invars if not is_reference(x)]
        found = [self._equations(eqn, inputs) for eqn in opened.eqns]
        if all(new == [old] for new, old in zip(found, opened.eqns, strict=True)):
            return program
        opened = opened.replace(eqns=[eqn for new in found for eqn in new])
        is_open = isinstance(program, core.Jaxpr)
        return opened if is_open else program.replace(jaxpr=opened)

    def _equations(self, eqn: core.JaxprEqn, inputs: list[Any]) -> list[core.JaxprEqn]:
        if self.is_wanted(eqn):
            return self._instead_of(eqn, eqn.invars or inputs)
        return [self._inside(eqn)]

    def _inside(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """The equation, with the programs in it rewritten."""
        if not isinstance(jaxprs.structure_of(eqn), Call | Cond | Scan | While):
            return eqn
        params = {name: self._parameter(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def _parameter(self, value: Any) -> Any:
        if jaxprs.is_program(value):
            return self.program(value)
        if type(value) in (tuple, list):
            items = [self._parameter(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return value

    def _instead_of(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[core.JaxprEqn]:
        avals: list[Any] = [x.aval for x in operands]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        # In the mesh of its place, and anew each time: the variables are to be new ones.
        with eqn.ctx.manager:
            made = jax.make_jaxpr(lambda *x: _copy(self.instead(eqn, *x)))(*shapes)
        traced = made.jaxpr
        names: dict[Any, Any] = dict(zip(traced.invars, operands, strict=True))
        equations = []
        for variable, const in zip(traced.constvars, made.consts, strict=True):
            if not isinstance(const, jax.Array | np.generic | np.ndarray):
                raise MakesConstants(eqn.primitive)
            data = _fetch(const)
            if not 0 < data.size <= _MOST_ELEMENTS:
                raise MakesConstants(eqn.primitive)
            if data.ndim:
                with eqn.ctx.manager:
                    built = jax.make_jaxpr(lambda c=const, d=data: _build(c, d))().jaxpr
                equations += built.eqns
                names[variable] = built.outvars[0]
            else:
                names[variable] = core.Literal(data[()], variable.aval)
        names |= dict(zip(traced.outvars, eqn.outvars, strict=True))
        equations += traced.eqns
        return [_rename(x, names, eqn.source_info) for x in equations]


def _fetch(const: Any) -> np.ndarray:
    if not random_keys.is_key(const):
        return np.asarray(const)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(const))


def _build(const: Any, data: np.ndarray) -> jax.Array:
    """A small array or random keys, with each number a literal: a program has no other place."""
    numbers = [jax.lax.full((1,), x, data.dtype) for x in data.flat]
    array = jnp.concatenate(numbers).reshape(data.shape)
    if random_keys.is_key(const):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(const))
    return array


class _BranchEnds(_Rewrite):
    def _equations(self, eqn: core.JaxprEqn, inputs: list[Any]) -> list[core.JaxprEqn]:
        new = self._inside(eqn)
        if not isinstance(jaxprs.structure_of(new), Cond) or not self.is_wanted(new):
            return [new]
        branches = tuple(self._finish(x, new) for x in new.params["branches"])
        return [new.replace(params=new.params | {"branches": branches})]

    def _finish(self, branch: Any, eqn: core.JaxprEqn) -> Any:
        opened = jaxprs.open_jaxpr(branch)
        (last,) = opened.outvars
        aval: Any = last.aval
        weak = getattr(aval, "weak_type", False)
        result = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
        with eqn.ctx.manager:
            made = jax.make_jaxpr(self.instead)(result)
        names = dict(zip(made.jaxpr.invars, opened.outvars, strict=True))
        ends = [_rename(x, names, eqn.source_info) for x in made.jaxpr.eqns]
        opened = opened.replace(eqns=[*opened.eqns, *ends], outvars=made.jaxpr.outvars)
        return opened if isinstance(branch, core.Jaxpr) else branch.replace(jaxpr=opened)


def _copy(results: Any) -> Any:
    """Results each of which an equation computes: what is an operand, or twice there, is copied."""
    return jax.tree.map(jnp.copy, results)


def _rename(eqn: core.JaxprEqn, names: Mapping[Any, Any], source_info: Any) -> core.JaxprEqn:
    def new(x: Any) -> Any:
        return x if isinstance(x, core.Literal) else names.get(x, x)

    return eqn.replace(
        invars=[new(x) for x in eqn.invars],
        outvars=[new(x) for x in eqn.outvars],
        params={name: _move(value, source_info) for name, value in eqn.params.items()},
        source_info=source_info,
    )


def _move(value: Any, source_info: Any) -> Any:
    """A parameter, with the equations of a program in it said to be of another source line."""
    if not jaxprs.is_program(value):
        return value
    opened = jaxprs.open_jaxpr(value)
    opened = opened.replace(eqns=[_rename(x, {}, source_info) for x in opened.eqns])
    return opened if isinstance(value, core.Jaxpr) else value.replace(jaxpr=opened)
