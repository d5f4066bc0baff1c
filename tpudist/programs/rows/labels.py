"""Which dims, parameters and numbers of a program depend on how many rows its batches have.

The function has been traced at several numbers of rows. The traces must have one structure: the
same primitives that read the same values. What differs between them (sizes of dims, parameters,
scalars, constants) is a function of the number of rows, which `sizes` finds.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_sizes import (
    Dim,
    Piecewise,
    Point,
    RowNumber,
    RowSize,
    fit_number,
    fit_size,
    size_at,
)
from tpudist.programs.user_lines import users_line_of

Dims = tuple[Dim, ...]

NOT_COMPARED = frozenset(
    "jvp fwd bwd name jvp_jaxpr_fun fwd_jaxpr_thunk jvp_jaxpr_thunk out_trees policy ctx_mesh "
    "update_jaxpr compiler_options_kvs out_sharding sharding unconstrained_dims "
    "fun_jaxpr_thunk".split()
)
"""Parameters that say nothing of what is computed, or that hold a program in another form."""


@dataclasses.dataclass(frozen=True)
class Varies:
    """A parameter or a constant that depends on the number of rows in no way that is known.

    Attributes:
        values: What it was in each trace.
    """

    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Corner:
    """A constant that has rows: that of fewer rows is the leading corner of that of more.

    Attributes:
        value: That of the most rows.
    """

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledEquation:
    """One equation, and what in it depends on the number of rows.

    Attributes:
        eqn: That of the first trace.
        in_dims: The dims of each operand.
        out_dims: The dims of each result.
        params: The parameters, with a `RowSize` for each size that depends on the rows, and
            `Varies` for what differs in another way. Those that hold programs are not among them.
        literals: For each operand that is a literal, its value, `RowSize`, `RowNumber` or
            `Piecewise`.
        bodies: The programs that it holds, by parameter.
    """

    eqn: core.JaxprEqn
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    params: Mapping[str, Any]
    literals: Mapping[int, Any]
    bodies: Mapping[str, tuple["LabelledProgram", ...]]

    @property
    def line(self) -> str:
        """The user's line, as `file:line`, or an empty string."""
        return users_line_of(self.eqn)

    @property
    def depends_on_rows(self) -> bool:
        """Whether anything in it depends on the number of rows."""
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        values = itertools.chain(dims, self.params.values(), self.literals.values())
        bodies = itertools.chain(*self.bodies.values())
        return any(map(varies, values)) or any(body.depends_on_rows for body in bodies)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledProgram:
    """A program, and what in it depends on the number of rows.

    Attributes:
        jaxpr: That of the first trace.
        consts: Its constants: values, `Corner`, `RowSize`, `RowNumber`, `Piecewise` or `Varies`.
        equations: Its equations.
        in_dims: The dims of each input.
        out_dims: The dims of each output.
        out_literals: For each output that is a literal, its value.
    """

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]
    equations: tuple[LabelledEquation, ...]
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    out_literals: Mapping[int, Any]

    @functools.cached_property
    def depends_on_rows(self) -> bool:
        """Whether anything in it depends on the number of rows."""
        values = itertools.chain(self.consts, self.out_literals.values())
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        return any(map(varies, itertools.chain(values, dims))) or any(
            equation.depends_on_rows for equation in self.equations
        )


def find_difference(first: Any, second: Any) -> str | None:
    """Where two traces have another structure, in words; None where they have the same."""
    a, b = jaxprs.open_jaxpr(first), jaxprs.open_jaxpr(second)
    numbers: tuple[dict, dict] = ({}, {})

    def describe(atom: Any, which: int) -> tuple:
        if isinstance(atom, core.Literal):
            number = -1
        else:
            number = numbers[which].setdefault(atom, len(numbers[which]))
        aval = atom.aval
        return number, len(getattr(aval, "shape", ())), getattr(aval, "dtype", None)

    def differ(x: Sequence[Any], y: Sequence[Any]) -> bool:
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
                return difference if ":" in difference else f"{difference}{_at(y)}"
        if differ(x.invars, y.invars) or differ(x.outvars, y.outvars):
            return f"the input of {x.primitive.name}{_at(y)}"
    if len(a.eqns) != len(b.eqns):
        longer, at = (a, len(b.eqns)) if len(a.eqns) > len(b.eqns) else (b, len(a.eqns))
        return f"{longer.eqns[at].primitive.name}{_at(longer.eqns[at])}"
    if differ(a.outvars, b.outvars):
        return "its result"
    return None


