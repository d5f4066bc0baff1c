"""Whether a function of one row, or of none, is what its program for more rows computes.

JAX itself writes some operations in another way where a dim is 1 or 0: it leaves out what would
change nothing, and takes shortcuts. The meaning is the same; the trace is not. So what is compared
is what the user's code has done: the instructions of it that have called JAX, and the numbers that
these calls have brought. The same instruction, with the same numbers, has called the same function
of JAX for fewer rows. An instruction that has computed something in one trace and is not in the
other is a branch of the user's (`if x.shape[0] == 1`), and another number is one that his code has
computed from the number of rows in a way that is not known (`max(x.shape[0], 1)`): refused.

Few functions of JAX have another formula for one row or none; they are refused by name. Tests run
what JAX offers over rows against the exact shapes (tests/xla/rows/test_row_program.py).
"""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.xla import jaxprs
from tpudist.xla.rows.labels import (
    NOT_COMPARED,
    Corner,
    LabelledEquation,
    LabelledProgram,
    Varies,
    bodies_of,
    predict,
)
from tpudist.xla.rows.row_sizes import Point, RowNumber, RowSize, size_at
from tpudist.xla.rows.user_lines import users_line_of

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_LIBRARIES = (
    _JAX,
    os.path.join(os.path.dirname(np.__file__), ""),
    os.path.join(str(pathlib.Path(__file__).parents[2]), ""),
    contextlib.__file__,
    functools.__file__,
    "<",
)
# What calls, or stands for the sum that autodiff makes of several uses.
_CALLS = frozenset(
    "add_any closed_call copy custom_jvp_call custom_vjp_call jit pjit pvary "
    "tpudist.claim_equal".split()
)
# Functions of JAX whose formula for more rows is not that for one, or for none.
_OTHER_FORMULAS = frozenset(
    "linspace _linspace geomspace logspace cov corrcoef polyfit gradient trapezoid".split()
)

Site = tuple[str, int, int]
"""A file, the first line of a function, and the instruction in it that has called JAX."""
_NOWHERE: Site = ("", 0, 0)


class _Calls:
    """What the instructions of the user's code have called, in one trace."""

    def __init__(self):
        self.numbers: dict[Site, dict[tuple, set[Any]]] = collections.defaultdict(dict)
        self.names: dict[Site, set[str]] = collections.defaultdict(set)
        self.lines: dict[Site, str] = {}
        self.equations: set[int] = set()
        self.computed: dict[Site, set[str]] = collections.defaultdict(set)
        self.steps: dict[Site, dict[tuple, list[_Step]]] = collections.defaultdict(dict)

    def note_site(self, eqn: core.JaxprEqn, around: Site) -> Site:
        """Notes where an equation comes from; gives the place around it if that is not known."""
        site, called = _site_of(eqn)
        if site is None:
            site = around
        else:
            self.names[site].add(called)
            self.lines.setdefault(site, users_line_of(eqn))
        if eqn.primitive.name in ("jit", "pjit"):
            self.names[site].add(str(eqn.params.get("name")))
        self.numbers[site]  # there is one now
        return site

    def note(self, step: "_Step", around: Site) -> Site:
        """Notes an equation, and gives its site."""
        eqn, shapes = step.eqn, step.shapes
        site = self.note_site(eqn, around)
        self.equations.add(id(eqn))
        if not _changes_nothing(step):
            self.computed[site].add(eqn.primitive.name)
        if eqn.primitive.name == "reduce_sum":
            shapes = tuple(map(_without_ones, shapes))
        key = eqn.primitive.name, shapes
        self.numbers[site].setdefault(key, set()).update(step.numbers)
        self.steps[site].setdefault(key, []).append(step)
        return site


def find_deviation(labelled: LabelledProgram, program: Any, counts: Point) -> str | None:
    """Where the trace for few rows is another function, in words; None where it is the same."""
    expected, actual = _Calls(), _Calls()
    _note(expected, _Predicted(labelled, counts), None, _NOWHERE)
    _note(actual, _Traced(program), None, _NOWHERE)
    for site in dict.fromkeys([*expected.numbers, *actual.numbers]):
        wrong = _compare(expected, actual, site)
        if wrong is not None:
            line = expected.lines.get(site) or actual.lines.get(site)
            return f"{wrong} ({line})" if line else wrong
    shapes = [tuple(size_at(d, counts) for d in dims) for dims in labelled.out_dims]
    results: list[Any] = [v.aval for v in jaxprs.open_jaxpr(program).outvars]
    if shapes != [tuple(x.shape) for x in results]:
        return "the shapes of its results"
    for i, variable in enumerate(jaxprs.open_jaxpr(program).outvars):
        predicted = predict(labelled.out_literals.get(i), counts)
        actual = _number(variable.val) if isinstance(variable, core.Literal) else None
        if actual != (None if predicted is None else _number(predicted)):
            return f"a result, which is {'computed' if actual is None else actual}"
    return None


def live_equations(labelled: LabelledProgram, counts: Point) -> set[int]:
    """The ids of the equations that compute something that is used, with these numbers of rows."""
    calls = _Calls()
    _note(calls, _Predicted(labelled, counts), None, _NOWHERE)
    return calls.equations


