"""Whether a function of one row, or of none, is what its program for more rows computes.

JAX itself writes some operations in another way where a dim is 1 or 0: it leaves out what would
change nothing, and takes shortcuts. The meaning is the same; the trace is not. So what is compared
is what the user's code has done: the instructions of it that have called JAX, and the numbers that
these calls have brought. The same instruction, with the same numbers, has called the same function
of JAX for fewer rows. An instruction that has computed something in one trace and is not in the
other is a branch of the user's (`if x.shape[0] == 1`), and another number is one that his code has
computed from the number of rows in a way that is not known (`max(x.shape[0], 1)`): refused. So is
an instruction that is handed another value (`x if n == 1 else y`), see `value_origins`.

Few functions of JAX have another formula for one row or none; they are refused by name. Tests run
what JAX offers over rows against the exact shapes (tests/programs/rows/test_row_program.py).
"""

import collections
import pathlib
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.rows.labels import LabelledEquation, LabelledProgram, predict
from tpudist.programs.rows.row_sizes import Point, size_at
from tpudist.programs.rows.trace_steps import (
    JAX_FOLDER,
    NOWHERE,
    Predicted,
    Site,
    Step,
    Traced,
    changes_nothing,
    is_call,
    is_literal,
    number_in_words,
    shapes_compared,
    site_of,
)
from tpudist.programs.rows.value_origins import ValueOrigins, find_other_value
from tpudist.programs.user_lines import users_line_of
from tpudist.xla.hlo import source_lines

# Functions of JAX whose formula for more rows is not that for one, or for none.
_OTHER_FORMULAS = frozenset(
    "linspace _linspace geomspace logspace cov corrcoef polyfit gradient trapezoid".split()
)


# Packages whose functions raise where their caller wants an error.
_CHECKS = {"beartype", "chex", "jaxtyping", "testing", "typeguard"}


class _Calls:
    """What the instructions of the user's code have called, in one trace."""

    def __init__(self):
        self.numbers: dict[Site, dict[tuple, set[Any]]] = collections.defaultdict(dict)
        self.names: dict[Site, set[str]] = collections.defaultdict(set)
        self.first: dict[Site, core.JaxprEqn] = {}
        self.equations: set[int] = set()
        self.computed: dict[Site, set[str]] = collections.defaultdict(set)
        self.steps: dict[Site, dict[tuple, list[Step]]] = collections.defaultdict(dict)

    def note_site(self, eqn: core.JaxprEqn, around: Site) -> Site:
        """Notes where an equation comes from; gives the place around it if that is not known."""
        site, called = site_of(eqn)
        if site is None:
            site = around
        else:
            self.names[site].add(called)
            self.first.setdefault(site, eqn)
        if eqn.primitive.name in ("jit", "pjit"):
            self.names[site].add(str(eqn.params.get("name")))
        self.numbers[site]  # there is one now
        return site

    def note(self, step: "Step", around: Site) -> Site:
        """Notes an equation, and gives its site."""
        eqn = step.eqn
        site = self.note_site(eqn, around)
        self.equations.add(id(eqn))
        if not changes_nothing(step):
            self.computed[site].add(eqn.primitive.name)
        key = eqn.primitive.name, shapes_compared(step)
        self.numbers[site].setdefault(key, set()).update(step.numbers)
        self.steps[site].setdefault(key, []).append(step)
        return site


def find_deviation(labelled: LabelledProgram, program: Any, counts: Point) -> str | None:
    """Where the trace for few rows is another function, in words; None where it is the same."""
    expected, actual = _Calls(), _Calls()
    predicted, traced = Predicted(labelled, counts), Traced(program)
    _note(expected, predicted, None, NOWHERE)
    _note(actual, traced, None, NOWHERE)

    def describe(wrong: str, site: Site) -> str:
        first = expected.first.get(site) or actual.first.get(site)
        line = users_line_of(first) if first is not None else ""
        return f"{wrong} ({line})" if line else wrong

    sites = dict.fromkeys([*expected.numbers, *actual.numbers])
    for site in sites:
        wrong = _compare(expected, actual, site)
        if wrong is not None:
            return describe(wrong, site)
    passing = {site for site in sites if not (expected.computed[site] and actual.computed[site])}
    other = find_other_value(
        ValueOrigins(predicted, expected.equations, passing),
        ValueOrigins(traced, actual.equations, passing),
    )
    if other is not None:
        return describe(*other)
    shapes = [tuple(size_at(d, counts) for d in dims) for dims in labelled.out_dims]
    results: list[Any] = [v.aval for v in jaxprs.open_jaxpr(program).outvars]
    if shapes != [tuple(x.shape) for x in results]:
        return "the shapes of its results"
    for i, variable in enumerate(jaxprs.open_jaxpr(program).outvars):
        literal = predict(labelled.out_literals.get(i), counts)
        found = number_in_words(variable.val) if isinstance(variable, core.Literal) else None
        if found != (None if literal is None else number_in_words(literal)):
            return f"a result, which is {'computed' if found is None else found}"
    return None


