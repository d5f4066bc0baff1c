"""Reads the trip counts of the loops of a compiled program.

A loop `while(state)` runs its body as long as its condition is true. For JAX's `scan` and
`fori_loop`, and for loops that XLA adds, the condition compares an element of the state with a
limit, and the body adds a constant to that element. So start, limit and constant determine the
count. XLA:CPU writes the count into the program (`known_trip_count`), and then it is used. A count
is unknown if the limit is computed at run time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tpudist.xla.hlo.instructions import Computation, Instruction

Computations = Mapping[str, Computation]  # of a program, by name

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes that do not change the value of a scalar. Counters are integers, so "convert" changes only
# their width. "copy-start" returns a tuple with the copy, which "copy-done" reads.
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-done", "copy-start")
# The direction of a comparison after its two sides are exchanged.
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclasses.dataclass(frozen=True)
class _Value:
    """A scalar: `offset`, plus element `state_index` of the loop's state unless that is None."""

    state_index: int | None
    offset: int


def count_trips(computations: Computations) -> dict[str, int | None]:
    """Returns the trip count of each `while` of a program by its name; None if it is unknown."""
    callers = _callers(computations)
    return {
        instruction.name: _trip_count(computations, callers, instruction)
        for computation in computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    }


def _callers(computations: Computations) -> dict[str, list[Instruction]]:
    """Returns the loops and calls that run each computation, by its name."""
    callers: dict[str, list[Instruction]] = {}
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "call"):
                for role, name in instruction.called:
                    if role != "condition":
                        callers.setdefault(name, []).append(instruction)
    return callers


def _trip_count(
    computations: Computations, callers: dict[str, list[Instruction]], loop: Instruction
) -> int | None:
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition = computations.get(loop.callee("condition") or "")
    body = computations.get(loop.callee("body") or "")
    compared = _comparison(computations, condition) if condition else None
    if body is None or compared is None:
        return None
    left, left_direction, right = compared
    # The counter may be on either side of the comparison. The other side is the limit: a constant,
    # or an element of the state that the body returns unchanged.
    for value, limit, direction in (
        (left, right, left_direction),
        (right, left, _MIRRORED[left_direction]),
    ):
        if value.state_index is None:
            continue
        stop = limit.offset
        if limit.state_index is not None:
            if not _is_kept(computations, body, limit.state_index):
                continue
            start_of_limit = _initial(computations, callers, loop, limit.state_index)
            if start_of_limit is None:
                continue
            stop += start_of_limit
        step = _step(computations, body, value.state_index)
        start = _initial(computations, callers, loop, value.state_index)
        if step is not None and start is not None:
            # The condition may compare the counter after an addition (`i + 1 < n`), so the offset
            # of the compared value shifts the start.
            return _count(start + value.offset, stop, step, direction)
    return None


