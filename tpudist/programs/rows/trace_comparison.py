"""Compares two traces of a function: their structure, and the parameters of their equations."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.rows.compared_params import NOT_COMPARED
from tpudist.programs.user_lines import users_line_of


def find_difference(first: Program, second: Program) -> str | None:
    """Describes where two traces differ in structure; None if they do not.

    A phrase for an error, such as "reduce_sum, or reduce_max (train.py:3)".
    """
    # Structure includes the wiring: each variable is numbered at its first use, and equal numbers
    # mean that both traces read the same value. `x - y` and `y - x` are the same primitives.
    a, b = jaxprs.open_jaxpr(first), jaxprs.open_jaxpr(second)
    numbers: tuple[dict, dict] = ({}, {})

    def describe(atom: Atom, trace: int) -> tuple:
        if isinstance(atom, core.Literal):
            number = -1  # its value may differ: the labels describe that
        else:
            number = numbers[trace].setdefault(atom, len(numbers[trace]))
        return number, len(jaxprs.shape_of(atom)), jaxprs.dtype_of(atom)

    def differ(x: Sequence[Atom], y: Sequence[Atom]) -> bool:
        return [describe(v, 0) for v in x] != [describe(v, 1) for v in y]

    if differ([*a.constvars, *a.invars], [*b.constvars, *b.invars]):
        return "its constants"
    for x, y in zip(a.eqns, b.eqns, strict=False):
        if x.primitive is not y.primitive:
            return f"{x.primitive.name}, or {y.primitive.name}{_at(y)}"
        inner, others = list(bodies_of(x)), list(bodies_of(y))
        if len(inner) != len(others):
            return f"the contents of {x.primitive.name}{_at(y)}"
        for (_, i), (_, j) in zip(inner, others, strict=True):
            difference = None if i is j else find_difference(i, j)
            if difference:
                # The innermost known line is the best one: it is the only part with a colon.
                return difference if ":" in difference else f"{difference}{_at(y)}"
        if differ(x.invars, y.invars) or differ(x.outvars, y.outvars):
            return f"the input of {x.primitive.name}{_at(y)}"
    if len(a.eqns) != len(b.eqns):
        longer, at = (a, len(b.eqns)) if len(a.eqns) > len(b.eqns) else (b, len(a.eqns))
        return f"{longer.eqns[at].primitive.name}{_at(longer.eqns[at])}"
    if differ(a.outvars, b.outvars):
        return "its result"
    return None


def are_equal(a: object, b: object) -> bool:
    """Returns whether two parameters are equal. NaN equals NaN, and programs compare by content."""
    if a is b:
        return True
    if type(a) is type(b) and jaxprs.is_program(a) and jaxprs.is_program(b):
        return find_difference(a, b) is None and str(a) == str(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return have_equal_numbers(np.asarray(a), np.asarray(b))
    try:
        if bool(a == b) or bool(a != a and b != b):
            return True
    except Exception:  # whatever the class of a parameter raises
        return False
    return type(a) is type(b) and _have_equal_parts(a, b)


def _have_equal_parts(a: object, b: Any) -> bool:
    # JAX's records of parameters may contain programs, as the grid of a kernel does.
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if not dataclasses.is_dataclass(a):
        return False
    names = [field.name for field in dataclasses.fields(a)]
    return bool(names) and all(are_equal(getattr(a, n), getattr(b, n)) for n in names)


def have_equal_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays have the same shape, dtype and numbers; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def bodies_of(eqn: core.JaxprEqn) -> Iterator[tuple[str, Any]]:
    """Yields the programs inside an equation with their constants, each after its parameter.

    They are sorted by the parameters' names, which are the same in all traces.
    """
    if eqn.primitive.name == "call_hi_primitive":
        yield "_prim", jaxprs.expand(eqn)
        return
    for name in sorted(eqn.params):
        if name not in NOT_COMPARED:
            for body in jaxprs.programs_of([eqn.params[name]]):
                yield name, body


def _at(eqn: core.JaxprEqn) -> str:
    line = users_line_of(eqn)
    return f" ({line})" if line else ""
