"""Confirms that a function of one row or none is what its labelled program computes.

JAX writes some operations differently if a dim has the size 0 or 1: it omits operations that change
nothing, and uses shortcuts. The meaning is the same, but `confirmation` cannot compare the traces.
So this module compares what the user's code did. Each instruction of it that called JAX (`Site`)
must have called for the same operations with the same numbers. The function is rejected if

- an instruction computed something in only one of the traces: a branch (`if x.shape[0] == 1`);
- a number is not the predicted one: computed from the number of rows by an unknown formula;
- a size is not the predicted one, for an operation that both traces have;
- an instruction reads another value (`x if n == 1 else y`), see `value_origins`.

A few functions of JAX have another formula for one row or none: `_OTHER_FORMULAS`.
"""

import dataclasses
import pathlib
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Program
from tpudist.programs.rows.compared_params import JAX_FOLDER
from tpudist.programs.rows.labels import LabelledEquation, LabelledProgram, predict_number
from tpudist.programs.rows.row_sizes import Point, size_at
from tpudist.programs.rows.trace_steps import (
    NOWHERE,
    Predicted,
    Site,
    Step,
    Trace,
    Traced,
    changes_nothing,
    format_number,
    is_call,
    shapes_compared,
    site_of,
    without_ones,
)
from tpudist.programs.rows.value_origins import ValueOrigins, find_other_value
from tpudist.programs.user_lines import users_line_of
from tpudist.xla import user_code

# Functions of JAX whose formula for more rows is not their formula for one row or none: they branch
# on the number. tests/programs/rows/test_row_program.py compares functions with the exact shapes.
_OTHER_FORMULAS = frozenset(
    "linspace _linspace geomspace logspace cov corrcoef polyfit gradient trapezoid "
    "argwhere flatnonzero nonzero".split()
)
# Operations that take or join parts. They change nothing if a part is all of the array.
_OF_PARTS = frozenset("concatenate pad slice".split())
# Folders of libraries of assertions, which raise on behalf of the code that calls them.
_ASSERTION_LIBRARIES = {"beartype", "chex", "jaxtyping", "testing", "typeguard"}


@dataclasses.dataclass
class _SiteRecord:
    """The calls of JAX by one instruction of the user's code, in one trace.

    Attributes:
        first: The first equation; None if the equations are known by the call around them only.
        names: Names of the functions of JAX that were called.
        numbers: The numbers of the operations, by primitive and shapes.
        steps: The operations whose results are used, by primitive and shapes.
        computed: Names of the primitives that change something.
        shapes: The shapes of the operations whose results are used, without dims of size 1, by
            primitive.
        shapes_checked: The same for the operations that change something, or may change something
            for more rows.
    """

    first: core.JaxprEqn | None = None
    names: set[str] = dataclasses.field(default_factory=set)
    numbers: dict[tuple, set[Any]] = dataclasses.field(default_factory=dict)
    steps: dict[tuple, list[Step]] = dataclasses.field(default_factory=dict)
    computed: set[str] = dataclasses.field(default_factory=set)
    shapes: dict[str, set[tuple]] = dataclasses.field(default_factory=dict)
    shapes_checked: dict[str, set[tuple]] = dataclasses.field(default_factory=dict)