def pair_equations(
    labelled: LabelledProgram, program: Any, counts: Point
) -> list[tuple[LabelledEquation, core.JaxprEqn]]:
    """The equations of the user's instructions that are the same for few rows, but for numbers.

    Those of an instruction that has called JAX for the same operations on the same shapes, as
    often: the first is the first of them there too.
    """
    expected, actual = _Calls(), _Calls()
    _note(expected, _Predicted(labelled, counts), None, _NOWHERE)
    _note(actual, _Traced(program), None, _NOWHERE)
    pairs = []
    for site, own in expected.steps.items():
        theirs = actual.steps.get(site, {})
        if site == _NOWHERE or expected.names[site] & _OTHER_FORMULAS or not _alike(own, theirs):
            continue
        for key in own.keys() & theirs.keys():
            if len(own[key]) != len(theirs[key]):
                continue
            for step, other in zip(own[key], theirs[key], strict=True):
                literals = [_places(x.eqn) for x in (step, other)]
                if step.labelled is not None and literals[0] == literals[1]:
                    pairs.append((step.labelled, other.eqn))
    return pairs


def _alike(own: dict[tuple, list["_Step"]], theirs: dict[tuple, list["_Step"]]) -> bool:
    """Whether an instruction has called for the same operations, but for shaping."""
    computing = [
        {key: len(steps) for key, steps in each.items() if not all(map(_changes_nothing, steps))}
        for each in (own, theirs)
    ]
    return computing[0] == computing[1]


def _places(eqn: core.JaxprEqn) -> list[tuple[int, str]]:
    """Which operands of an equation are literals, and of what dtype."""
    return [(i, str(x.aval)) for i, x in enumerate(eqn.invars) if isinstance(x, core.Literal)]


def find_other_formula(labelled: LabelledProgram, counts: Point) -> str | None:
    """A function of JAX in a program whose formula is not that for no rows, if there is one."""
    calls = _Calls()
    _note(calls, _Predicted(labelled, counts), None, _NOWHERE)
    found = set().union(*calls.names.values()) & _OTHER_FORMULAS
    return min(found, default=None)


def is_of_jax(error: BaseException) -> bool:
    """Whether an error was raised in JAX, and not in the code that calls it."""
    traceback, name = error.__traceback__, ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
    return name.startswith(_JAX)


def _compare(expected: _Calls, actual: _Calls, site: Site) -> str | None:
    if site != _NOWHERE and (site in expected.numbers) != (site in actual.numbers):
        alone = expected.computed[site] | actual.computed[site]
        if alone:
            return f"{', '.join(sorted(alone))}, in one of them only"
        return None
    own, theirs = expected.numbers.get(site, {}), actual.numbers.get(site, {})
    same = own == theirs
    for name in sorted(expected.names[site] & _OTHER_FORMULAS):
        if not same:
            return f"{name}, which JAX computes in another way then"
    for key in own.keys() & theirs.keys():
        if not theirs[key] <= own[key]:  # of several JAX may need fewer then
            return f"the numbers {_list(theirs[key])} of {key[0]}, where {_list(own[key])} follow"
    return None


def _list(numbers: set[Any]) -> str:
    return ", ".join(sorted(map(str, numbers))) or "none"


@dataclasses.dataclass(frozen=True)
class _Step:
    """One equation of a trace: what it reads and gives, and the programs that it holds."""

    eqn: core.JaxprEqn
    shapes: tuple[tuple[int, ...], ...]
    literals: tuple
    params: dict[str, Any]
    bodies: tuple["_Predicted | _Traced", ...]
    labelled: LabelledEquation | None = None

    @property
    def numbers(self) -> tuple:
        """What its literals and parameters say of what it computes."""
        return self.literals + _describe(self)


class _Predicted:
    """The trace that a labelled program predicts for these numbers of rows."""

    def __init__(self, labelled: LabelledProgram, counts: Point):
        self._labelled, self._counts = labelled, counts
        self.jaxpr = labelled.jaxpr

    def steps(self) -> list[_Step]:
        return [self._step(equation) for equation in self._labelled.equations]

    def _step(self, equation: LabelledEquation) -> _Step:
        dims = (*equation.in_dims, *equation.out_dims)
        shapes = tuple(tuple(size_at(dim, self._counts) for dim in each) for each in dims)
        literals = tuple(
            (i, _number(predict(_unwrap(value), self._counts)))
            for i, value in equation.literals.items()
        )
        params = {
            name: predict(value, self._counts)
            for name, value in equation.params.items()
            if name not in equation.bodies
        }
        held = [body for bodies in equation.bodies.values() for body in bodies]
        bodies = tuple(_Predicted(body, self._counts) for body in held)
        return _Step(equation.eqn, shapes, literals, params, bodies, equation)


