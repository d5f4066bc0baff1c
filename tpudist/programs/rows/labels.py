"""Labels the dims, parameters and numbers of a program that depend on the number of rows.

The function is traced with several numbers of rows. The traces must have the same structure: the
same primitives, which read the same values. Everything else that differs (sizes, parameters,
scalars, constants) becomes a function of the number of rows, fitted by `row_sizes`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.rows.compared_params import is_compared
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_sizes import (
    TOLERANCE,
    Dim,
    Piecewise,
    Point,
    RowNumber,
    RowSize,
    are_two,
    fit_number,
    fit_size,
    size_at,
)
from tpudist.programs.rows.trace_comparison import are_equal, bodies_of, have_equal_numbers
from tpudist.programs.user_lines import users_line_of

Dims = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class UnfittedValue:
    """A parameter or constant that depends on the number of rows by no known formula.

    Attributes:
        values: The value in each trace.
    """

    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Corner:
    """A constant array with rows. The constant for fewer rows is its leading corner.

    Attributes:
        value: The constant of the trace with the most rows.
    """

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledEquation:
    """An equation, and its parts that depend on the number of rows.

    Attributes:
        eqn: The equation in the first trace.
        in_dims: The dims of each operand.
        out_dims: The dims of each result.
        params: The parameters that contain no programs. A size that depends on the rows is a
            `RowSize`; any other dependence is an `UnfittedValue`.
        literals: Operands that are literals, by position: a value, `RowSize`, `RowNumber` or
            `Piecewise`.
        bodies: The programs inside the equation, by parameter, in the order of `bodies_of`.
    """

    eqn: core.JaxprEqn
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    params: Mapping[str, Any]
    literals: Mapping[int, Any]
    bodies: Mapping[str, tuple["LabelledProgram", ...]]

    @property
    def line(self) -> str:
        """The user's line, as `file:line`; empty if it is unknown."""
        return users_line_of(self.eqn)

    @property
    def all_bodies(self) -> tuple["LabelledProgram", ...]:
        """The programs inside the equation, in the order of `bodies_of`."""
        return tuple(itertools.chain(*self.bodies.values()))

    @property
    def depends_on_rows(self) -> bool:
        """Whether anything in the equation depends on the number of rows."""
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        values = itertools.chain(dims, self.params.values(), self.literals.values())
        return any(map(depends_on_rows, values)) or any(
            body.depends_on_rows for body in self.all_bodies
        )


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledProgram:
    """A program, and its parts that depend on the number of rows.

    Attributes:
        jaxpr: The program in the first trace.
        consts: The constants: values, `Corner`, `RowSize`, `RowNumber`, `Piecewise` or
            `UnfittedValue`.
        equations: The equations.
        in_dims: The dims of each input.
        out_dims: The dims of each output.
        out_literals: Values of the outputs that are literals, by position.
    """

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]
    equations: tuple[LabelledEquation, ...]
    in_dims: tuple[Dims, ...]
    out_dims: tuple[Dims, ...]
    out_literals: Mapping[int, Any]

    @functools.cached_property
    def depends_on_rows(self) -> bool:
        """Whether anything in the program depends on the number of rows."""
        values = itertools.chain(self.consts, self.out_literals.values())
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        return any(map(depends_on_rows, itertools.chain(values, dims))) or any(
            equation.depends_on_rows for equation in self.equations
        )


def label(programs: Sequence[Program], points: tuple[Point, ...]) -> LabelledProgram:
    """Labels a program by its traces at these points, which must have the same structure.

    Raises:
        RowsError: If a size depends on the number of rows by no known formula.
    """
    return _Labeller(points).program(list(programs))


