"""The equations of a trace with 0 or 1 rows, both the actual ones and the predicted ones.

`small_counts` and `value_origins` compare the two traces by the user's instruction that called JAX,
the *site* of an equation. JAX may omit an equation that changes nothing (`changes_nothing`).
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
from typing import Any, TypeAlias

import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import ad

from tpudist.array_types import Shape
from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call
from tpudist.programs.jaxprs import Program
from tpudist.programs.rows.compared_params import JAX_FOLDER, is_compared
from tpudist.programs.rows.labels import (
    Corner,
    LabelledEquation,
    LabelledProgram,
    UnfittedValue,
    is_unfitted,
    predict_number,
    predict_param,
)
from tpudist.programs.rows.row_sizes import Point, RowNumber, RowSize, size_at
from tpudist.programs.rows.trace_comparison import bodies_of

# Code that calls JAX for the user: a frame in it is not the user's instruction. "<" begins names
# such as "<frozen importlib>" and "<string>".
_LIBRARIES = (
    JAX_FOLDER,
    os.path.join(os.path.dirname(np.__file__), ""),
    os.path.join(str(pathlib.Path(__file__).parents[2]), ""),
    contextlib.__file__,
    functools.__file__,
    "<",
)
# The files of JAX that differentiate.
_AUTODIFF = frozenset(map(inspect.getfile, (ad.jvp, ad.instantiate_zeros)))
# A call changes nothing by itself: the programs inside are compared too. `add_any` sums the
# gradients of several uses of a value, which may be one use for few rows.
_TRANSPARENT = frozenset(
    "add_any closed_call copy custom_jvp_call custom_vjp_call jit pjit pvary "
    "tpudist.claim_equal".split()
)
Site = tuple[str, int, int]
"""A file, the first line of a function in it, and the function's instruction that called JAX.

The instruction, not the line: `x[0] if n == 1 else x[1]` is two instructions on one line."""
NOWHERE: Site = ("", 0, 0)
"""The site of the equations outside of all known instructions."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of a trace.

    Attributes:
        eqn: The equation; in a predicted trace that of the first labelled trace.
        shapes: Shapes of the operands, then of the results, for the small count.
        literals: Pairs of an operand's position and its number as text.
        params: The parameters that contain no programs.
        bodies: The programs inside.
        labelled: The labelled equation of a predicted step.
    """

    eqn: core.JaxprEqn
    shapes: tuple[Shape, ...]
    literals: tuple
    params: dict[str, Any]
    bodies: tuple["Trace", ...]
    labelled: LabelledEquation | None = None

    @property
    def numbers(self) -> tuple:
        """The literals and parameters that affect the result."""
        return self.literals + _describe_params(self)


class Predicted:
    """The trace that a labelled program predicts for these numbers of rows."""

    def __init__(self, labelled: LabelledProgram, counts: Point):
        self._labelled, self._counts = labelled, counts
        self.jaxpr, self.consts = labelled.jaxpr, labelled.consts

    def steps(self) -> list[Step]:
        """Returns the equations in order."""
        return [self._step(equation) for equation in self._labelled.equations]

    def _step(self, equation: LabelledEquation) -> Step:
        dims = (*equation.in_dims, *equation.out_dims)
        shapes = tuple(tuple(size_at(dim, self._counts) for dim in each) for each in dims)
        literals = tuple(
            (i, format_number(predict_number(_array_of_corner(value), self._counts)))
            for i, value in equation.literals.items()
        )
        params = {
            name: predict_param(value, self._counts)
            for name, value in equation.params.items()
            if name not in equation.bodies
        }
        bodies = tuple(Predicted(body, self._counts) for body in equation.all_bodies)
        return Step(equation.eqn, shapes, literals, params, bodies, equation)


class Traced:
    """An actual trace."""

    def __init__(self, program: Program):
        self.jaxpr, self.consts = jaxprs.open_jaxpr(program), jaxprs.consts_of(program)

    def steps(self) -> list[Step]:
        """Returns the equations in order."""
        return [self._step(eqn) for eqn in self.jaxpr.eqns]

    def _step(self, eqn: core.JaxprEqn) -> Step:
        shapes = tuple(tuple(jaxprs.shape_of(v)) for v in (*eqn.invars, *eqn.outvars))
        literals = tuple(
            (i, format_number(x.val))
            for i, x in enumerate(eqn.invars)
            if isinstance(x, core.Literal)
        )
        bodies = list(bodies_of(eqn))
        names = {name for name, _ in bodies}
        params = {k: v for k, v in eqn.params.items() if k not in names}
        return Step(eqn, shapes, literals, params, tuple(Traced(body) for _, body in bodies))


Trace: TypeAlias = Predicted | Traced


def is_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation runs one program, once, on its operands."""
    return isinstance(equation_layouts.structure_of(eqn), Call)


