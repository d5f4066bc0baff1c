"""Answers questions about jaxprs: their equations, constants, shapes and dtypes."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

import jax
from jax.core import ShapedArray, Tracer
from jax.extend import core

from tpudist.array_types import Shape
from tpudist.xla import array_attributes

# Since jax 0.11 a jaxpr contains its constants, and both names are one class. JAX keeps the second
# name for old code only, hence the `getattr`.
Jaxpr = core.Jaxpr
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
# A program with or without its constants: `Jaxpr` or `ClosedJaxpr`.
Program: TypeAlias = core.Jaxpr
Atom: TypeAlias = core.Var | core.Literal


@functools.lru_cache(maxsize=1024)
def _expand(
    # A class of `jax.experimental.hijax`, and the context of an equation, which has no public name.
    primitive: Any,
    avals: tuple[ShapedArray, ...],
    context: Any,
) -> ClosedJaxpr:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]

    def run(*args: jax.Array) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(args)))

    # The program must be traced in the meshes of its equation, or it could not be evaluated there.
    with context.manager:
        return jax.make_jaxpr(run)(*shapes)


def expand(eqn: core.JaxprEqn) -> ClosedJaxpr:
    """Returns the program that JAX lowers for a `call_hi_primitive`."""
    avals: Any = tuple(x.aval for x in eqn.invars)
    return _expand(eqn.params["_prim"], avals, eqn.ctx)


def callee_of(eqn: core.JaxprEqn, body: core.Jaxpr) -> Program:
    """Returns the program of a `Call` with its constants; `body` is the same without them."""
    # A `call_hi_primitive` has no program among its parameters.
    for program in programs_of(eqn.params.values()):
        if open_jaxpr(program) is body:
            return program
    return expand(eqn)


def is_program(value: object) -> TypeGuard[Program]:
    """Returns whether a value is a jaxpr, with or without its constants."""
    return isinstance(value, core.Jaxpr | ClosedJaxpr)


def open_jaxpr(program: Program) -> core.Jaxpr:
    """Returns a program without its constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def consts_of(program: Program) -> tuple[Any, ...]:
    """Returns the constants of a program; nothing for one without them."""
    # The open jaxprs of jax 0.10 have no such attribute.
    return tuple(getattr(program, "consts", ()))


def shape_of(atom: Atom) -> Shape:
    """Returns the shape of a value in a program."""
    return array_attributes.shape_of(atom.aval)


def dtype_of(atom: Atom) -> Any:
    """Returns the dtype of a value in a program; None if the value is not an array."""
    return array_attributes.dtype_of(atom.aval)


def is_literal(atom: Atom) -> TypeGuard[core.Literal]:
    """Returns whether an operand or output of a program is a literal, which has no hash."""
    return isinstance(atom, core.Literal)


def literal_value(atom: Atom) -> Any:
    """Returns the value of a literal; raises for a variable."""
    assert isinstance(atom, core.Literal), atom
    return atom.val


def walk(program: Program) -> Iterator[core.JaxprEqn]:
    """Yields all equations of a program, each before the equations inside it."""
    for eqn in open_jaxpr(program).eqns:
        yield eqn
        for inner in jaxprs_in(eqn.params):
            yield from walk(inner)


def walk_used(program: Program) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a program whose results are used in it, and those inside them.

    All results of a program inside an equation count as used.
    """
    opened = open_jaxpr(program)
    used = {x for x in opened.outvars if isinstance(x, core.Var)}
    for eqn in reversed(opened.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(x for x in eqn.invars if isinstance(x, core.Var))
            yield eqn
            for inner in jaxprs_in(eqn.params):
                yield from walk_used(inner)


def constants_of(program: Program) -> Iterator[Any]:
    """Yields the constants of a program and of all programs inside it: a `jit` has its own."""
    # Those of a program in a parameter of another library's primitive, such as lineax's
    # `linear_solve`, may be values of the program around it.
    yield from (x for x in consts_of(program) if not isinstance(x, Tracer))
    for eqn in open_jaxpr(program).eqns:
        for inner in programs_of(eqn.params.values()):
            yield from constants_of(inner)


# Types of parameters that were found to be no program and no container. It is as small as the set
# of all types of parameters. Every reader of programs asks for the programs of each equation.
_plain_types: set[type] = set()


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """Yields the programs in the parameters of an equation, without their constants."""
    return map(open_jaxpr, programs_of(params.values()))


def programs_of(parameters: Iterable[object]) -> list[Any]:
    """Returns the programs in parameters of an equation, also in tuples, lists and dicts."""
    found: list[Any] = []
    for value in parameters:
        if type(value) in _plain_types:
            continue
        if is_program(value):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += programs_of(value)
        elif isinstance(value, dict):
            found += programs_of(value.values())
        else:
            _plain_types.add(type(value))
    return found
