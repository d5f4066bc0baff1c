"""Finds the line at which a step on the replicas begins to differ from one device.

A value without a relation to one device (`relations`) comes from an operation that mixes the
replicas' parts nonlinearly, such as clipping each part. A reduction whose result has a factor is
the wrong reduction.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpudist.programs import flat_program, operations, random_streams
from tpudist.programs.flat_program import FlatProgram, Operation, is_collective
from tpudist.programs.user_lines import first_users_line_of
from tpudist.verification.relations import Program, Relation, find_relations

# Operations that may follow a reduction in its line, as the division of a mean.
_SCALES = frozenset(
    "div mul convert_element_type neg reshape squeeze copy broadcast_in_dim".split()
)
_REDUCTIONS = ("psum", "psum_invariant", "reduce_scatter", "psum_scatter", "pmax", "pmin")
_ADDITIONS = ("add", "add_any", "sub")
_ADDENDS = ("equal", "rows", "sum")  # the relations of values whose sum has a meaning
_MOVES = frozenset(
    "axis_index reshape transpose slice dynamic_slice broadcast_in_dim squeeze expand_dims "
    "concatenate gather all_gather ppermute all_to_all rev".split()
)
"""Operations that only move rows: if rows are grouped differently, no value is wrong yet."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the user's code.

    Attributes:
        line: The line, `file:line`; empty if unknown.
        factor: The factor of the values of that line, if it is a wrong reduction.
        kind: "reduction"; "nonlinear" for an operation before a reduction; "mixed" for an addition
            after which a sum over the replicas is right for some of the addends only; "number" for
            a number in the program that differs on one device; "" for all others.
    """

    line: str = ""
    factor: float | None = None
    kind: str = ""


class _Step(NamedTuple):
    """An operation that was searched: its position among the steps, its line and its factor."""

    position: int
    line: str
    factor: float | None = None


class Places:
    """The lines at which outputs of a step begin to differ from one device.

    Args:
        many: The program of a replica of n.
        one: The program of one device.
        n: Number of replicas.
        fixes_draws: Whether to replace random bits by a constant.
    """

    def __init__(self, many: Program, one: Program, n: int, *, fixes_draws: bool):
        compute = random_streams.compute_fixed if fixes_draws else operations.compute_operation
        self._program = flat_program.flatten(many.closed, inline_calls=True)
        self._relations = _Relations(find_relations(many, one, self._program, n, compute), n)

    def find(self, output: int, *, has_factor: bool) -> "Place":
        """Returns the place at which an output begins to differ.

        Args:
            output: Number of the output.
            has_factor: Whether the output differs by a power of the number of replicas. The line of
                a wrong reduction then comes before the line of a nonlinear operation.
        """
        relations = self._relations
        sources = _find_sources(self._program, self._program.outputs[output])
        steps = [x for x in self._program.steps if sources.intersection(x.outputs)]
        # Only operations that the output depends on, in the order of the program: another output
        # may be wrong for another reason. The first wrong operation is the cause. Moves come last,
        # since most of them have no effect.
        reduction = relations.find_wrong_reduction(steps)
        nonlinear = relations.find_nonlinear(steps)
        if reduction and (has_factor or not nonlinear or reduction.position <= nonlinear.position):
            return Place(reduction.line, reduction.factor, "reduction")
        if nonlinear and relations.is_mixed(steps[nonlinear.position]):
            # The addition of gradients has no line of the loss function. The loss itself is added
            # earlier, and its addition may not be a source of this output.
            mixed = filter(relations.is_mixed, self._program.steps)
            return Place(next(filter(None, map(line_of, mixed)), nonlinear.line), kind="mixed")
        if nonlinear:
            return Place(nonlinear.line, kind="nonlinear")
        if line := relations.find_not_reduced(steps) or relations.find_move(steps):
            return Place(line)
        return Place(relations.find_wrong_number(steps), kind="number")


def _find_sources(program: FlatProgram, number: int) -> set[int]:
    """Returns the values that a value is computed from, and the value itself."""
    sources = {number}
    # One pass suffices: the steps are in the order of computation, so all users of a value come
    # after it.
    for step in reversed(program.steps):
        if sources.intersection(step.outputs):
            sources.update(step.inputs)
    return sources


class _Relations:
    """Searches the operations of a program by the relations of their operands and results."""

    def __init__(self, by_number: Mapping[int, Relation], n: int):
        self._by_number, self._n = by_number, n

    def _relations_of(self, numbers: Sequence[int]) -> list[Relation]:
        return [self._by_number[i] for i in numbers if i in self._by_number]

    def find_wrong_reduction(self, steps: Sequence[Operation]) -> _Step | None:
        """Returns the first reduction whose result is equal on all replicas and has a factor."""
        users: dict[int, list[Operation]] = {}
        for step in steps:
            for number in step.inputs:
                users.setdefault(number, []).append(step)
        for i, step in enumerate(steps):
            if step.eqn.primitive.name in _REDUCTIONS and is_collective(step.eqn):
                line = line_of(step)
                ends = self._relations_of([_end_of_scaling(x, line, users) for x in step.outputs])
                wrong = [x.factor for x in ends if x.kind == "equal" and x.factor != 1]
                if line and wrong:
                    return _Step(i, line, wrong[0])
        return None

    def find_nonlinear(self, steps: Sequence[Operation]) -> _Step | None:
        """Returns the first operation with a broken result and no broken operand."""
        for i, step in enumerate(steps):
            broken = [x for x in self._relations_of(step.outputs) if x.is_broken]
            only_moves = step.eqn.primitive.name in _MOVES
            if not broken or (only_moves and not any(x.kind for x in broken)):
                continue
            if not any(x.is_broken for x in self._relations_of(step.inputs)) and (
                line := line_of(step)
            ):
                return _Step(i, line)
        return None

    def is_mixed(self, step: Operation) -> bool:
        """Returns whether an operation adds values that a sum over replicas scales differently."""
        # A value that is equal on all replicas becomes n times as large by that sum.
        factors = {
            x.factor * (self._n if x.kind == "equal" else 1)
            for x in self._relations_of(step.inputs)
            if x.kind in _ADDENDS
        }
        has_no_relation = any(not x.kind for x in self._relations_of(step.outputs))
        return step.eqn.primitive.name in _ADDITIONS and has_no_relation and len(factors) > 1

    def find_move(self, steps: Sequence[Operation]) -> str:
        """Returns the line of the first operation that groups or selects rows differently."""
        for step in steps:
            has_no_relation = any(not x.kind for x in self._relations_of(step.outputs))
            if has_no_relation and all(x.kind for x in self._relations_of(step.inputs)):
                if line := line_of(step):
                    return line
        return ""

    def find_wrong_number(self, steps: Sequence[Operation]) -> str:
        """Returns the line of the last operation whose result has a factor, but no operand has one.

        The program contains another number there, such as the number of the replica's own rows.
        Later operations correct the factors of earlier ones.
        """
        for step in reversed(steps):
            if any(x.kind == "equal" and x.factor != 1 for x in self._relations_of(step.outputs)):
                if all(x.kind == "zero" or x.factor == 1 for x in self._relations_of(step.inputs)):
                    if line := line_of(step):
                        return line
        return ""

    def find_not_reduced(self, steps: Sequence[Operation]) -> str:
        """Returns the line of the first operation that joins a replica's part to a value of all.

        If there is none, the line of the last operation that adds a part to zeros, such as moments
        before the first step.
        """
        added = ""
        for step in steps:
            kinds = {x.kind for x in self._relations_of(step.inputs)}
            if "sum" not in kinds:
                continue
            if "equal" in kinds and any(x.kind != "sum" for x in self._relations_of(step.outputs)):
                if line := line_of(step):
                    return line
            if "zero" in kinds and step.eqn.primitive.name in _ADDITIONS:
                added = line_of(step) or added
        return added


def _end_of_scaling(number: int, line: str, users: dict[int, list[Operation]]) -> int:
    """Returns the value that a value becomes by the operations of the same line that scale it."""
    # Ends, since each turn goes to the result of a later operation.
    while True:
        following = [
            x
            for x in users.get(number, ())
            if x.eqn.primitive.name in _SCALES and line_of(x) == line and len(x.outputs) == 1
        ]
        if len(following) != 1 or len(users[number]) != 1:
            return number
        number = following[0].outputs[0]


def line_of(step: Operation) -> str:
    """Returns the user's line of an operation, or of the call that contains it."""
    return first_users_line_of((step.eqn, *reversed(step.calls)))