class _Traced:
    """A trace as it is."""

    def __init__(self, program: Any):
        self.jaxpr = jaxprs.open_jaxpr(program)

    def steps(self) -> list[_Step]:
        return [self._step(eqn) for eqn in self.jaxpr.eqns]

    def _step(self, eqn: core.JaxprEqn) -> _Step:
        shapes = tuple(tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars))
        literals = tuple(
            (i, _number(x.val)) for i, x in enumerate(eqn.invars) if isinstance(x, core.Literal)
        )
        held = list(bodies_of(eqn))
        names = {name for name, _ in held}
        params = {k: v for k, v in eqn.params.items() if k not in names}
        return _Step(eqn, shapes, literals, params, tuple(_Traced(body) for _, body in held))


def _note(
    calls: _Calls, program: _Predicted | _Traced, used: list[bool] | None, around: Site
) -> list[bool]:
    """Notes what a trace computes for those of its results that are used; None for all.

    What ends in arrays without elements alone is computed for nothing, and JAX may leave it out.

    Returns:
        For each of its inputs, whether it is used.
    """
    outputs = program.jaxpr.outvars
    wanted = [True] * len(outputs) if used is None else used
    live = {v for v, want in zip(outputs, wanted, strict=True) if want and not _is_literal(v)}
    for step in reversed(program.steps()):
        eqn = step.eqn
        results = step.shapes[len(eqn.invars) :]
        given = [
            0 not in shape and v in live for v, shape in zip(eqn.outvars, results, strict=True)
        ]
        if not any(given) and not eqn.effects:
            calls.note_site(eqn, around)
            continue
        site = calls.note(step, around)
        reads = [True] * len(eqn.invars)
        for body in step.bodies:
            jaxpr = body.jaxpr
            alike = len(step.bodies) == 1 and len(jaxpr.outvars) == len(eqn.outvars)
            inside = _note(calls, body, given if alike and _is_call(eqn) else None, site)
            if alike and _is_call(eqn) and len(inside) == len(reads):
                reads = inside
        live |= {
            v for v, read in zip(eqn.invars, reads, strict=True) if read and not _is_literal(v)
        }
    return [v in live for v in program.jaxpr.invars]


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _is_call(eqn: core.JaxprEqn) -> bool:
    return isinstance(jaxprs.structure_of(eqn), jaxprs.Call)


def _describe(step: _Step) -> tuple:
    """What the parameters say of what is computed: powers, axes, where a slice begins."""
    params = step.params
    if step.eqn.primitive.name == "reduce_sum":
        params = {**params, "axes": _axes_of_sum(step)}
    return tuple(
        (name, str(_plain(value)))
        for name, value in sorted(params.items())
        if name not in NOT_COMPARED and not callable(value) and not _is_varied(value)
    )


def _axes_of_sum(step: _Step) -> tuple[int, ...]:
    """The axes that are summed, among those of another size than 1.

    The sum that undoes a broadcast has one axis more or less where that has the size 1.
    """
    others = [d for d, size in enumerate(step.shapes[0]) if size != 1]
    return tuple(others.index(d) for d in step.params["axes"] if d in others)


def _changes_nothing(step: _Step) -> bool:
    """Whether an equation gives what it is given, but for dims of size 1: JAX may leave it out."""
    eqn, shapes, name = step.eqn, step.shapes, step.eqn.primitive.name
    if name in _CALLS:
        return True
    first, last = (_without_ones(shapes[0]), _without_ones(shapes[-1])) if shapes else ((), ())
    match name:
        case "broadcast_in_dim" | "broadcast_to" | "expand_dims" | "reshape" | "slice" | "squeeze":
            if isinstance(eqn.invars[0], core.Literal):  # zeros are what no gradient comes to
                return not np.any(eqn.invars[0].val)
            return first == last
        case "convert_element_type":
            return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype  # type: ignore
        case "concatenate":
            return sum(0 not in shape for shape in shapes[: len(eqn.invars)]) <= 1
        case "pad":
            return first == last
        case "reduce_sum":
            return not _axes_of_sum(step)
        case "split":
            return len(eqn.outvars) == 1
        case "transpose":
            order = [d for d in step.params["permutation"] if shapes[0][d] != 1]
            return order == sorted(order)
    return False


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _plain(value: Any) -> Any:
    """A parameter with Python's integers for NumPy's, of which JAX takes both."""
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, np.integer) else value


def _is_varied(value: Any) -> bool:
    return isinstance(value, Varies) or (type(value) is tuple and any(map(_is_varied, value)))


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, Corner) else value


def _number(value: Any) -> Any:
    if isinstance(value, Tracer | Varies | RowSize | RowNumber):
        return "?"
    array = np.asarray(value)
    return f"{float(array):.5g}" if array.ndim == 0 and array.dtype.kind in "fiub" else "array"


def _site_of(eqn: core.JaxprEqn) -> tuple[Site | None, str]:
    """The user's instruction that an equation comes from, and the function that it has called.

    None for what JAX has traced once for all who call it.
    """
    traceback: Any = eqn.source_info.traceback
    called = ""
    if traceback is None:
        return None, called
    codes, instructions = traceback.raw_frames()
    for code, instruction in zip(codes, instructions, strict=True):  # the innermost is the first
        name = code.co_filename
        if not name.startswith(_LIBRARIES):
            return (name, code.co_firstlineno, instruction), called
        called = code.co_name
    return None, called
