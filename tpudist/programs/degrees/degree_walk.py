"""Finds sums over replicas that are not those of one device with all rows.

Two traces of a function, one of them at more rows and on more replicas, tell the degree of each
number and dim (`degree`). From these the degree of every value follows: a sum over rows adds the
degree of the dim, products add degrees, quotients subtract them, and a sum over replicas adds one
in the replicas. Elementwise functions other than these need degree zero. An unknown degree stays
unknown, and never gives a warning.

New state is wrong if it adds a value of unequal degrees in rows and replicas to state on which that
value depends: so gradients are distinguished from metrics, which only feed themselves.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jax.extend import core

from tpudist.programs import jaxprs, replica_equality
from tpudist.programs.degrees import degree
from tpudist.programs.degrees.degree import (
    NONE,
    OF_REPLICAS,
    UNKNOWN,
    Degree,
    Factor,
    Value,
    combine,
    combine_either,
)
from tpudist.programs.degrees.degree_faults import Fault
from tpudist.programs.flat_program import is_collective
from tpudist.programs.user_lines import first_line_of

_KEEP = frozenset(
    "abs all_gather all_gather_invariant all_to_all broadcast_in_dim convert_element_type copy "
    "copy_p cummax cummin dynamic_slice expand_dims gather imag mesh_cast name neg "
    "optimization_barrier pbroadcast pmax pmin ppermute pvary real reduce_max reduce_min "
    "reduce_precision reduce_window_max reshape rev select_and_gather_add sharding_constraint "
    "slice sort split squeeze stop_gradient top_k transpose unstack".split()
)
_JOIN = frozenset(
    "add add_any sub concatenate pad dynamic_update_slice atan2 rem nextafter complex".split()
)
_ADDITIONS = ("add", "add_any", "sub")
_IDENTITIES = frozenset("convert_element_type copy copy_p mesh_cast name pvary reshape".split())
_EXTREMES = frozenset("max min clamp".split())
_FREE = frozenset(
    "eq ne lt le gt ge and or not xor is_finite sign iota argmax argmin axis_index random_bits "
    "random_wrap random_unwrap random_seed random_fold_in random_split threefry2x32 reduce_and "
    "reduce_or shift_left shift_right_logical".split()
)
_COMPARISONS = frozenset("eq ne lt le gt ge is_finite".split())
_POWERS: Mapping[str, Fraction] = {
    "square": Fraction(2),
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "cbrt": Fraction(1, 3),
}
_LINEAR = ("dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum")
_PRODUCTS = ("mul", "div", "dot_general", "conv_general_dilated")
_ZERO_AT_ZERO = frozenset(
    "square sqrt cbrt integer_pow reduce_sum cumsum tanh sin tan erf expm1 log1p asinh".split()
)
_SUMS = ("psum", "psum_invariant", "reduce_scatter", "psum_scatter")
_MAX_ROUNDS = 6
_EPSILON = 1e-3  # the largest number that only avoids a division by zero


@dataclasses.dataclass(frozen=True)
class Findings:
    """The result for one program.

    Attributes:
        faults: The faults of the program.
        takes_means: Whether it divides by a count of the replica's own rows, which may be 0.
        outputs: The properties of the outputs.
    """

    faults: tuple[Fault, ...]
    takes_means: bool
    outputs: tuple[Value, ...]


def walk(first: Any, second: Any, is_equal: Sequence[bool], state: Mapping[int, int]) -> Findings:
    """Returns the faults of a program of one replica.

    Args:
        first: The program.
        second: The same at `ROWS_FACTOR` times the rows on `REPLICAS_FACTOR` times the replicas,
            with the same structure.
        is_equal: For each input, whether it is equal on all replicas.
        state: The outputs that are new state, each with the input that it replaces.
    """
    found = _Walk()
    inputs = set(state.values())
    values = [
        Value(is_equal=equal, sources=bit, carries=bit)
        for i, equal in enumerate(is_equal)
        for bit in [1 << i if i in inputs else 0]
    ]
    outputs = found.program(first, second, values)
    faults = tuple(
        fault
        for number, fault in enumerate(found.faults)
        if any(
            outputs[o].faults >> number & (fault.is_draw or fault.sources >> i) & 1
            for o, i in state.items()
        )
    )
    return Findings(faults, found.takes_means, tuple(outputs))


class _Walk:
    def __init__(self):
        self.faults: list[Fault] = []
        self.takes_means = False
        self._known: dict[tuple[int, Fraction], int] = {}
        self._calls: list[core.JaxprEqn] = []
        self._draws = 0  # the faults that are random numbers, as bits

    def program(self, first: Any, second: Any, values: Sequence[Value]) -> list[Value]:
        """Returns the properties of the outputs of a program, given those of its inputs."""
        a, b = jaxprs.open_jaxpr(first), jaxprs.open_jaxpr(second)
        consts = zip(getattr(first, "consts", ()), getattr(second, "consts", ()), strict=True)
        env: dict[Any, Value] = dict(zip(a.invars, values, strict=True))
        env.update(
            (x, degree.of_literal(*both)) for x, both in zip(a.constvars, consts, strict=False)
        )

        def read(x: Any, y: Any) -> Value:
            if isinstance(x, core.Literal):
                return degree.of_literal(x.val, y.val)
            return env.get(x, UNKNOWN)

        for one, other in zip(a.eqns, b.eqns, strict=True):
            given = [read(x, y) for x, y in zip(one.invars, other.invars, strict=True)]
            env.update(zip(one.outvars, self._equation(one, other, given), strict=True))
        return [read(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]

    def _equation(
        self, eqn: core.JaxprEqn, other: core.JaxprEqn, given: list[Value]
    ) -> Sequence[Value]:
        name = eqn.primitive.name
        if name.startswith("scatter"):
            return [self._scatter(eqn, other, given)]
        structure, twin = jaxprs.structure_of(eqn), jaxprs.structure_of(other)
        if structure is None:
            return self._operation(eqn, other, given)
        if type(structure) is not type(twin):
            return [_lose(given)] * len(eqn.outvars)
        if isinstance(structure, jaxprs.Call) and structure.copies == 1:
            self._calls.append(eqn)
            try:
                return self.program(*_callees(eqn, other), given)
            finally:
                self._calls.pop()
        if isinstance(structure, jaxprs.Cond):
            results = [
                self.program(x, y, given[1:])
                for x, y in zip(structure.bodies, twin.bodies, strict=True)  # type: ignore[union-attr]
            ]
            return [
                dataclasses.replace(functools.reduce(self._either, x), is_equal=False)
                if not given[0].is_equal
                else functools.reduce(self._either, x)
                for x in zip(*results, strict=True)
            ]
        if isinstance(structure, jaxprs.Scan):
            return self._scan(structure, twin, given)
        return [_lose(given)] * len(eqn.outvars)

    def _operation(
        self, eqn: core.JaxprEqn, other: core.JaxprEqn, given: list[Value]
    ) -> Sequence[Value]:
        name = eqn.primitive.name
        if is_collective(eqn) and eqn.params.get("axis_index_groups"):
            return [dataclasses.replace(_lose(given), is_equal=False)] * len(eqn.outvars)
        if name in _SUMS and is_collective(eqn):
            return [self._sum_over_replicas(eqn, x) for x in given]
        if replica_equality.makes_equal(eqn):
            return [dataclasses.replace(x, is_equal=True) for x in given]
        if name == "axis_index":
            return [Value(is_equal=False, positions=OF_REPLICAS)]
        if name in _KEEP:
            if len(eqn.outvars) == len(given):
                keeps = name in _IDENTITIES
                return given if keeps else [dataclasses.replace(x, carries=0) for x in given]
            return [combine(given, given[0].degree, is_zero=given[0].is_zero)] * len(eqn.outvars)
        if name == "sub" and given[0].carries & given[1].carries:
            # The state cancels: new - old.
            return [dataclasses.replace(_lose(given), mixed="")]
        if name in _JOIN:
            joined = functools.reduce(functools.partial(self._join, eqn), given)
            carries = functools.reduce(operator.or_, (x.carries for x in given))
            addend = _addend_of(given) if name in _ADDITIONS and len(given) == 2 else None
            carries = carries if name in _ADDITIONS else 0
            return [dataclasses.replace(joined, carries=carries, addend=addend)]
        if name == "select_n":
            joined = functools.reduce(self._either, given[1:])
            joined = self._absorb(eqn, given[1:], joined)
            share = given[0].degree  # of a mask that picks one of all rows or replicas
            if share and joined.degree and any(x.is_zero for x in given[1:]):
                joined = dataclasses.replace(joined, degree=joined.degree + share)
            equal = joined.is_equal and given[0].is_equal
            faults = joined.faults | given[0].faults & self._draws
            return [dataclasses.replace(joined, is_equal=equal, faults=faults)]
        if name in _EXTREMES:
            kept = [x for x in given if not _is_guard(x, given)] or given
            return [self._absorb(eqn, kept, functools.reduce(self._either, kept))]
        if name in _FREE:
            result = combine(given, NONE)
            if name == "iota":
                dim = eqn.params["dimension"]
                positions = _sizes(eqn.outvars[0], other.outvars[0], [dim]) or NONE
                size = NONE if positions == NONE else None  # the positions of rows are larger
                result = dataclasses.replace(result, degree=size, positions=positions)
            elif name == "eq":  # one-hot vectors of rows: one of all elements is not zero
                positions = next((x.positions for x in given if x.positions != NONE), NONE)
                result = dataclasses.replace(result, degree=NONE - positions)
            if name in _COMPARISONS:
                result = dataclasses.replace(result, counted="")  # no mean any more
            elif name == "random_bits":
                result = dataclasses.replace(result, is_constant=False)
            key = given[0] if given else UNKNOWN
            if name == "random_bits" and key.is_equal:
                result = self._note_draw(eqn, other, result)
            return [result] * len(eqn.outvars)
        found = self._degree(eqn, other, given)
        zero = (name in _PRODUCTS and any(x.is_zero for x in given)) or (
            name in _ZERO_AT_ZERO and given[0].is_zero
        )
        changed: dict[str, Any] = {"is_zero": zero}
        counts = [x.degree not in (None, NONE) and not x.is_zero for x in given]
        divisor = given[1].degree if name == "div" else None
        if divisor is not None and divisor.rows > 0 and not divisor.replicas:
            self.takes_means = True
        if (name == "div" and counts[1]) or (
            name in ("mul", "div")
            and any(c and x.is_literal for c, x in zip(counts, given, strict=True))
        ):
            changed["counted"] = self._line(eqn)
        result = self._absorb(eqn, given, combine(given, found, **changed))
        if name in ("mul", "div") and len(given) == 2:
            result = _with_factor(eqn, other, given, result)
        elif name not in _LINEAR:  # a factor inside a function does not multiply its result
            result = dataclasses.replace(result, factors=(), before_sum=())
        return [result] * len(eqn.outvars)

    def _absorb(self, eqn: core.JaxprEqn, given: Sequence[Value], result: Value) -> Value:
        """Notes a fault for each wrong value, if the degree of the result is unknown."""
        if result.degree is not None or result.is_zero:
            return result
        faults = result.faults
        for x in given:
            if x.is_wrong:
                faults |= self._note(eqn, x, x.degree.excess)  # type: ignore[union-attr]
        return dataclasses.replace(result, faults=faults)

    def _degree(
        self, eqn: core.JaxprEqn, other: core.JaxprEqn, given: list[Value]
    ) -> Degree | None:
        """The degree of the result of an operation; None if it is not known."""
        name = eqn.primitive.name
        degrees = [NONE if x.is_zero else x.degree for x in given]
        if any(x is None for x in degrees):
            return None
        known: list[Degree] = degrees  # type: ignore[assignment]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            contracted = self._degree_of_contraction(eqn, other)
            return None if contracted is None else known[0] + known[1] + contracted
        if name == "div":
            return known[0] - known[1]
        if name == "integer_pow":
            return known[0] * eqn.params["y"]
        if name in _POWERS:
            return known[0] * _POWERS[name]
        if name in ("reduce_sum", "cumsum", "reduce_window_sum"):
            added = _sizes(eqn.invars[0], other.invars[0], _dims_of_sum(eqn))
            if added is None or (added != NONE and name != "reduce_sum"):
                return None
            return known[0] + added
        if all(x == NONE for x in known):
            return NONE
        return None

    def _degree_of_contraction(self, eqn: core.JaxprEqn, other: core.JaxprEqn) -> Degree | None:
        """The degree that a contraction adds: that of the dims that it sums over."""
        name = eqn.primitive.name
        if name == "mul":
            return NONE
        if name == "dot_general":
            (dims, _), _ = eqn.params["dimension_numbers"]
            return _sizes(eqn.invars[0], other.invars[0], dims)
        spec = eqn.params["dimension_numbers"].rhs_spec
        return _sizes(eqn.invars[1], other.invars[1], spec[1:])

    def _scatter(self, eqn: core.JaxprEqn, other: core.JaxprEqn, given: list[Value]) -> Value:
        operand, _, updates = given[:3]
        if not eqn.primitive.name.replace("-", "_").startswith("scatter_add"):
            return self._either(operand, updates)
        numbers = eqn.params["dimension_numbers"]
        scattered = [
            i for i in range(len(_shape(eqn.invars[2]))) if i not in numbers.update_window_dims
        ]
        batched = numbers.scatter_indices_batching_dims
        summed = [x for i, x in enumerate(scattered) if i not in batched]
        added = _sizes(eqn.invars[2], other.invars[2], summed)
        places = _sizes(eqn.invars[0], other.invars[0], numbers.scatter_dims_to_operand_dims)
        if added is None or places is None or updates.degree is None:
            return _lose(given)
        moved = dataclasses.replace(updates, degree=updates.degree + added - places)
        return self._join(eqn, operand, moved)

    def _scan(self, scan: jaxprs.Scan, twin: Any, given: list[Value]) -> list[Value]:
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carry = given[first:last]
        if scan.length != twin.length:
            carry = [_lose([x]) for x in carry]
        for _ in range(_MAX_ROUNDS):
            outputs = self.program(scan.body, twin.body, [*given[:first], *carry, *given[last:]])
            new = [self._either(x, y) for x, y in zip(carry, outputs, strict=False)]
            if new == carry:
                break
            carry = new
        else:
            carry = [_lose([x]) for x in carry]
            outputs = self.program(scan.body, twin.body, [*given[:first], *carry, *given[last:]])
        return [*carry, *outputs[scan.num_carry :]]

    def _sum_over_replicas(self, eqn: core.JaxprEqn, x: Value) -> Value:
        line = self._line(eqn)
        averaged = x.counted if x.degree == NONE and not x.is_equal else ""
        made = dataclasses.replace(
            x,
            degree=x.degree and x.degree + OF_REPLICAS,
            is_equal=True,
            is_global=False,
            is_literal=False,
            is_constant=False,
            carries=0,
            summed=line,
            averaged=averaged,
            factors=(),
            before_sum=x.factors,
        )
        if not x.mixed:
            return made
        faults = made.faults | self._note(eqn, made, Fraction(1), mixed=True)
        return dataclasses.replace(made, faults=faults, mixed="")

    def _join(self, eqn: core.JaxprEqn, a: Value, b: Value) -> Value:
        """The sum of two values; notes a fault if one of them is not that of one device."""
        if a.is_zero or b.is_zero:
            kept = b if a.is_zero else a
            return combine_either([a, b], kept.degree, is_zero=a.is_zero and b.is_zero)
        if a.is_literal or b.is_literal:  # an epsilon, or a constant of a loss
            kept, other = (b, a) if a.is_literal else (a, b)
            if other.degree == NONE:
                return combine_either([a, b], kept.degree)
        faults = 0
        for x, y in ((a, b), (b, a)):
            if x.is_right and y.is_wrong:
                if not x.sources:  # no state: it stays as wrong as it was
                    return combine_either([a, b], y.degree)
                faults |= self._note(eqn, y, y.degree.excess)  # type: ignore[union-attr]
            elif x.is_right and x.sources and y.is_right and y.averaged:
                faults |= self._note(eqn, y, Fraction(0))
        if a.degree is not None and a.degree == b.degree:
            made = combine_either([a, b], a.degree)
        else:
            made = combine_either([a, b], None, mixed=self._line_of_mixture(eqn, a, b))
        return dataclasses.replace(made, faults=made.faults | faults)

    def _line_of_mixture(self, eqn: core.JaxprEqn, a: Value, b: Value) -> str:
        """The line, if a value of all rows and state is added to a share of each replica."""
        if a.mixed or b.mixed or a.degree is None or b.degree is None or a.is_equal == b.is_equal:
            return a.mixed or b.mixed
        whole, part = (a, b) if a.is_equal else (b, a)
        mixes = not whole.is_constant and whole.is_right and part.degree.excess == -1  # type: ignore[union-attr]
        return (self._line(eqn) or "?") if mixes else ""

    def _either(self, a: Value, b: Value) -> Value:
        """Returns the properties of a value that is either `a` or `b`."""
        if a.is_zero or b.is_zero:
            kept = b if a.is_zero else a
            return combine_either([a, b], kept.degree, is_zero=a.is_zero and b.is_zero)
        return combine_either([a, b], a.degree if a.degree == b.degree else None)

    def _note(self, eqn: core.JaxprEqn, x: Value, excess: Fraction, mixed: bool = False) -> int:
        counted = x.counted if excess else x.averaged
        if mixed:
            counted = x.mixed.strip("?") or counted
        made = Fault(excess, counted, x.summed, x.sources, x.factors, x.before_sum, mixed)
        return self._add(eqn, made)

    def _note_draw(self, eqn: core.JaxprEqn, other: core.JaxprEqn, drawn: Value) -> Value:
        """Notes random numbers for each row of a replica, drawn with a key that all have."""
        size = _sizes(eqn.outvars[0], other.outvars[0], range(len(_shape(eqn.outvars[0]))))
        if size is None or size.rows <= 0 or size.replicas:
            return drawn
        fault = Fault(Fraction(0), self._line(eqn), "", 0, is_draw=True)
        return dataclasses.replace(drawn, faults=drawn.faults | self._add(eqn, fault))

    def _add(self, eqn: core.JaxprEqn, fault: Fault) -> int:
        number = self._known.setdefault((id(eqn), fault.excess), len(self.faults))
        if number == len(self.faults):
            self.faults.append(fault)
            self._draws |= fault.is_draw << number
        return 1 << number

    def _line(self, eqn: core.JaxprEqn) -> str:
        return first_line_of((eqn, *reversed(self._calls)))


def _sizes(x: Any, y: Any, dims: Sequence[int]) -> Degree | None:
    """The degree of the number of elements along some dims."""
    sizes = [math.prod(_shape(v)[i] for i in dims) for v in (x, y)]
    return degree.degree_of_numbers(*map(float, sizes)) if all(sizes) else None


def _dims_of_sum(eqn: core.JaxprEqn) -> Sequence[int]:
    """The dims that a sum adds along."""
    if eqn.primitive.name == "reduce_window_sum":
        return [i for i, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
    return [eqn.params["axis"]] if eqn.primitive.name == "cumsum" else eqn.params["axes"]


def _shape(x: Any) -> tuple[int, ...]:
    return getattr(x.aval, "shape", ())


def _is_guard(bound: Value, given: Sequence[Value]) -> bool:
    """Whether a bound is hardly ever reached: an epsilon, or the 1 of `max(count, 1)`.

    A count does not depend on state, unlike a norm of gradients, which is clipped.
    """
    is_small = bound.is_zero or abs(bound.number or 1) < _EPSILON
    is_number = bound.is_literal and bound.degree == NONE
    return is_number and (is_small or not any(x.sources for x in given))


def _addend_of(given: Sequence[Value]) -> Value | None:
    """Returns the value that is added to a value that depends on one state input only."""
    for state, other in (given, given[::-1]):
        if state.sources.bit_count() == 1 and not state.sources & other.sources:
            return other
    return None


def _lose(given: Sequence[Value]) -> Value:
    return dataclasses.replace(combine(given, None), is_zero=False)


def _with_factor(
    eqn: core.JaxprEqn, other: core.JaxprEqn, given: Sequence[Value], result: Value
) -> Value:
    """The result of a product or quotient, with the numbers that multiply it.

    A number is recorded where it multiplies numbers, as in the derivative of a loss, a value
    without a dim of rows, or a vector of the rows. It does not multiply the loss elsewhere.
    """
    divides = eqn.primitive.name == "div"
    numbers = [x.number for x in given]
    if divides:
        numbers[1] = 1 / numbers[1] if numbers[1] else None
    first, second = numbers
    if first is not None and second is not None:
        result = dataclasses.replace(result, number=first * second)
    values = [x for x in given if x.number is None]
    sizes = list(zip(_shape(eqn.outvars[0]), _shape(other.outvars[0]), strict=True))
    has_rows = any(x != y for x, y in sizes)
    of_rows = has_rows and not all(x.is_constant for x in values)
    if of_rows and any(x == y != 1 for x, y in sizes):
        return result
    factors = [
        Factor(number, of_rows, divides)
        for x, number in zip(given, numbers, strict=True)
        if number and abs(number) != 1 and not x.factors
    ]
    return dataclasses.replace(result, factors=(*result.factors, *factors))


def _callees(eqn: core.JaxprEqn, other: core.JaxprEqn) -> tuple[Any, Any]:
    """The programs that two calls run, with their constants."""
    found = []
    for x in (eqn, other):
        body = jaxprs.structure_of(x).body  # type: ignore[union-attr]
        programs = jaxprs.programs_of(tuple(x.params.values()))
        found.append(
            next((p for p in programs if jaxprs.open_jaxpr(p) is body), None) or jaxprs.expand(x)
        )
    return found[0], found[1]
