"""Finds numbers of rows that JAX has multiplied by the number of replicas during a trace.

`jax.lax.psum` of a Python number does not communicate: it multiplies by the size of the axis. For
`x.shape[0]` the product is the total number of rows only if all replicas have the same number of
rows. A trace on more replicas with the same rows changes such a product, and no other number.
"""

import inspect
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.rows.compared_params import JAX_FOLDER
from tpudist.programs.rows.labels import LabelledEquation, LabelledProgram, depends_on_rows
from tpudist.programs.rows.row_sizes import RowSize, is_rows
from tpudist.programs.rows.trace_comparison import bodies_of, find_difference

# `jnp.mean` divides by the number of elements that it adds up, which it reads from the shape. It
# gets no numbers of the user, but an array may be as long as such a product. `mean` calls `_mean`,
# which JAX may inline.
_FILE_OF_MEAN = inspect.getfile(inspect.unwrap(jnp.mean))
_MEANS = {"mean", "_mean"}


def has_numbers(labelled: LabelledProgram) -> bool:
    """Returns whether a program uses numbers of rows that may be such products."""
    sizes = frozenset(size for dims in labelled.in_dims for size in dims if is_rows(size))
    known: dict[int, bool] = {}  # by the id of a program inside, which may be called often

    def search(program: LabelledProgram) -> bool:
        if id(program) not in known:
            known[id(program)] = any(map(depends_on_rows, program.out_literals.values())) or any(
                _has_numbers(equation, sizes) or any(map(search, equation.all_bodies))
                for equation in program.equations
            )
        return known[id(program)]

    return search(labelled)


def _has_numbers(equation: LabelledEquation, sizes: frozenset[RowSize]) -> bool:
    """Returns whether an equation has numbers of rows, or a new size.

    A size is new if neither its operands nor the program's inputs, of `sizes`, have it. Results of
    programs inside are searched there; a scan adds its length. A reshape creates no elements: its
    sizes say how many its operand has, not how many rows there are in all.
    """
    name, dims_of_results = equation.eqn.primitive.name, equation.out_dims
    if name == "scan":
        dims_of_results = tuple(dims[:1] for dims in dims_of_results)
    elif name == "reshape" or equation.all_bodies:
        dims_of_results = ()
    known = sizes.union(*equation.in_dims)
    is_new = any(is_rows(size) and size not in known for dims in dims_of_results for size in dims)
    has_numbers = any(map(depends_on_rows, equation.literals.values()))
    return (is_new or has_numbers) and not _is_mean(equation)


def _is_mean(equation: LabelledEquation) -> bool:
    """Returns whether `jnp.mean` created an equation, with a number of its own."""
    traceback = equation.eqn.source_info.traceback
    for code in traceback.raw_frames()[0] if traceback is not None else ():
        if code.co_name in _MEANS and code.co_filename == _FILE_OF_MEAN:
            return True
        if not code.co_filename.startswith(JAX_FOLDER):
            return False  # the innermost frames come first: this one called JAX
    return False


def find_line(labelled: LabelledProgram, larger: Program) -> str | None:
    """Returns the line that uses a product of the numbers of rows and of replicas.

    None if there is no such product; empty if a result is one.

    Args:
        labelled: The program.
        larger: The trace of the same function on more replicas, for the rows of the first trace.
    """
    if find_difference(labelled.jaxpr, larger) is not None:
        return None
    return next(_lines(labelled, larger), None)


def _lines(labelled: LabelledProgram, larger: Program) -> Iterator[str]:
    opened = jaxprs.open_jaxpr(larger)
    for equation, eqn in zip(labelled.equations, opened.eqns, strict=True):
        if _has_other_numbers(equation, eqn):
            yield equation.line
        for body, (_, larger_body) in zip(equation.all_bodies, bodies_of(eqn), strict=True):
            yield from (line or equation.line for line in _lines(body, larger_body))
    for i, value in labelled.out_literals.items():
        if depends_on_rows(value) and _differ(labelled.jaxpr.outvars[i], opened.outvars[i]):
            yield ""


def _has_other_numbers(equation: LabelledEquation, eqn: core.JaxprEqn) -> bool:
    return any(
        depends_on_rows(value) and _differ(equation.eqn.invars[i], eqn.invars[i])
        for i, value in equation.literals.items()
    )


def _differ(literal: Atom, other: Atom) -> bool:
    first, second = jaxprs.literal_value(literal), jaxprs.literal_value(other)
    return not np.array_equal(np.asarray(first), np.asarray(second))
