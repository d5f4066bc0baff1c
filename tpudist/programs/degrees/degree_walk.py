"""Finds sums over replicas that one device with all rows would not compute.

Two traces of a function, the second with more rows and on more replicas, show the degree of each
number and dim (`degree`). The degrees of all values follow: a sum over rows adds the degree of the
dim, a product adds degrees, a quotient subtracts them, and a sum over replicas adds 1 in the
replicas. Other functions need operands of degree 0. An unknown degree stays unknown, and never
leads to a warning.

New state is wrong if it is the sum of state and of a value that depends on that state and has
unequal degrees in rows and replicas. So a gradient is distinguished from a metric, which is added
only to itself.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jax.extend import core

from tpudist.programs import equation_layouts, jaxprs, replica_equality
from tpudist.programs.degrees import degree, degree_operations as operations
from tpudist.programs.degrees.degree import (
    NONE,
    OF_REPLICAS,
    UNKNOWN,
    Value,
    combine,
    combine_either,
)
from tpudist.programs.degrees.degree_faults import Fault
from tpudist.programs.flat_program import is_collective
from tpudist.programs.jaxpr_structure import Call, Cond, Scan
from tpudist.programs.jaxprs import Atom, Program
from tpudist.programs.user_lines import first_users_line_of

# Rounds of a scan after which the degrees of a carry that has not settled are given up. One round
# settles a carry; each carry that is computed from another one takes one more.
_MAX_ROUNDS = 6
_UNKNOWN_LINE = "?"  # of a mixture: not empty, since the line also marks it


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


def walk(
    first: Program, second: Program, is_equal: Sequence[bool], state: Mapping[int, int]
) -> Findings:
    """Returns the faults of a program of one replica.

    Args:
        first: The program.
        second: The same at `ROWS_FACTOR` times the rows on `REPLICAS_FACTOR` times the replicas,
            with the same structure.
        is_equal: Whether each input is equal on all replicas.
        state: The outputs that are new state, each with the input that it replaces.
    """
    analysis = _DegreeAnalysis()
    state_inputs = set(state.values())
    bits = [1 << i if i in state_inputs else 0 for i in range(len(is_equal))]
    values = [
        Value(is_equal=equal, sources=bit, state_addends=bit)
        for equal, bit in zip(is_equal, bits, strict=True)
    ]
    outputs = analysis.program(first, second, values)

    def reaches_state(number: int, fault: Fault) -> bool:
        # A fault counts if it reaches the new value of state that it depends on. A fault of a
        # metric depends on the parameters, and reaches only the metric.
        return any(
            outputs[o].faults >> number & 1 and (fault.is_draw or fault.sources >> i & 1)
            for o, i in state.items()
        )

    faults = [x for number, x in enumerate(analysis.faults) if reaches_state(number, x)]
    return Findings(tuple(faults), analysis.takes_means, tuple(outputs))


class _DegreeAnalysis:
    def __init__(self):
        self.faults: list[Fault] = []
        self.takes_means = False
        # Numbers of the faults by equation, excess and mixture: the rounds of a loop find a fault
        # again.
        self._numbers: dict[tuple[int, Fraction, bool], int] = {}
        self._calls: list[core.JaxprEqn] = []
        self._draws = 0  # the faults that are random numbers, as bits

    def program(self, first: Program, second: Program, values: Sequence[Value]) -> list[Value]:
        """Returns the properties of the outputs of a program, given those of its inputs."""
        a, b = jaxprs.open_jaxpr(first), jaxprs.open_jaxpr(second)
        consts = zip(jaxprs.consts_of(first), jaxprs.consts_of(second), strict=True)
        env: dict[core.Var, Value] = dict(zip(a.invars, values, strict=True))
        # An open jaxpr of jax 0.10 has variables without constants: their properties are unknown.
        env.update(
            (x, degree.of_literal(*both)) for x, both in zip(a.constvars, consts, strict=False)
        )

        def read(x: Atom, y: Atom) -> Value:
            if isinstance(x, core.Literal):
                return degree.of_literal(x.val, jaxprs.literal_value(y))
            return env.get(x, UNKNOWN)

        for eqn, twin in zip(a.eqns, b.eqns, strict=True):
            operands = [read(x, y) for x, y in zip(eqn.invars, twin.invars, strict=True)]
            env.update(zip(eqn.outvars, self._equation(eqn, twin, operands), strict=True))
        return [read(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]

    def _equation(
        self, eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: list[Value]
    ) -> Sequence[Value]:
        if eqn.primitive.name.startswith("scatter"):
            return [self._scatter(eqn, twin, operands)]
        match equation_layouts.structure_of(eqn), equation_layouts.structure_of(twin):
            case None, _:
                return self._operation(eqn, twin, operands)
            case Call(body=body, copies=1), Call(body=twin_body):
                first, second = jaxprs.callee_of(eqn, body), jaxprs.callee_of(twin, twin_body)
                self._calls.append(eqn)
                try:
                    return self.program(first, second, operands)
                finally:
                    self._calls.pop()
            case Cond(bodies=bodies), Cond(bodies=twin_bodies):
                branches = [
                    self.program(x, y, operands[1:])
                    for x, y in zip(bodies, twin_bodies, strict=True)
                ]
                results = [functools.reduce(self._either, x) for x in zip(*branches, strict=True)]
                if operands[0].is_equal:
                    return results
                return [x._replace(is_equal=False) for x in results]
            case Scan() as scan, Scan() as twin_scan:
                return self._scan(scan, twin_scan, operands)
        return [_forget_degree(operands)] * len(eqn.outvars)

    def _operation(
        self, eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: list[Value]
    ) -> Sequence[Value]:
        """Returns the properties of the results of an equation without programs inside."""
        # The order matters: collectives come first, since `KEEP` contains `pmax` and `all_gather`.
        name, num_results = eqn.primitive.name, len(eqn.outvars)
        if eqn.params.get("axis_index_groups") and is_collective(eqn):
            return [_forget_degree(operands)._replace(is_equal=False)] * num_results
        if name in operations.SUMS_OVER_REPLICAS and is_collective(eqn):
            return [self._sum_over_replicas(eqn, x) for x in operands]
        if replica_equality.makes_equal(eqn):
            return [x._replace(is_equal=True) for x in operands]
        if name == "axis_index":
            return [Value(is_equal=False, positions=OF_REPLICAS)]
        if name in operations.KEEP:
            if num_results != len(operands):
                first = operands[0]
                return [combine(operands, first.degree, is_zero=first.is_zero)] * num_results
            keeps_addends = name in operations.IDENTITIES
            return operands if keeps_addends else _without_state_addends(operands)
        if name == "sub" and operands[0].state_addends & operands[1].state_addends:
            # The state cancels: new - old.
            return [_forget_degree(operands)._replace(mixed="")]
        if name in operations.JOIN:
            return [self._join_all(eqn, operands)]
        if name == "select_n":
            return [self._select(eqn, operands)]
        if name in operations.EXTREMES:
            kept = [x for x in operands if not operations.is_guard(x, operands)] or operands
            return [self._absorb(eqn, kept, functools.reduce(self._either, kept))]
        if name in operations.FREE:
            return [self._free(eqn, twin, operands)] * num_results
        return [self._function(eqn, twin, operands)] * num_results

    def _join_all(self, eqn: core.JaxprEqn, operands: Sequence[Value]) -> Value:
        joined = functools.reduce(functools.partial(self._join, eqn), operands)
        if eqn.primitive.name not in operations.ADDITIONS:
            return joined._replace(state_addends=0, addend=None)
        state_addends = functools.reduce(operator.or_, (x.state_addends for x in operands))
        addend = operations.addend_of(operands) if len(operands) == 2 else None
        return joined._replace(state_addends=state_addends, addend=addend)

    def _select(self, eqn: core.JaxprEqn, operands: Sequence[Value]) -> Value:
        mask, choices = operands[0], operands[1:]
        result = self._absorb(eqn, choices, functools.reduce(self._either, choices))
        # A mask with a degree picks one of all rows or replicas, if the other elements are zero.
        has_zero = any(x.is_zero for x in choices)
        if has_zero and mask.degree is not None and result.degree is not None:
            result = result._replace(degree=result.degree + mask.degree)
        is_equal = result.is_equal and mask.is_equal
        # Dropout: a wrong draw of the mask is a fault of the result.
        faults = result.faults | mask.faults & self._draws
        return result._replace(is_equal=is_equal, faults=faults)

    def _free(self, eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: Sequence[Value]) -> Value:
        """Returns the properties of a result that does not grow with its operands."""
        name = eqn.primitive.name
        result = combine(operands, NONE)
        if name == "iota":
            dims = [eqn.params["dimension"]]
            positions = operations.degree_of_sizes(eqn.outvars[0], twin.outvars[0], dims) or NONE
            # The positions of rows are larger if there are more, by no fixed factor.
            size = NONE if positions == NONE else None
            result = result._replace(degree=size, positions=positions)
        elif name == "eq":
            # A comparison with positions is a one-hot vector: one of its elements is not zero.
            positions = next((x.positions for x in operands if x.positions != NONE), NONE)
            result = result._replace(degree=NONE - positions)
        if name in operations.COMPARISONS:
            result = result._replace(counted="")  # it is not a mean any more
        elif name == "random_bits":
            result = result._replace(is_constant=False)
            if operands and operands[0].is_equal:
                result = self._record_draw(eqn, twin, result)
        return result

    def _function(
        self, eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: Sequence[Value]
    ) -> Value:
        """Returns the properties of a product, quotient, sum over dims or other function."""
        name = eqn.primitive.name
        changed: dict[str, Any] = {
            "is_zero": (name in operations.PRODUCTS and any(x.is_zero for x in operands))
            or (name in operations.ZERO_AT_ZERO and operands[0].is_zero)
        }
        is_count = [x.degree not in (None, NONE) and not x.is_zero for x in operands]
        divisor = operands[1].degree if name == "div" else None
        if divisor is not None and divisor.rows > 0 and not divisor.replicas:
            self.takes_means = True
        counts_by_literal = any(
            count and x.is_literal for count, x in zip(is_count, operands, strict=True)
        )
        if (name == "div" and is_count[1]) or (name in ("mul", "div") and counts_by_literal):
            changed["counted"] = self._line(eqn)
        own = operations.degree_of_result(eqn, twin, operands)
        result = self._absorb(eqn, operands, combine(operands, own, **changed))
        if name in ("mul", "div") and len(operands) == 2:
            return operations.with_factors(eqn, twin, operands, result)
        if name not in operations.LINEAR:
            # A factor inside another function does not multiply its result.
            result = result._replace(factors=(), before_sum=())
        return result

    def _absorb(self, eqn: core.JaxprEqn, operands: Sequence[Value], result: Value) -> Value:
        """Records a fault for each wrong operand, if the degree of the result is unknown."""
        if result.degree is not None or result.is_zero:
            return result
        faults = result.faults
        for x in operands:
            if x.is_wrong:
                faults |= self._record(eqn, x, x.excess)
        return result._replace(faults=faults)

    def _scatter(self, eqn: core.JaxprEqn, twin: core.JaxprEqn, operands: Sequence[Value]) -> Value:
        operand, _, updates = operands[:3]
        name = eqn.primitive.name.replace("-", "_")
        if name == "scatter_mul" and (operand.degree, updates.degree) != (NONE, NONE):
            return _forget_degree(operands)
        if not name.startswith("scatter_add"):
            return self._either(operand, updates)
        numbers = eqn.params["dimension_numbers"]
        num_dims = len(jaxprs.shape_of(eqn.invars[2]))
        scattered = [i for i in range(num_dims) if i not in numbers.update_window_dims]
        batched = numbers.scatter_indices_batching_dims
        summed = [x for i, x in enumerate(scattered) if i not in batched]
        added = operations.degree_of_sizes(eqn.invars[2], twin.invars[2], summed)
        dims = numbers.scatter_dims_to_operand_dims
        places = operations.degree_of_sizes(eqn.invars[0], twin.invars[0], dims)
        if added is None or places is None or updates.degree is None:
            return _forget_degree(operands)
        # The updates are distributed over the places: each gets its share of the sum.
        share = updates._replace(degree=updates.degree + added - places)
        return self._join(eqn, operand, share)

    def _scan(self, scan: Scan, twin: Scan, operands: list[Value]) -> list[Value]:
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carry = operands[first:last]
        if scan.length != twin.length:
            # The carry may be a sum over the rows: its degree is not followed.
            carry = [_forget_degree([x]) for x in carry]

        def run(carry: list[Value]) -> list[Value]:
            values = [*operands[:first], *carry, *operands[last:]]
            return self.program(scan.body, twin.body, values)

        # A fixpoint: properties that hold before and after an iteration hold in every iteration.
        # Each round merges the carry with the results of one more iteration. Recorded factors and
        # lines may change in every round, so the number of rounds is limited. A carry that has not
        # settled then gets an unknown degree, which is right for every value.
        for _ in range(_MAX_ROUNDS):
            outputs = run(carry)
            merged = [self._either(x, y) for x, y in zip(carry, outputs, strict=False)]
            if merged == carry:
                break
            carry = merged
        else:
            carry = [_forget_degree([x]) for x in carry]
            outputs = run(carry)
        return [*carry, *outputs[scan.num_carry :]]

    def _sum_over_replicas(self, eqn: core.JaxprEqn, x: Value) -> Value:
        averaged = x.counted if x.degree == NONE and not x.is_equal else ""
        total = x._replace(
            degree=None if x.degree is None else x.degree + OF_REPLICAS,
            is_equal=True,
            is_global=False,
            is_literal=False,
            is_constant=False,
            state_addends=0,
            summed=self._line(eqn),
            averaged=averaged,
            factors=(),
            before_sum=x.factors,
        )
        if not x.mixed:
            return total
        # Of `share + whole`, the sum over replicas is right for the share only.
        faults = total.faults | self._record(eqn, total, Fraction(1), mixed=True)
        return total._replace(faults=faults, mixed="")

    def _join(self, eqn: core.JaxprEqn, a: Value, b: Value) -> Value:
        """Returns the sum of two values; records a fault if one device would compute another."""
        # A zero and an epsilon have any degree, so the other addend decides.
        if a.is_zero or b.is_zero:
            kept = b if a.is_zero else a
            return combine_either([a, b], kept.degree, is_zero=a.is_zero and b.is_zero)
        if a.is_literal or b.is_literal:
            kept, number = (b, a) if a.is_literal else (a, b)
            if number.degree == NONE:  # an epsilon, or a constant of a loss
                return combine_either([a, b], kept.degree)
        # State plus a wrong value is a fault, and so is state plus a mean of the replicas' means,
        # which is right only while all replicas have equally many rows.
        faults = 0
        for x, y in ((a, b), (b, a)):
            if x.is_right and y.is_wrong:
                if not x.sources:
                    # No state yet. The fault is recorded where the sum is added to state.
                    return combine_either([a, b], y.degree)
                faults |= self._record(eqn, y, y.excess)
            elif x.is_right and x.sources and y.is_right and y.averaged:
                faults |= self._record(eqn, y, Fraction(0))
        if a.degree is not None and a.degree == b.degree:
            total = combine_either([a, b], a.degree)
        else:
            total = combine_either([a, b], None, mixed=self._line_of_mixture(eqn, a, b))
        return total._replace(faults=total.faults | faults)

    def _line_of_mixture(self, eqn: core.JaxprEqn, a: Value, b: Value) -> str:
        """Returns the line if a value of all rows and state is added to a share of each replica."""
        if a.mixed or b.mixed or a.degree is None or b.degree is None or a.is_equal == b.is_equal:
            return a.mixed or b.mixed
        whole, share = (a, b) if a.is_equal else (b, a)
        mixes = not whole.is_constant and whole.is_right and share.excess == -1
        return (self._line(eqn) or _UNKNOWN_LINE) if mixes else ""

    def _either(self, a: Value, b: Value) -> Value:
        """Returns the properties of a value that is either `a` or `b`."""
        if a.is_zero or b.is_zero:
            kept = b if a.is_zero else a
            return combine_either([a, b], kept.degree, is_zero=a.is_zero and b.is_zero)
        return combine_either([a, b], a.degree if a.degree == b.degree else None)

    def _record(self, eqn: core.JaxprEqn, x: Value, excess: Fraction, mixed: bool = False) -> int:
        """Records a fault of `x`; returns its bit."""
        counted = x.counted if excess else x.averaged
        if mixed:
            counted = x.mixed.removesuffix(_UNKNOWN_LINE) or counted
        fault = Fault(excess, counted, x.summed, x.sources, x.factors, x.before_sum, mixed)
        return self._add(eqn, fault)

    def _record_draw(self, eqn: core.JaxprEqn, twin: core.JaxprEqn, drawn: Value) -> Value:
        """Records random numbers for each row of a replica, drawn with a key that all have."""
        dims = range(len(jaxprs.shape_of(eqn.outvars[0])))
        size = operations.degree_of_sizes(eqn.outvars[0], twin.outvars[0], dims)
        if size is None or size.rows <= 0 or size.replicas:
            return drawn
        fault = Fault(Fraction(0), self._line(eqn), "", 0, is_draw=True)
        return drawn._replace(faults=drawn.faults | self._add(eqn, fault))

    def _add(self, eqn: core.JaxprEqn, fault: Fault) -> int:
        key = id(eqn), fault.excess, fault.mixed
        number = self._numbers.setdefault(key, len(self.faults))
        if number == len(self.faults):
            self.faults.append(fault)
            self._draws |= fault.is_draw << number
        return 1 << number

    def _line(self, eqn: core.JaxprEqn) -> str:
        return first_users_line_of((eqn, *reversed(self._calls)))


def _without_state_addends(values: Sequence[Value]) -> list[Value]:
    return [x._replace(state_addends=0) for x in values]


def _forget_degree(values: Sequence[Value]) -> Value:
    return combine(values, None)._replace(is_zero=False)
