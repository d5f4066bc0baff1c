"""Replaces equations of a jaxpr at all depths, and keeps everything else as it is."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, While
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.references import is_reference
from tpudist.xla import random_keys
from tpudist.xla.array_attributes import is_weakly_typed

# Elements of a constant that equations may build. Random keys have up to 4 numbers each.
_MAX_ELEMENTS = 16
_Names = Mapping[core.Var, Atom]


class LargeConstantError(TypeError):
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
            equation, with the same shapes and dtypes. If the equation has no operands, the function
            receives the arrays among the program's inputs instead.

    Raises:
        LargeConstantError: If `replacement` creates large arrays.
    """
    return _Replacements(selects, replacement).program(closed)


def rewrite_branches(
    closed: jaxprs.ClosedJaxpr,
    selects: Callable[[core.JaxprEqn], bool],
    finish: Callable[..., Any],
) -> jaxprs.ClosedJaxpr:
    """Returns a jaxpr in which each branch of the selected `cond`s returns `finish(result)`.

    Each branch has one result, whose shape and dtype `finish` keeps. Equations in loops, branches
    and calls are rewritten too.

    Raises:
        LargeConstantError: If `finish` creates large arrays.
    """
    return _BranchEnds(selects, finish).program(closed)


@dataclasses.dataclass
class _Rewriter(abc.ABC):
    """Rewrites a program and the programs inside. A subclass decides about each equation."""

    selects: Callable[[core.JaxprEqn], bool]
    function: Callable[..., Any]
    # Rewritten programs by the id of the original, so that a program in several places stays one
    # program, which is lowered once. The original is kept, so that its id is not used twice.
    known: dict[int, tuple[Program, Program]] = dataclasses.field(default_factory=dict)

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

    @abc.abstractmethod
    def _equations(self, eqn: core.JaxprEqn, inputs: Sequence[core.Var]) -> Sequence[core.JaxprEqn]:
        """Returns the equations in the place of one.

        Args:
            eqn: The equation.
            inputs: The inputs of its program, without references.
        """

    def _rewrite_inside(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if not isinstance(equation_layouts.structure_of(eqn), Call | Cond | Scan | While):
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


class _Replacements(_Rewriter):
    """Replaces the selected equations."""

    def _equations(self, eqn: core.JaxprEqn, inputs: Sequence[core.Var]) -> Sequence[core.JaxprEqn]:
        if self.selects(eqn):
            return self._replace(eqn, eqn.invars or inputs)
        return [self._rewrite_inside(eqn)]

    def _replace(self, eqn: core.JaxprEqn, operands: Sequence[Atom]) -> list[core.JaxprEqn]:
        shapes = [jax.ShapeDtypeStruct(jaxprs.shape_of(x), jaxprs.dtype_of(x)) for x in operands]
        # Traced in the mesh of the equation, and once for each equation: two equations must not
        # define the same variables. The copies make each result a variable of its own, also if it
        # is an operand or occurs twice.
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(lambda *x: jax.tree.map(jnp.copy, self.function(eqn, *x)))(
                *shapes
            )
        constants, names = _inline_constants(closed, eqn)
        names.update(zip(closed.jaxpr.invars, operands, strict=True))
        for result, output in zip(closed.jaxpr.outvars, eqn.outvars, strict=True):
            assert isinstance(result, core.Var), "a copy is a variable"
            names[result] = output
        return [_rename(x, names, eqn.source_info) for x in (*constants, *closed.jaxpr.eqns)]


class _BranchEnds(_Rewriter):
    """Adds a function to the end of each branch of the selected `cond`s."""

    def _equations(self, eqn: core.JaxprEqn, inputs: Sequence[core.Var]) -> Sequence[core.JaxprEqn]:
        new = self._rewrite_inside(eqn)
        if not isinstance(equation_layouts.structure_of(new), Cond) or not self.selects(new):
            return [new]
        branches = tuple(self._finish(x, new) for x in new.params["branches"])
        return [new.replace(params=new.params | {"branches": branches})]

    def _finish(self, branch: Program, eqn: core.JaxprEqn) -> Program:
        opened = jaxprs.open_jaxpr(branch)
        (last,) = opened.outvars
        # All branches and the `cond` must agree in the weak type. Random keys and other extended
        # types of JAX have none.
        weak = is_weakly_typed(last.aval)
        result = jax.ShapeDtypeStruct(jaxprs.shape_of(last), jaxprs.dtype_of(last), weak_type=weak)
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(self.function)(result)
        constants, names = _inline_constants(closed, eqn)
        names.update(zip(closed.jaxpr.invars, opened.outvars, strict=True))
        end = [_rename(x, names, eqn.source_info) for x in (*constants, *closed.jaxpr.eqns)]
        results = [_name_of(x, names) for x in closed.jaxpr.outvars]
        return _with_jaxpr(branch, opened.replace(eqns=[*opened.eqns, *end], outvars=results))


def _inline_constants(
    closed: jaxprs.ClosedJaxpr, eqn: core.JaxprEqn
) -> tuple[list[core.JaxprEqn], dict[core.Var, Atom]]:
    """Returns equations that build the constants of a program, and the name of each constant.

    A jaxpr in the middle of another one has no place for constants. Small ones become literals, and
    equations that join them.

    Args:
        closed: The program with the constants.
        eqn: The equation in whose place the program will be.
    """
    equations: list[core.JaxprEqn] = []
    names: dict[core.Var, Atom] = {}
    for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        data = _fetch(const) if _is_array(const) else None
        if data is None or not 0 < data.size <= _MAX_ELEMENTS:
            raise LargeConstantError(eqn.primitive)
        if data.ndim:
            with eqn.ctx.manager:
                built = jax.make_jaxpr(lambda c=const, d=data: _build(c, d))().jaxpr
            equations += built.eqns
            names[variable] = built.outvars[0]
        else:
            names[variable] = core.Literal(data[()], variable.aval)
    return equations, names


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


def _with_jaxpr(program: Program, opened: core.Jaxpr) -> Program:
    """Returns a program of the same class with another jaxpr."""
    return opened if isinstance(program, core.Jaxpr) else program.replace(jaxpr=opened)


def _rename(eqn: core.JaxprEqn, names: _Names, source_info: Any) -> core.JaxprEqn:
    """Returns an equation with other variables, at another source line."""
    return eqn.replace(
        invars=[_name_of(x, names) for x in eqn.invars],
        outvars=[_name_of(x, names) for x in eqn.outvars],
        params={name: _with_source(value, source_info) for name, value in eqn.params.items()},
        source_info=source_info,
    )


def _name_of(x: Any, names: _Names) -> Any:
    return x if isinstance(x, core.Literal) else names.get(x, x)


def _with_source(value: Any, source_info: Any) -> Any:
    """Returns a parameter of an equation; a program gets another source line."""
    if not jaxprs.is_program(value):
        return value
    opened = jaxprs.open_jaxpr(value)
    opened = opened.replace(eqns=[_rename(x, {}, source_info) for x in opened.eqns])
    return _with_jaxpr(value, opened)