def _count(start: int, stop: int, step: int, direction: str) -> int | None:
    """Counts the runs of `for (i = start; i <direction> stop; i += step)`; None if infinite."""
    if direction in ("LE", "GE"):
        stop += 1 if direction == "LE" else -1
    if direction == "NE":  # ends only if the counter hits `stop` exactly
        runs, rest = divmod(stop - start, step) if step else (0, 1)
        return runs if rest == 0 and runs >= 0 else None
    if direction == "EQ":  # XLA and JAX write no such loop
        return None
    up = direction in ("LT", "LE")
    if (start >= stop) if up else (start <= stop):
        return 0
    if (step <= 0) if up else (step >= 0):
        return None
    return -(-(stop - start) // step)  # rounded up; difference and step have the same sign


def _comparison(
    computations: Computations, condition: Computation
) -> tuple[_Value, str, _Value] | None:
    """Returns the comparison in a loop's condition: left side, direction, right side."""
    # The compare may be inside a fusion, whose parameters are the operands in the scope around it.
    root, scope = condition.root, _Scope(computations, condition)
    while root.opcode in ("copy", "bitcast", "fusion"):
        if root.opcode == "fusion":
            callee = computations[root.callee("calls") or ""]
            root, scope = callee.root, _Scope(computations, callee, root, scope)
        else:
            root = scope.instructions[root.operands[0]]
    if root.opcode != "compare" or (direction := root.attribute("direction")) is None:
        return None
    left, right = (scope.value(name) for name in root.operands)
    return None if left is None or right is None else (left, direction, right)


def _step(computations: Computations, body: Computation, index: int) -> int | None:
    """Returns the constant that one run of `body` adds to an element of its state, or None."""
    after = _Scope(computations, body).element(body.root, index)
    return after.offset if after is not None and after.state_index == index else None


def _is_kept(computations: Computations, body: Computation, index: int) -> bool:
    return _step(computations, body, index) == 0


def _initial(
    computations: Computations,
    callers: dict[str, list[Instruction]],
    loop: Instruction,
    index: int,
) -> int | None:
    """Returns the value of an element of the state when `loop` starts, or None."""
    computation = computations[loop.computation]
    (state,) = loop.operands
    value = _Scope(computations, computation).element(computation.instructions[state], index)
    if value is None or value.state_index is None:
        return None if value is None else value.offset
    # The loop is in the body of an outer loop, and the value comes from the outer state. It is
    # known only if the outer body does not change that element and nothing else calls the body. A
    # loop in a branch has no known caller, because `callers` leaves out conditionals. The recursion
    # ends, because computations do not call themselves.
    outer = callers.get(computation.name, [])
    if len(outer) != 1 or outer[0].opcode != "while":
        return None
    if not _is_kept(computations, computation, value.state_index):
        return None
    initial = _initial(computations, callers, outer[0], value.state_index)
    return None if initial is None else initial + value.offset


class _Scope:
    """Evaluates scalars of one computation in terms of the state, which is its only parameter.

    In a fusion, a parameter is the operand of the fusion in the scope `around` it.
    """

    def __init__(
        self,
        computations: Computations,
        computation: Computation,
        caller: Instruction | None = None,
        around: _Scope | None = None,
    ):
        self._computations = computations
        self._caller = caller
        self._around = around
        self.instructions = computation.instructions
        self.root = computation.root

    def value(self, name: str) -> _Value | None:
        """Returns the value of a scalar instruction, or None if it is not state plus constant."""
        instruction = self.instructions.get(name)
        if instruction is None:
            return None
        opcode = instruction.opcode
        if opcode == "constant":
            number = re.fullmatch(r"-?\d+", instruction.arguments.strip())
            return _Value(None, int(number[0])) if number else None
        if opcode == "get-tuple-element":
            return self.element(self.instructions[instruction.operands[0]], _index(instruction))
        if opcode == "parameter" and self._around is not None and self._caller is not None:
            return self._around.value(self._caller.operands[int(instruction.arguments)])
        if opcode in _SAME_VALUE and instruction.operands:
            return self.value(instruction.operands[0])
        if opcode == "fusion":
            inside = self._inside(instruction)
            return inside.value(inside.root.name)
        if opcode in ("add", "subtract"):
            return self._sum(instruction, -1 if opcode == "subtract" else 1)
        return None

    def element(self, instruction: Instruction, index: int) -> _Value | None:
        """Returns the value of one element of a tuple, or None; see `value`."""
        opcode = instruction.opcode
        if opcode == "parameter":
            if self._around is None or self._caller is None:
                return _Value(index, 0)
            operand = self._caller.operands[int(instruction.arguments)]
            return self._around.element(self._around.instructions[operand], index)
        if opcode == "tuple":
            return self.value(instruction.operands[index])
        if opcode in ("copy", "bitcast", "opt-barrier"):
            return self.element(self.instructions[instruction.operands[0]], index)
        if opcode == "fusion":
            inside = self._inside(instruction)
            return inside.element(inside.root, index)
        if opcode == "while":  # an earlier loop; an element that it keeps is what went in
            body = self._computations[instruction.callee("body") or ""]
            if _is_kept(self._computations, body, index):
                return self.element(self.instructions[instruction.operands[0]], index)
        return None

    def _inside(self, fusion: Instruction) -> _Scope:
        callee = self._computations[fusion.callee("calls") or ""]
        return _Scope(self._computations, callee, fusion, self)

    def _sum(self, instruction: Instruction, sign: int) -> _Value | None:
        left, right = (self.value(name) for name in instruction.operands)
        if left is None or right is None:
            return None
        # A sum of two elements, or a constant minus an element, has no such form.
        if left.state_index is not None and right.state_index is not None:
            return None
        if right.state_index is not None and sign < 0:
            return None
        state_index = right.state_index if left.state_index is None else left.state_index
        return _Value(state_index, left.offset + sign * right.offset)


def _index(instruction: Instruction) -> int:
    return int(instruction.attribute("index") or 0)