def _describe_params(step: Step) -> tuple:
    params = step.params
    if step.eqn.primitive.name == "reduce_sum":
        params = {**params, "axes": _axes_of_sum(step)}
    return tuple(
        (name, str(_with_python_ints(value)))
        for name, value in sorted(params.items())
        if is_compared(step.eqn, name) and not callable(value) and not is_unfitted(value)
    )


def _axes_of_sum(step: Step) -> tuple[int, ...]:
    """Returns the axes of a sum, counted among the axes of a size other than 1."""
    # The sum that undoes a broadcast has one axis more or less if that axis has the size 1.
    others = [d for d, size in enumerate(step.shapes[0]) if size != 1]
    return tuple(others.index(d) for d in step.params["axes"] if d in others)


def changes_nothing(step: Step) -> bool:
    """Returns whether an equation only adds or removes dims of size 1: JAX may omit it."""
    eqn, shapes, name = step.eqn, step.shapes, step.eqn.primitive.name
    if name in _TRANSPARENT:
        return True
    first, last = (without_ones(shapes[0]), without_ones(shapes[-1])) if shapes else ((), ())
    match name:
        case "broadcast_in_dim" | "broadcast_to" | "expand_dims" | "reshape" | "slice" | "squeeze":
            if isinstance(eqn.invars[0], core.Literal):  # autodiff's zeros for unused values
                return not np.any(eqn.invars[0].val) and _is_of_autodiff(eqn)
            return first == last  # the same dims, except for those of size 1
        case "convert_element_type":
            return jaxprs.dtype_of(eqn.invars[0]) == jaxprs.dtype_of(eqn.outvars[0])
        case "concatenate":
            # At most one operand has elements.
            return sum(0 not in shape for shape in shapes[: len(eqn.invars)]) <= 1
        case "pad":
            return all(part == (0, 0, 0) for part in step.params["padding_config"])
        case "reduce_sum":
            return not _axes_of_sum(step)
        case "split":
            return len(eqn.outvars) == 1
        case "transpose":
            order = [d for d in step.params["permutation"] if shapes[0][d] != 1]
            return order == sorted(order)
    return False


def _is_of_autodiff(eqn: core.JaxprEqn) -> bool:
    """Returns whether the differentiation of the user's function created an equation."""
    # From the innermost frame outward: autodiff comes before the user's code. `raw_frames` of JAX's
    # tracebacks is not public; all supported versions have it (`site_of` reads it, too).
    traceback = eqn.source_info.traceback
    for code in traceback.raw_frames()[0] if traceback is not None else ():
        if not code.co_filename.startswith(_LIBRARIES):
            return False
        if code.co_filename in _AUTODIFF:
            return True
    return False


def shapes_compared(step: Step) -> tuple[Shape, ...]:
    """Returns the shapes that identify an equation in both traces; see `_axes_of_sum`."""
    if step.eqn.primitive.name == "reduce_sum":
        return tuple(map(without_ones, step.shapes))
    return step.shapes


def without_ones(shape: Shape) -> Shape:
    """Returns a shape without its dims of size 1, which JAX adds and removes."""
    return tuple(size for size in shape if size != 1)


def _with_python_ints(value: object) -> object:
    # JAX accepts both kinds of integers, and their texts differ.
    if type(value) is tuple:
        return tuple(map(_with_python_ints, value))
    return int(value) if isinstance(value, np.integer) else value


def _array_of_corner(value: object) -> object:
    return value.value if isinstance(value, Corner) else value


def format_number(value: object) -> str:
    """Formats a scalar, a float with five digits; "array" for an array, "?" if it is unknown."""
    # Texts are compared. The sixth digit may differ between two computations of one number.
    if isinstance(value, Tracer | UnfittedValue | RowSize | RowNumber):
        return "?"
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "fiub":
        return "array"
    return f"{float(array):.5g}" if array.dtype.kind == "f" else str(int(array))


def site_of(eqn: core.JaxprEqn) -> tuple[Site | None, str]:
    """Returns the user's instruction that an equation comes from, and the function it called.

    JAX traces some functions once for all their callers: inside these, the site is unknown (None).
    """
    traceback = eqn.source_info.traceback
    callee = ""
    if traceback is None:
        return None, callee
    codes, instructions = traceback.raw_frames()
    for code, instruction in zip(codes, instructions, strict=True):  # the innermost is the first
        name = code.co_filename
        if not name.startswith(_LIBRARIES):
            return (name, code.co_firstlineno, instruction), callee
        callee = code.co_name
    return None, callee
