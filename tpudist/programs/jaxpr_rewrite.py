"""Replaces equations of a jaxpr at all depths, and keeps everything else as it is."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from tpudist.programs import jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, While
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.references import is_reference
from tpudist.xla import random_keys

# Elements of a constant that equations may build. Random keys have up to 4 numbers each.
_MAX_ELEMENTS = 16
_Names = Mapping[core.Var, Atom]


class MakesConstants(TypeError):
    """The function for an equation creates arrays that are too large for literals.

    Attributes:
        primitive: The primitive of the equation.
    """

    def __init__(self, primitive: core.Primitive):
        super().__init__(f"The function for '{primitive}' makes large constants.")
        self.primitive = primitive


def rewrite(
    closed: jaxprs.ClosedJaxpr,
    selects: Callable[[core.JaxprEqn], bool],
    replacement: Callable[..., Any],
) -> jaxprs.ClosedJaxpr:
    """Returns a jaxpr in which a function computes the selected equations.

    Equations in loops, branches and calls are replaced too. The new operations have the source line
    of the equation that they replace.

    Args:
        closed: The jaxpr.
        selects: Called with an equation; returns whether to replace it.
        replacement: Called with the equation and its operands; returns as many results as the
            equation, with the same shapes and dtypes. For an equation without operands, it receives
            the arrays that are inputs of the program with the equation.
    """
    return _Rewrite(selects, replacement, {}).program(closed)


def rewrite_branches(
    closed: jaxprs.ClosedJaxpr,
    selects: Callable[[core.JaxprEqn], bool],
    finish: Callable[..., Any],
) -> jaxprs.ClosedJaxpr:
    """Returns a jaxpr in which each branch of the selected `cond`s returns `finish(result)`.

    Each branch has one result, whose shape and dtype `finish` keeps. Equations in loops, branches
    and calls are rewritten too.
    """
    return _BranchEnds(selects, finish, {}).program(closed)


@dataclasses.dataclass
class _Rewrite:
    selects: Callable[[core.JaxprEqn], bool]
    replacement: Callable[..., Any]
    # Rewritten programs by the id of the original, so that a program in several places stays one
    # program, which is lowered once. The original is kept, so that its id is not used twice.
    known: dict[int, tuple[Program, Program]]

    def program(self, program: Program) -> Program:
        if id(program) not in self.known:
            self.known[id(program)] = (program, self._program(program))
        return self.known[id(program)][1]

    def _program(self, program: Program) -> Program:
        opened = jaxprs.open_jaxpr(program)
        inputs = [x for x in opened.invars if not is_reference(x)]
        rewritten = [self._equations(eqn, inputs) for eqn in opened.eqns]
        if all(new == [old] for new, old in zip(rewritten, opened.eqns, strict=True)):
            return program
        opened = opened.replace(eqns=[eqn for new in rewritten for eqn in new])
        return _with_jaxpr(program, opened)

    def _equations(self, eqn: core.JaxprEqn, inputs: Sequence[core.Var]) -> Sequence[core.JaxprEqn]:
        if self.selects(eqn):
            return self._replace(eqn, eqn.invars or inputs)
        return [self._rewrite_inside(eqn)]

    def _rewrite_inside(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
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

    def _replace(self, eqn: core.JaxprEqn, operands: Sequence[Atom]) -> list[core.JaxprEqn]:
        shapes = [jax.ShapeDtypeStruct(jaxprs.shape_of(x), jaxprs.dtype_of(x)) for x in operands]
        # Traced in the mesh of the equation, and once for each equation: two equations must not
        # define the same variables. The copies make each result a variable of its own, also if it
        # is an operand or occurs twice.
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(lambda *x: jax.tree.map(jnp.copy, self.replacement(eqn, *x)))(
                *shapes
            )
        traced = closed.jaxpr
        names: dict[core.Var, Atom] = {}
        names.update(zip(traced.invars, operands, strict=True))
        equations = []
        # A jaxpr in the middle of another one has no place for constants. Small ones become
        # literals, and equations that join them.
        for variable, const in zip(traced.constvars, closed.consts, strict=True):
            data = _fetch(const) if _is_array(const) else None
            if data is None or not 0 < data.size <= _MAX_ELEMENTS:
                raise MakesConstants(eqn.primitive)
            if data.ndim:
                with eqn.ctx.manager:
                    built = jax.make_jaxpr(lambda c=const, d=data: _build(c, d))().jaxpr
                equations += built.eqns
                names[variable] = built.outvars[0]
            else:
                names[variable] = core.Literal(data[()], variable.aval)
        for result, output in zip(traced.outvars, eqn.outvars, strict=True):
            assert isinstance(result, core.Var), "a copy is a variable"
            names[result] = output
        equations += traced.eqns
        return [_rename(x, names, eqn.source_info) for x in equations]


def _is_array(const: object) -> bool:
    return isinstance(const, jax.Array | np.generic | np.ndarray)


def _fetch(const: ArrayLike) -> np.ndarray:
    if not random_keys.is_key(const):
        return np.asarray(const)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(const))


def _build(const: ArrayLike, data: np.ndarray) -> jax.Array:
    """Builds a small array or random keys from literals, one for each number."""
    numbers = [jax.lax.full((1,), x, data.dtype) for x in data.flat]
    array = jnp.concatenate(numbers).reshape(data.shape)
    if random_keys.is_key(const):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(const))
    return array


class _BranchEnds(_Rewrite):
    def _equations(self, eqn: core.JaxprEqn, inputs: Sequence[core.Var]) -> Sequence[core.JaxprEqn]:
        new = self._rewrite_inside(eqn)
        if not isinstance(jaxprs.structure_of(new), Cond) or not self.selects(new):
            return [new]
        branches = tuple(self._finish(x, new) for x in new.params["branches"])
        return [new.replace(params=new.params | {"branches": branches})]

    def _finish(self, branch: Program, eqn: core.JaxprEqn) -> Program:
        opened = jaxprs.open_jaxpr(branch)
        (last,) = opened.outvars
        # Random keys and other extended types of JAX have no weak type.
        weak = getattr(last.aval, "weak_type", False)
        result = jax.ShapeDtypeStruct(jaxprs.shape_of(last), jaxprs.dtype_of(last), weak_type=weak)
        with eqn.ctx.manager:
            end = jax.make_jaxpr(self.replacement)(result).jaxpr
        names = dict(zip(end.invars, opened.outvars, strict=True))
        equations = [_rename(x, names, eqn.source_info) for x in end.eqns]
        opened = opened.replace(eqns=[*opened.eqns, *equations], outvars=end.outvars)
        return _with_jaxpr(branch, opened)


def _with_jaxpr(program: Program, opened: core.Jaxpr) -> Program:
    """Returns a program of the same class with another jaxpr."""
    return opened if isinstance(program, core.Jaxpr) else program.replace(jaxpr=opened)


def _rename(eqn: core.JaxprEqn, names: _Names, source_info: Any) -> core.JaxprEqn:
    """Returns an equation with other variables, at another source line."""

    def rename(x: Any) -> Any:
        return x if isinstance(x, core.Literal) else names.get(x, x)

    return eqn.replace(
        invars=[rename(x) for x in eqn.invars],
        outvars=[rename(x) for x in eqn.outvars],
        params={name: _move(value, source_info) for name, value in eqn.params.items()},
        source_info=source_info,
    )


def _move(value: Any, source_info: Any) -> Any:
    """Returns a parameter; a program is moved to another source line."""
    if not jaxprs.is_program(value):
        return value
    opened = jaxprs.open_jaxpr(value)
    opened = opened.replace(eqns=[_rename(x, {}, source_info) for x in opened.eqns])
    return _with_jaxpr(value, opened)