class _Labeller:
    def __init__(self, points: tuple[Point, ...]):
        self._points = points
        # By the ids of the same program in all traces, which live as long as the labeller: a
        # program that is called in several places is labelled once.
        self._known: dict[tuple[int, ...], LabelledProgram] = {}

    def program(self, programs: list[Program]) -> LabelledProgram:
        key = tuple(map(id, programs))
        known = self._known.get(key)
        if known is not None:
            return known
        opened = [jaxprs.open_jaxpr(program) for program in programs]
        consts = zip(*map(jaxprs.consts_of, programs), strict=True)
        labelled = self._known[key] = LabelledProgram(
            opened[0],
            tuple(map(self._value, consts)),
            tuple(self._equation(eqns) for eqns in zip(*(j.eqns for j in opened), strict=True)),
            self._all_dims([j.invars for j in opened]),
            self._all_dims([j.outvars for j in opened]),
            self._literals([j.outvars for j in opened]),
        )
        return labelled

    def _equation(self, eqns: Sequence[core.JaxprEqn]) -> LabelledEquation:
        first = eqns[0]
        labelled: dict[str, list[LabelledProgram]] = {}
        for bodies in zip(*map(bodies_of, eqns), strict=True):
            name = bodies[0][0]
            try:
                body = self.program([body for _, body in bodies])
            except RowsError as error:
                # Inside a function of JAX no equation has a line of the user; its call has one.
                raise RowsError(error.reason, error.line or users_line_of(first)) from None
            labelled.setdefault(name, []).append(body)
        params = {
            name: self._param([e.params[name] for e in eqns]) if is_compared(first, name) else value
            for name, value in first.params.items()
            if name not in labelled
        }
        try:
            return LabelledEquation(
                first,
                self._all_dims([e.invars for e in eqns]),
                self._all_dims([e.outvars for e in eqns]),
                params,
                self._literals([e.invars for e in eqns]),
                {name: tuple(bodies) for name, bodies in labelled.items()},
            )
        except RowsError as error:
            raise RowsError(
                f"{first.primitive.name}: {error.reason}", users_line_of(first)
            ) from None

    def _all_dims(self, atoms: Sequence[Sequence[Atom]]) -> tuple[Dims, ...]:
        return tuple(map(self._dims, zip(*atoms, strict=True)))

    def _dims(self, atoms: Sequence[Atom]) -> Dims:
        dims = []
        for sizes in zip(*map(jaxprs.shape_of, atoms), strict=True):
            size = fit_size(tuple(sizes), self._points)
            if size is None:
                raise RowsError(
                    f"a size that is {_describe(sizes)} for {_describe(self._points)} rows"
                )
            dims.append(size)
        return tuple(dims)

    def _literals(self, atoms: Sequence[Sequence[Atom]]) -> dict[int, Any]:
        literals = {}
        for i, in_traces in enumerate(zip(*atoms, strict=True)):
            values = [x.val for x in in_traces if isinstance(x, core.Literal)]
            if values:
                literals[i] = self._value(values)
        return literals

    def _param(self, values: Sequence[Any]) -> Any:
        """Returns a parameter as a function of the number of rows."""
        first = values[0]
        if all(are_equal(first, value) for value in values[1:]):
            return first
        if callable(first):
            # Each trace has a new object. The programs that it stands for are compared as bodies.
            return first
        if type(first) is tuple:
            if len({len(value) for value in values}) > 1:
                return UnfittedValue(tuple(values))
            return tuple(self._param(elements) for elements in zip(*values, strict=True))
        size = None
        if all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in values):
            size = fit_size(tuple(map(int, values)), self._points)
        return UnfittedValue(tuple(values)) if size is None else size

    def _value(self, values: Sequence[Any]) -> Any:
        """Returns a constant or a literal as a function of the number of rows."""
        first = values[0]
        if all(value is first for value in values):
            return first
        unknown = UnfittedValue(tuple(values))
        if any(isinstance(value, Tracer) for value in values):
            return unknown
        try:
            arrays = [np.asarray(value) for value in values]
        except Exception:  # random keys and other values without numbers
            return unknown
        if all(have_equal_numbers(arrays[0], x) for x in arrays[1:]):
            return first
        if arrays[0].ndim:
            # The first dims decide. If it is not the largest in all dims, `is_corner` is False.
            largest = max(range(len(arrays)), key=lambda i: arrays[i].shape)
            # Of an order of the rows, one array may be the corner of another one by chance.
            is_leading = not are_two(self._points) and all(
                is_corner(x, arrays[largest]) for x in arrays
            )
            return Corner(values[largest]) if is_leading else unknown
        fitted = None
        if arrays[0].dtype.kind in "iu":
            fitted = fit_size(tuple(int(x) for x in arrays), self._points)
        elif arrays[0].dtype.kind == "f" or arrays[0].dtype.name == "bfloat16":  # kind "V"
            fitted = fit_number([float(x) for x in arrays], self._points)
        return unknown if fitted is None else fitted


def predict_number(value: object, counts: Point) -> Any:
    """Returns a labelled constant or literal for these counts.

    Numbers are Python numbers. An `UnfittedValue`, a `Corner` and any other value stay.
    """
    if isinstance(value, RowSize):
        return value.at(counts)
    if isinstance(value, RowNumber):
        return float(value.at(counts))
    if isinstance(value, Piecewise):
        # First the general formula: `Piecewise.at` would return it as a NumPy number.
        return Piecewise(predict_number(value.general, counts), value.pieces).at(counts)
    return value


def predict_param(value: object, counts: Point) -> Any:
    """Returns a labelled parameter for these counts; an `UnfittedValue` stays."""
    if isinstance(value, RowSize):
        return size_at(value, counts)
    if type(value) is tuple:
        return tuple(predict_param(x, counts) for x in value)
    return value


def are_close(predicted: Any, actual: Any) -> bool:
    """Returns whether two scalars are equal: floats up to `TOLERANCE`, all others exactly."""
    a, b = np.asarray(predicted), np.asarray(actual)
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return bool(a == b)
    return bool(np.isclose(float(a), float(b), rtol=TOLERANCE, atol=0, equal_nan=True))


def depends_on_rows(value: object) -> bool:
    """Returns whether a labelled value, parameter or size depends on the number of rows."""
    if isinstance(value, RowSize | RowNumber | Piecewise | UnfittedValue | Corner):
        return True
    return type(value) is tuple and any(map(depends_on_rows, value))


def is_unfitted(value: object) -> bool:
    """Returns whether a labelled parameter depends on the rows by no known formula."""
    if isinstance(value, UnfittedValue):
        return True
    return type(value) is tuple and any(map(is_unfitted, value))


def is_corner(small: np.ndarray, large: np.ndarray) -> bool:
    """Returns whether an array is the leading corner of another one."""
    if small.ndim != large.ndim or small.dtype != large.dtype:
        return False
    if any(a > b for a, b in zip(small.shape, large.shape, strict=True)):
        return False
    return have_equal_numbers(small, large[tuple(map(slice, small.shape))])


def _describe(values: Sequence[int | Point]) -> str:
    # The point of a single symbol is written as a number.
    plain = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for v in values]
    return ", ".join(map(str, plain))
