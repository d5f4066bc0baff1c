"""Reads from a compiled program how often its loops run.

A loop `while(state)` runs its body as long as its condition holds. In what JAX makes of `scan` and
`fori_loop`, and in the loops that XLA adds by itself, the condition compares an element of the
state with a limit, and the body adds a constant to that element. Where XLA says how often (on CPU,
as `known_trip_count`), its word is taken; where the limit is only known at run time, nobody knows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tpudist.xla.hlo.instructions import Computation, Instruction

Computations = Mapping[str, Computation]  # of a program, by name

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-done", "copy-start")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclasses.dataclass(frozen=True)
class _Value:
    """`offset`, plus element `element` of the computation's state unless that is None."""

    element: int | None
    offset: int


def count_trips(computations: Computations) -> dict[str, int | None]:
    """How often each `while` of a program runs its body, by its name; None where nobody knows."""
    found: dict[str, int | None] = {}
    callers = _callers(computations)
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                found[instruction.name] = _trip_count(computations, callers, instruction)
    return found


def _callers(computations: Computations) -> dict[str, list[Instruction]]:
    """By name of a computation, the loops and calls that run it."""
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
    left, direction, right = compared
    # The counter may stand on either side. The other one is the limit: a constant, or an element of
    # the state that the body hands on as it is.
    for value, limit, way in ((left, right, direction), (right, left, _MIRRORED[direction])):
        if value.element is None:
            continue
        stop = limit.offset
        if limit.element is not None:
            if not _is_kept(computations, body, limit.element):
                continue
            start_of_limit = _initial(computations, callers, loop, limit.element)
            if start_of_limit is None:
                continue
            stop += start_of_limit
        step = _step(computations, body, value.element)
        start = _initial(computations, callers, loop, value.element)
        if step is not None and start is not None:
            return _count(start + value.offset, stop, step, way)
    return None


def _count(start: int, stop: int, step: int, direction: str) -> int | None:
    """How often `for (i = start; i <direction> stop; i += step)` runs; None if for ever."""
    if direction in ("LE", "GE"):
        stop += 1 if direction == "LE" else -1
    if direction == "NE":
        runs, rest = divmod(stop - start, step) if step else (0, 1)
        return runs if rest == 0 and runs >= 0 else None
    if direction == "EQ":
        return None
    up = direction in ("LT", "LE")
    if (start >= stop) if up else (start <= stop):
        return 0
    if (step <= 0) if up else (step >= 0):
        return None
    return -(-(stop - start) // step)  # rounded up, also downwards: both have the same sign


def _comparison(
    computations: Computations, condition: Computation
) -> tuple[_Value, str, _Value] | None:
    """What a loop's condition compares, and how, seen through a fusion."""
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


def _step(computations: Computations, body: Computation, element: int) -> int | None:
    """What one run of `body` adds to an element of its state."""
    after = _Scope(computations, body).element(body.root, element)
    return after.offset if after is not None and after.element == element else None


def _is_kept(computations: Computations, body: Computation, element: int) -> bool:
    return _step(computations, body, element) == 0


def _initial(
    computations: Computations,
    callers: dict[str, list[Instruction]],
    loop: Instruction,
    element: int,
) -> int | None:
    """The value of an element of the state when `loop` starts."""
    computation = computations[loop.computation]
    (state,) = loop.operands
    found = _Scope(computations, computation).element(computation.instructions[state], element)
    if found is None or found.element is None:
        return None if found is None else found.offset
    # It comes from outside: from the state of the loop around, if that keeps it as it was.
    outside = callers.get(computation.name, [])
    if len(outside) != 1 or outside[0].opcode != "while":
        return None
    if not _is_kept(computations, computation, found.element):
        return None
    before = _initial(computations, callers, outside[0], found.element)
    return None if before is None else before + found.offset


class _Scope:
    """Works out scalars of one computation, in terms of the state that is its only parameter.

    Inside a fusion, the parameters stand for the operands of the fusion in the scope around it.
    """

    def __init__(
        self,
        computations: Computations,
        computation: Computation,
        caller: Instruction | None = None,
        around: _Scope | None = None,
    ):
        self._computations = computations
        self._computation = computation
        self._caller = caller
        self._around = around
        self.instructions = computation.instructions

    def value(self, name: str) -> _Value | None:
        """The value of a scalar instruction, or None."""
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
            return inside.value(inside._computation.root.name)
        if opcode in ("add", "subtract"):
            return self._sum(instruction, -1 if opcode == "subtract" else 1)
        return None

    def element(self, instruction: Instruction, index: int) -> _Value | None:
        """The value of one element of the result of an instruction that returns a tuple."""
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
            return inside.element(inside._computation.root, index)
        if opcode == "while":
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
        # Two elements, or a constant minus one, are no element plus a constant.
        if left.element is not None and right.element is not None:
            return None
        if right.element is not None and sign < 0:
            return None
        element = right.element if left.element is None else left.element
        return _Value(element, left.offset + sign * right.offset)


def _index(instruction: Instruction) -> int:
    return int(instruction.attribute("index") or 0)