def label(programs: Sequence[Any], points: tuple[Point, ...]) -> LabelledProgram:
    """Labels a program by its traces at these points, which have one structure.

    Raises:
        RowsError: A size depends on the number of rows in no way that is known.
    """
    return _Labeller(points).program(list(programs))


class _Labeller:
    def __init__(self, points: tuple[Point, ...]):
        self._points = points
        self._known: dict[tuple[int, ...], LabelledProgram] = {}

    def program(self, programs: list[Any]) -> LabelledProgram:
        key = tuple(map(id, programs))
        found = self._known.get(key)
        if found is not None:
            return found
        opened = [jaxprs.open_jaxpr(program) for program in programs]
        first = opened[0]
        consts = list(zip(*(getattr(p, "consts", ()) for p in programs), strict=True))
        labelled = self._known[key] = LabelledProgram(
            first,
            tuple(self._value(values) for values in consts),
            tuple(self._equation(eqns) for eqns in zip(*(j.eqns for j in opened), strict=True)),
            self._all_dims([j.invars for j in opened]),
            self._all_dims([j.outvars for j in opened]),
            self._literals([j.outvars for j in opened]),
        )
        return labelled

    def _equation(self, eqns: Sequence[core.JaxprEqn]) -> LabelledEquation:
        first = eqns[0]
        held: dict[str, list] = {}
        for bodies in zip(*(list(bodies_of(e)) for e in eqns), strict=True):
            name = bodies[0][0]
            try:
                body = self.program([body for _, body in bodies])
            except RowsError as error:  # of what a function of JAX's holds, its call has the line
                raise RowsError(error.reason, error.line or users_line_of(first)) from None
            held.setdefault(name, []).append(body)
        params = {
            name: value if name in NOT_COMPARED else self._param([e.params[name] for e in eqns])
            for name, value in first.params.items()
            if name not in held
        }
        try:
            return LabelledEquation(
                first,
                self._all_dims([e.invars for e in eqns]),
                self._all_dims([e.outvars for e in eqns]),
                params,
                self._literals([e.invars for e in eqns]),
                {name: tuple(bodies) for name, bodies in held.items()},
            )
        except RowsError as error:
            raise RowsError(
                f"{first.primitive.name}: {error.reason}", users_line_of(first)
            ) from None

    def _all_dims(self, variables: Sequence[Sequence[Any]]) -> tuple[Dims, ...]:
        return tuple(map(self._dims, zip(*variables, strict=True)))

    def _dims(self, variables: Sequence[Any]) -> Dims:
        found = []
        for sizes in zip(*(getattr(v.aval, "shape", ()) for v in variables), strict=True):
            size = fit_size(tuple(sizes), self._points)
            if size is None:
                raise RowsError(
                    f"a size that is {_describe(sizes)} for {_describe(self._points)} rows"
                )
            found.append(size)
        return tuple(found)

    def _literals(self, atoms: Sequence[Sequence[Any]]) -> dict[int, Any]:
        return {
            i: self._value([x.val for x in same])
            for i, same in enumerate(zip(*atoms, strict=True))
            if isinstance(same[0], core.Literal)
        }

    def _param(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(are_equal(first, value) for value in values[1:]):
            return first
        if callable(first):
            return first  # it is compared by what it holds
        if isinstance(first, tuple) and type(first) is tuple:
            if len({len(value) for value in values}) > 1:
                return Varies(tuple(values))
            return tuple(self._param(same) for same in zip(*values, strict=True))
        if all(_is_whole(value) for value in values):
            size = fit_size(tuple(map(int, values)), self._points)
            if size is not None:
                return size
        return Varies(tuple(values))

    def _value(self, values: Sequence[Any]) -> Any:
        """What a constant or a literal is for any number of rows."""
        first = values[0]
        if all(value is first for value in values):
            return first
        if any(isinstance(value, Tracer) for value in values):
            return Varies(tuple(values))
        try:
            arrays = [np.asarray(value) for value in values]
        except Exception:  # random keys and what else is no numbers
            return Varies(tuple(values))
        if all(_same_numbers(arrays[0], x) for x in arrays[1:]):
            return first
        if arrays[0].ndim:
            largest = max(range(len(arrays)), key=lambda i: arrays[i].shape)
            return (
                Corner(values[largest])
                if all(is_corner(x, arrays[largest]) for x in arrays)
                else Varies(tuple(values))
            )
        if arrays[0].dtype.kind in "iu":
            size = fit_size(tuple(int(x) for x in arrays), self._points)
            return Varies(tuple(values)) if size is None else size
        if arrays[0].dtype.kind == "f" or arrays[0].dtype.name == "bfloat16":
            number = fit_number([float(x) for x in arrays], self._points)
            return Varies(tuple(values)) if number is None else number
        return Varies(tuple(values))


def predict(value: Any, counts: Point) -> Any:
    """What a labelled value or parameter is with so many rows; `Varies` where that is not known."""
    if isinstance(value, RowSize):
        return size_at(value, counts)
    if isinstance(value, RowNumber):
        return float(value.at(counts))
    if isinstance(value, Piecewise):
        return Piecewise(predict(value.general, counts), value.pieces).at(counts)
    if type(value) is tuple:
        return tuple(predict(x, counts) for x in value)
    return value


def varies(value: Any) -> bool:
    """Whether a labelled value, parameter or size depends on the number of rows."""
    if isinstance(value, RowSize | RowNumber | Piecewise | Varies | Corner):
        return True
    return type(value) is tuple and any(map(varies, value))


def is_corner(small: np.ndarray, large: np.ndarray) -> bool:
    """Whether an array is the leading corner of another one."""
    if small.ndim != large.ndim or small.dtype != large.dtype:
        return False
    if any(a > b for a, b in zip(small.shape, large.shape, strict=True)):
        return False
    return _same_numbers(small, large[tuple(map(slice, small.shape))])


def are_equal(a: Any, b: Any) -> bool:
    """Whether two parameters are equal; NaN is, and a program that is traced again."""
    if a is b:
        return True
    if type(a) is type(b) and isinstance(a, core.Jaxpr | jaxprs.ClosedJaxpr):
        return find_difference(a, b) is None and str(a) == str(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return _same_numbers(np.asarray(a), np.asarray(b))
    try:
        if bool(a == b) or bool(a != a and b != b):
            return True
    except Exception:
        return False
    return type(a) is type(b) and _have_equal_parts(a, b)


def _have_equal_parts(a: Any, b: Any) -> bool:
    """Whether two parameters are, that hold others: a kernel's grid holds programs."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if not dataclasses.is_dataclass(a):
        return False
    names = [field.name for field in dataclasses.fields(a)]
    return bool(names) and all(are_equal(getattr(a, n), getattr(b, n)) for n in names)


def _same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def bodies_of(eqn: core.JaxprEqn) -> Iterator[tuple[str, Any]]:
    """The programs that an equation holds, with their constants, by parameter."""
    if eqn.primitive.name == "call_hi_primitive":
        yield "_prim", jaxprs.expand(eqn)
        return
    for name in sorted(eqn.params):
        if name not in NOT_COMPARED:
            for body in jaxprs.programs_of(eqn.params[name]):
                yield name, body


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _describe(values: Sequence[Any]) -> str:
    """Values of several traces, in words; points of one symbol as numbers."""
    plain = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in values]
    return ", ".join(map(str, plain))


def _at(eqn: core.JaxprEqn) -> str:
    line = users_line_of(eqn)
    return f" ({line})" if line else ""