class _SiteRecords:
    """The calls of JAX by each instruction of the user's code, in one trace.

    Attributes:
        by_site: The records.
        equations: Ids of the equations whose results are used.
    """

    def __init__(self, program: Trace):
        self.by_site: dict[Site, _SiteRecord] = {}
        self.equations: set[int] = set()
        self._record_program(program, [True] * len(program.jaxpr.outvars), NOWHERE)

    def _record_program(self, program: Trace, used: list[bool], around: Site) -> list[bool]:
        """Records what a trace computes for its used results; returns which inputs are used."""
        # Backward, as dead code is eliminated: an equation counts only if a live equation reads
        # one of its results that has elements. JAX may omit the others in one of the two traces.
        outputs = zip(program.jaxpr.outvars, used, strict=True)
        live = {v for v, is_used in outputs if is_used and isinstance(v, core.Var)}
        for step in reversed(program.steps()):
            eqn = step.eqn
            results = zip(eqn.outvars, step.shapes[len(eqn.invars) :], strict=True)
            live_results = [0 not in shape and v in live for v, shape in results]
            if not any(live_results) and not eqn.effects:
                self._find_record(eqn, around)  # the user's instruction has run all the same
                continue
            site = self._record_step(step, around)
            reads = [True] * len(eqn.invars)
            for body in step.bodies:
                num_outputs = len(body.jaxpr.outvars)
                is_plain_call = (
                    len(step.bodies) == 1 and num_outputs == len(eqn.outvars) and is_call(eqn)
                )
                inner_used = live_results if is_plain_call else [True] * num_outputs
                inner_reads = self._record_program(body, inner_used, site)
                # Some calls have operands that are not inputs of their program.
                if is_plain_call and len(inner_reads) == len(reads):
                    reads = inner_reads
            operands = zip(eqn.invars, reads, strict=True)
            live |= {v for v, is_read in operands if is_read and isinstance(v, core.Var)}
        return [v in live for v in program.jaxpr.invars]

    def _find_record(self, eqn: core.JaxprEqn, around: Site) -> tuple[Site, _SiteRecord]:
        """Returns the site of an equation, or of the call around it, and its record."""
        own_site, called = site_of(eqn)
        site = around if own_site is None else own_site
        record = self.by_site.setdefault(site, _SiteRecord())
        if own_site is not None:
            record.names.add(called)
            record.first = record.first or eqn
        if eqn.primitive.name in ("jit", "pjit"):
            record.names.add(str(eqn.params.get("name")))
        return site, record

    def _record_step(self, step: Step, around: Site) -> Site:
        eqn = step.eqn
        site, record = self._find_record(eqn, around)
        self.equations.add(id(eqn))
        name = eqn.primitive.name
        shapes = tuple(map(without_ones, step.shapes))
        if name in _OF_PARTS:  # parts without elements may be in another order
            shapes = tuple(shape for shape in shapes if 0 not in shape)
        record.shapes.setdefault(name, set()).add(shapes)
        if not changes_nothing(step):
            record.computed.add(name)
        # Not of operations with programs inside, which are compared themselves: which values a loop
        # saves for its gradient depends on the trace.
        is_checked = not changes_nothing(step) or name in _OF_PARTS
        if is_checked and not jaxprs.programs_of(eqn.params.values()):
            record.shapes_checked.setdefault(name, set()).add(shapes)
        key = eqn.primitive.name, shapes_compared(step)
        record.numbers.setdefault(key, set()).update(step.numbers)
        record.steps.setdefault(key, []).append(step)
        return site


def find_deviation_of_few(labelled: LabelledProgram, program: Program, counts: Point) -> str | None:
    """Describes where the trace for small counts is another function; None if it is the same."""
    predicted, traced = Predicted(labelled, counts), Traced(program)
    expected, actual = _SiteRecords(predicted), _SiteRecords(traced)

    sites = dict.fromkeys([*expected.by_site, *actual.by_site])
    pairs = {x: (expected.by_site.get(x), actual.by_site.get(x)) for x in sites}

    def describe(deviation: str, site: Site) -> str:
        equations = [x.first for x in pairs.get(site, ()) if x is not None and x.first is not None]
        line = users_line_of(equations[0]) if equations else ""
        return f"{deviation} ({line})" if line else deviation

    for site, (own, other) in pairs.items():
        deviation = _compare(own, other, is_known=site != NOWHERE)
        if deviation is not None:
            return describe(deviation, site)
    passing = {site for site, both in pairs.items() if not all(x and x.computed for x in both)}
    other = find_other_value(
        ValueOrigins(predicted, expected.equations, passing),
        ValueOrigins(traced, actual.equations, passing),
    )
    if other is not None:
        return describe(*other)
    outputs = jaxprs.open_jaxpr(program).outvars
    shapes = [tuple(size_at(d, counts) for d in dims) for dims in labelled.out_dims]
    if shapes != [tuple(jaxprs.shape_of(x)) for x in outputs]:
        return "the shapes of its results"
    for i, output in enumerate(outputs):
        literal = predict_number(labelled.out_literals.get(i), counts)
        number = format_number(output.val) if isinstance(output, core.Literal) else None
        if number != (None if literal is None else format_number(literal)):
            return f"a result, which is {'computed' if number is None else number}"
    return None


