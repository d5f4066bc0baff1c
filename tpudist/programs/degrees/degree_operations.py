"""The primitives of the degree analysis by their effect on a degree, and arithmetic on their dims.

A primitive in none of these tables gives an unknown degree, which never leads to a warning.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.degrees import degree
from tpudist.programs.degrees.degree import Degree, Factor, Value
from tpudist.programs.jaxprs import Atom

# The result has the degree of the operand: each element is one of the operand's, its negative, or
# a part of it.
KEEP = frozenset(
    "abs all_gather all_gather_invariant all_to_all broadcast_in_dim convert_element_type copy "
    "copy_p cummax cummin dynamic_slice expand_dims gather imag mesh_cast name neg "
    "optimization_barrier pbroadcast pmax pmin ppermute pvary real reduce_max reduce_min "
    "reduce_precision reduce_window_max reshape rev select_and_gather_add sharding_constraint "
    "slice sort split squeeze stop_gradient top_k transpose unstack".split()
)
# Of these, the ones whose result is the operand itself, except for its shape or dtype.
IDENTITIES = frozenset("convert_element_type copy copy_p mesh_cast name pvary reshape".split())
# Sums of operands, or arrays that contain elements of several operands.
JOIN = frozenset(
    "add add_any sub concatenate pad dynamic_update_slice atan2 rem nextafter complex".split()
)
ADDITIONS = ("add", "add_any", "sub")
# The result is one of the operands. A bound that only avoids an error does not count.
EXTREMES = frozenset("max min clamp".split())
# The result does not grow with its operands: truth values, signs, positions, bits and keys.
FREE = frozenset(
    "eq ne lt le gt ge and or not xor is_finite sign iota argmax argmin axis_index random_bits "
    "random_wrap random_unwrap random_seed random_fold_in random_split threefry2x32 reduce_and "
    "reduce_or shift_left shift_right_logical".split()
)
COMPARISONS = frozenset("eq ne lt le gt ge is_finite".split())
# The degree of the result, divided by that of the operand.
POWERS: Mapping[str, Fraction] = {
    "square": Fraction(2),
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "cbrt": Fraction(1, 3),
}
# The result is proportional to each operand, so it keeps the factors of its operands.
LINEAR = ("dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum")
# The result is zero if an operand is.
PRODUCTS = ("mul", "div", "dot_general", "conv_general_dilated")
# The result is zero where the first operand is.
ZERO_AT_ZERO = frozenset(
    "square sqrt cbrt integer_pow reduce_sum cumsum tanh sin tan erf expm1 log1p asinh".split()
)
SUMS_OVER_REPLICAS = ("psum", "psum_invariant", "reduce_scatter", "psum_scatter")
_EPSILON = 1e-3  # the largest number that only avoids a division by zero


def degree_of_sizes(atom: Atom, twin: Atom, dims: Sequence[int]) -> Degree | None:
    """Returns the degree of the number of elements along some dims; None if it is unknown.

    Args:
        atom: A value in the first trace.
        twin: The same value in the second trace.
        dims: The dims.
    """
    sizes = [math.prod(jaxprs.shape_of(x)[i] for i in dims) for x in (atom, twin)]
    return degree.degree_of_numbers(*map(float, sizes)) if all(sizes) else None


def degree_of_contraction(eqn: core.JaxprEqn, twin: core.JaxprEqn) -> Degree | None:
    """Returns the degree of the dims that a product sums over; None if it is unknown."""
    name = eqn.primitive.name
    if name == "mul":
        return degree.NONE
    if name == "dot_general":
        (dims, _), _ = eqn.params["dimension_numbers"]
        return degree_of_sizes(eqn.invars[0], twin.invars[0], dims)
    spec = eqn.params["dimension_numbers"].rhs_spec
    return degree_of_sizes(eqn.invars[1], twin.invars[1], spec[1:])


def degree_of_result(
    eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: Sequence[Value]
) -> Degree | None:
    """Returns the degree of the result of a function of numbers; None if it is unknown."""
    name = eqn.primitive.name
    degrees: list[Degree] = []
    for x in operands:
        own = degree.NONE if x.is_zero else x.degree
        if own is None:
            return None
        degrees.append(own)
    if name in ("mul", "dot_general", "conv_general_dilated"):
        contracted = degree_of_contraction(eqn, twin)
        return None if contracted is None else degrees[0] + degrees[1] + contracted
    if name == "div":
        return degrees[0] - degrees[1]
    if name == "integer_pow":
        return degrees[0] * eqn.params["y"]
    if name in POWERS:
        return degrees[0] * POWERS[name]
    if name in ("reduce_sum", "cumsum", "reduce_window_sum"):
        added = degree_of_sizes(eqn.invars[0], twin.invars[0], dims_of_sum(eqn))
        if added is None or (added != degree.NONE and name != "reduce_sum"):
            return None
        return degrees[0] + added
    # Any other function, such as `exp`, is known only of operands that do not grow.
    return degree.NONE if all(x == degree.NONE for x in degrees) else None


def dims_of_sum(eqn: core.JaxprEqn) -> Sequence[int]:
    """Returns the dims that a sum adds along."""
    if eqn.primitive.name == "reduce_window_sum":
        return [i for i, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
    return [eqn.params["axis"]] if eqn.primitive.name == "cumsum" else eqn.params["axes"]


def is_guard(bound: Value, operands: Sequence[Value]) -> bool:
    """Returns whether a bound is hardly ever reached: an epsilon, or the 1 of `max(count, 1)`."""
    is_small = bound.is_zero or abs(bound.number or 1) < _EPSILON
    is_number = bound.is_literal and bound.degree == degree.NONE
    # A count does not depend on state. A norm of gradients does, and is clipped by such a bound.
    return is_number and (is_small or not any(x.sources for x in operands))


def addend_of(operands: Sequence[Value]) -> Value | None:
    """Returns x of the sum y + x, if y depends on exactly one state input, and x does not."""
    for state, other in (operands, operands[::-1]):
        if state.sources.bit_count() == 1 and not state.sources & other.sources:
            return other
    return None


def with_factors(
    eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: Sequence[Value], result: Value
) -> Value:
    """Returns the result of a product or quotient with the numbers that multiply it."""
    # A number is recorded where it multiplies numbers, as in the derivative of a loss: a value
    # without a dim of rows, or a vector of the rows. Elsewhere it does not multiply the loss.
    divides = eqn.primitive.name == "div"
    numbers = [x.number for x in operands]
    if divides:
        numbers[1] = 1 / numbers[1] if numbers[1] else None
    first, second = numbers
    if first is not None and second is not None:
        result = result._replace(number=first * second)
    values = [x for x in operands if x.number is None]
    shapes = map(jaxprs.shape_of, (eqn.outvars[0], twin.outvars[0]))
    sizes = list(zip(*shapes, strict=True))
    has_rows = any(x != y for x, y in sizes)
    of_rows = has_rows and not all(x.is_constant for x in values)
    if of_rows and any(x == y != 1 for x, y in sizes):
        return result  # a matrix with rows: the number belongs to the model
    factors = [
        Factor(number, of_rows, divides)
        for x, number in zip(operands, numbers, strict=True)
        if number and abs(number) != 1 and not x.factors
    ]
    return result._replace(factors=(*result.factors, *factors))