def live_equations(labelled: LabelledProgram, counts: Point) -> set[int]:
    """The ids of the equations that compute something that is used, with these numbers of rows."""
    calls = _Calls()
    _note(calls, Predicted(labelled, counts), None, NOWHERE)
    return calls.equations


def pair_equations(
    labelled: LabelledProgram, program: Any, counts: Point
) -> list[tuple[LabelledEquation, core.JaxprEqn]]:
    """The equations of the user's instructions that are the same for few rows, but for numbers.

    Those of an instruction that has called JAX for the same operations on the same shapes, as
    often: the first is the first of them there too.
    """
    expected, actual = _Calls(), _Calls()
    _note(expected, Predicted(labelled, counts), None, NOWHERE)
    _note(actual, Traced(program), None, NOWHERE)
    pairs = []
    for site, own in expected.steps.items():
        theirs = actual.steps.get(site, {})
        if site == NOWHERE or expected.names[site] & _OTHER_FORMULAS or not _alike(own, theirs):
            continue
        for key in own.keys() & theirs.keys():
            if len(own[key]) != len(theirs[key]):
                continue
            for step, other in zip(own[key], theirs[key], strict=True):
                literals = [_places(x.eqn) for x in (step, other)]
                if step.labelled is not None and literals[0] == literals[1]:
                    pairs.append((step.labelled, other.eqn))
    return pairs


def _alike(own: dict[tuple, list[Step]], theirs: dict[tuple, list[Step]]) -> bool:
    """Whether an instruction has called for the same operations, but for shaping."""
    computing = [
        {key: len(steps) for key, steps in each.items() if not all(map(changes_nothing, steps))}
        for each in (own, theirs)
    ]
    return computing[0] == computing[1]


def _places(eqn: core.JaxprEqn) -> list[tuple[int, str]]:
    """Which operands of an equation are literals, and of what dtype."""
    return [(i, str(x.aval)) for i, x in enumerate(eqn.invars) if isinstance(x, core.Literal)]


def find_other_formula(labelled: LabelledProgram, counts: Point) -> str | None:
    """A function of JAX in a program whose formula is not that for no rows, if there is one."""
    calls = _Calls()
    _note(calls, Predicted(labelled, counts), None, NOWHERE)
    found = set().union(*calls.names.values()) & _OTHER_FORMULAS
    return min(found, default=None)


def is_of_library(error: BaseException) -> bool:
    """Whether an error was raised in JAX or another library, and not in the code that calls it.

    Libraries of assertions do not count: code calls them to say what it accepts.
    """
    traceback, name = error.__traceback__, ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
    if name.startswith(JAX_FOLDER):
        return True
    return source_lines.is_other_library(name) and _CHECKS.isdisjoint(pathlib.Path(name).parts)


def _compare(expected: _Calls, actual: _Calls, site: Site) -> str | None:
    if site != NOWHERE and (site in expected.numbers) != (site in actual.numbers):
        alone = expected.computed[site] | actual.computed[site]
        if alone:
            return f"{', '.join(sorted(alone))}, in only one of them"
        return None
    own, theirs = expected.numbers.get(site, {}), actual.numbers.get(site, {})
    same = own == theirs
    for name in sorted(expected.names[site] & _OTHER_FORMULAS):
        if not same:
            return f"{name}, which JAX then computes in another way"
    for key in own.keys() & theirs.keys():
        if not theirs[key] <= own[key]:  # of several JAX may need fewer then
            return f"the numbers {_list(theirs[key])} of {key[0]}, where {_list(own[key])} follow"
    return None


def _list(numbers: set[Any]) -> str:
    return ", ".join(sorted(map(str, numbers))) or "none"


def _note(
    calls: _Calls, program: Predicted | Traced, used: list[bool] | None, around: Site
) -> list[bool]:
    """Notes what a trace computes for those of its results that are used; None for all.

    What ends in arrays without elements alone is computed for nothing, and JAX may leave it out.

    Returns:
        For each of its inputs, whether it is used.
    """
    outputs = program.jaxpr.outvars
    wanted = [True] * len(outputs) if used is None else used
    live = {v for v, want in zip(outputs, wanted, strict=True) if want and not is_literal(v)}
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
            inside = _note(calls, body, given if alike and is_call(eqn) else None, site)
            if alike and is_call(eqn) and len(inside) == len(reads):
                reads = inside
        live |= {v for v, read in zip(eqn.invars, reads, strict=True) if read and not is_literal(v)}
    return [v in live for v in program.jaxpr.invars]
