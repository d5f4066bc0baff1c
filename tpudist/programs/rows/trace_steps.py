"""The equations of a trace for few rows, as they are and as labels predict them.

What is compared is what the user's instructions have called, so each equation has a site; and JAX
may leave out what changes nothing.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import ad

from tpudist.programs import jaxprs
from tpudist.programs.rows.labels import (
    NOT_COMPARED,
    Corner,
    LabelledEquation,
    LabelledProgram,
    Varies,
    bodies_of,
    predict,
)
from tpudist.programs.rows.row_sizes import Point, RowNumber, RowSize, size_at

JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
_LIBRARIES = (
    JAX_FOLDER,
    os.path.join(os.path.dirname(np.__file__), ""),
    os.path.join(str(pathlib.Path(__file__).parents[2]), ""),
    contextlib.__file__,
    functools.__file__,
    "<",
)
# Where JAX differentiates.
_AUTODIFF = frozenset(map(inspect.getfile, (ad.jvp, ad.instantiate_zeros)))
# What calls, or stands for the sum that autodiff makes of several uses.
_CALLS = frozenset(
    "add_any closed_call copy custom_jvp_call custom_vjp_call jit pjit pvary "
    "tpudist.claim_equal".split()
)
Site = tuple[str, int, int]
"""A file, the first line of a function, and the instruction in it that has called JAX."""
NOWHERE: Site = ("", 0, 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of a trace: what it reads and gives, and the programs that it holds."""

    eqn: core.JaxprEqn
    shapes: tuple[tuple[int, ...], ...]
    literals: tuple
    params: dict[str, Any]
    bodies: tuple["Predicted | Traced", ...]
    labelled: LabelledEquation | None = None

    @property
    def numbers(self) -> tuple:
        """What its literals and parameters say of what it computes."""
        return self.literals + _describe(self)


class Predicted:
    """The trace that a labelled program predicts for these numbers of rows."""

    def __init__(self, labelled: LabelledProgram, counts: Point):
        """Of a labelled program."""
        self._labelled, self._counts = labelled, counts
        self.jaxpr, self.consts = labelled.jaxpr, labelled.consts

    def steps(self) -> list[Step]:
        """Its equations, in order."""
        return [self._step(equation) for equation in self._labelled.equations]

    def _step(self, equation: LabelledEquation) -> Step:
        dims = (*equation.in_dims, *equation.out_dims)
        shapes = tuple(tuple(size_at(dim, self._counts) for dim in each) for each in dims)
        literals = tuple(
            (i, number_in_words(predict(_unwrap(value), self._counts)))
            for i, value in equation.literals.items()
        )
        params = {
            name: predict(value, self._counts)
            for name, value in equation.params.items()
            if name not in equation.bodies
        }
        held = [body for bodies in equation.bodies.values() for body in bodies]
        bodies = tuple(Predicted(body, self._counts) for body in held)
        return Step(equation.eqn, shapes, literals, params, bodies, equation)


class Traced:
    """A trace as it is."""

    def __init__(self, program: Any):
        """Of a jaxpr, with its constants or without."""
        self.jaxpr, self.consts = jaxprs.open_jaxpr(program), tuple(getattr(program, "consts", ()))

    def steps(self) -> list[Step]:
        """Its equations, in order."""
        return [self._step(eqn) for eqn in self.jaxpr.eqns]

    def _step(self, eqn: core.JaxprEqn) -> Step:
        shapes = tuple(tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars))
        literals = tuple(
            (i, number_in_words(x.val))
            for i, x in enumerate(eqn.invars)
            if isinstance(x, core.Literal)
        )
        held = list(bodies_of(eqn))
        names = {name for name, _ in held}
        params = {k: v for k, v in eqn.params.items() if k not in names}
        return Step(eqn, shapes, literals, params, tuple(Traced(body) for _, body in held))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the program itself."""
    return isinstance(atom, core.Literal)


def is_call(eqn: core.JaxprEqn) -> bool:
    """Whether an equation runs one program, once, on its operands."""
    return isinstance(jaxprs.structure_of(eqn), jaxprs.Call)


def _describe(step: Step) -> tuple:
    """What the parameters say of what is computed: powers, axes, where a slice begins."""
    params = step.params
    if step.eqn.primitive.name == "reduce_sum":
        params = {**params, "axes": _axes_of_sum(step)}
    return tuple(
        (name, str(_plain(value)))
        for name, value in sorted(params.items())
        if name not in NOT_COMPARED and not callable(value) and not _is_varied(value)
    )


def _axes_of_sum(step: Step) -> tuple[int, ...]:
    """The axes that are summed, among those of another size than 1.

    The sum that undoes a broadcast has one axis more or less where that has the size 1.
    """
    others = [d for d, size in enumerate(step.shapes[0]) if size != 1]
    return tuple(others.index(d) for d in step.params["axes"] if d in others)


def changes_nothing(step: Step) -> bool:
    """Whether an equation gives what it is given, but for dims of size 1: JAX may leave it out."""
    eqn, shapes, name = step.eqn, step.shapes, step.eqn.primitive.name
    if name in _CALLS:
        return True
    first, last = (_without_ones(shapes[0]), _without_ones(shapes[-1])) if shapes else ((), ())
    match name:
        case "broadcast_in_dim" | "broadcast_to" | "expand_dims" | "reshape" | "slice" | "squeeze":
            if isinstance(eqn.invars[0], core.Literal):  # zeros are what no gradient comes to
                return not np.any(eqn.invars[0].val) and _is_of_autodiff(eqn)
            return first == last
        case "convert_element_type":
            return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype  # type: ignore
        case "concatenate":
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
    """Whether it was the gradient of the user's function that asked for an equation."""
    traceback: Any = eqn.source_info.traceback
    for code in traceback.raw_frames()[0] if traceback is not None else ():
        if not code.co_filename.startswith(_LIBRARIES):
            return False
        if code.co_filename in _AUTODIFF:
            return True
    return False


def shapes_compared(step: Step) -> tuple[tuple[int, ...], ...]:
    """The shapes by which an equation is known in both traces; see `_axes_of_sum`."""
    if step.eqn.primitive.name == "reduce_sum":
        return tuple(map(_without_ones, step.shapes))
    return step.shapes


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


def number_in_words(value: Any) -> Any:
    """A scalar to five digits; "array" for an array, "?" for what is not known."""
    if isinstance(value, Tracer | Varies | RowSize | RowNumber):
        return "?"
    array = np.asarray(value)
    return f"{float(array):.5g}" if array.ndim == 0 and array.dtype.kind in "fiub" else "array"


def site_of(eqn: core.JaxprEqn) -> tuple[Site | None, str]:
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