def live_equations(labelled: LabelledProgram, counts: Point) -> set[int]:
    """Returns the ids of the equations whose results are used with these numbers of rows."""
    return _SiteRecords(Predicted(labelled, counts)).equations


def pair_equations(
    labelled: LabelledProgram, program: Program, counts: Point
) -> list[tuple[LabelledEquation, core.JaxprEqn]]:
    """Pairs the equations of both traces that are equal except for numbers.

    A site is paired if it called for the same operations on the same shapes, equally often. Equal
    operations of a site are paired in their order.
    """
    expected = _SiteRecords(Predicted(labelled, counts))
    actual = _SiteRecords(Traced(program))
    pairs = []
    for site, record in expected.by_site.items():
        other_record = actual.by_site.get(site)
        if site == NOWHERE or other_record is None or record.names & _OTHER_FORMULAS:
            continue
        own, others = record.steps, other_record.steps
        if _count_computing(own) != _count_computing(others):
            continue
        for key in own.keys() & others.keys():
            if len(own[key]) != len(others[key]):
                continue
            for step, other in zip(own[key], others[key], strict=True):
                if step.labelled is not None and _literals_of(step) == _literals_of(other):
                    pairs.append((step.labelled, other.eqn))
    return pairs


def _count_computing(steps: dict[tuple, list[Step]]) -> dict[tuple, int]:
    """Returns how often each operation occurs that does not only change the shape."""
    return {key: len(equal) for key, equal in steps.items() if not all(map(changes_nothing, equal))}


def _literals_of(step: Step) -> list[tuple[int, str]]:
    """Returns the positions and types of the operands that are literals."""
    operands = enumerate(step.eqn.invars)
    return [(i, str(x.aval)) for i, x in operands if isinstance(x, core.Literal)]


def find_other_formula(labelled: LabelledProgram, counts: Point) -> str | None:
    """Returns the name of a function in a program that has another formula for no rows, if any."""
    records = _SiteRecords(Predicted(labelled, counts)).by_site.values()
    return min(set().union(*(x.names for x in records)) & _OTHER_FORMULAS, default=None)


def is_of_library(error: BaseException) -> bool:
    """Returns whether JAX or another library raised an error, and not the user's code.

    Errors of assertion libraries count as the user's: code calls them to check its arguments.
    """
    traceback, name = error.__traceback__, ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
    if name.startswith(JAX_FOLDER):
        return True
    return user_code.is_other_library(name) and _ASSERTION_LIBRARIES.isdisjoint(
        pathlib.Path(name).parts
    )


def _compare(
    expected: _SiteRecord | None, actual: _SiteRecord | None, *, is_known: bool
) -> str | None:
    """Describes how the calls of a site differ; None if they do not.

    Args:
        expected: The calls in the predicted trace; None if the site is not in it.
        actual: The calls in the actual trace; None if the site is not in it.
        is_known: Whether the site is an instruction, and not `NOWHERE`.
    """
    is_in_both = expected is not None and actual is not None
    expected, actual = expected or _SiteRecord(), actual or _SiteRecord()
    if is_known and not is_in_both:
        primitives = expected.computed | actual.computed
        if primitives:
            return f"{', '.join(sorted(primitives))}, in only one of the two traces"
        return None
    own, others = expected.numbers, actual.numbers
    functions = expected.names & _OTHER_FORMULAS
    if own != others and functions:
        return f"{min(functions)}, which JAX then computes in another way"
    for name in expected.shapes.keys() & actual.shapes_checked.keys():
        # A subset, for the same reason as below.
        if is_known and not actual.shapes_checked[name] <= expected.shapes[name]:
            return f"the shapes of {name}"
    for key in own.keys() & others.keys():
        # A subset, since JAX may need fewer of several operations for few rows.
        if not others[key] <= own[key]:
            return (
                f"the numbers {_format(others[key])} of {key[0]}, where {_format(own[key])} follow"
            )
    return None


def _format(numbers: set[Any]) -> str:
    return ", ".join(sorted(map(str, numbers))) or "none"
