"""Finds large values that a loop copies although it only updates a small part of them.

A cache that a `scan` takes as input and returns as output is such a value: each iteration copies
its part out of the input, writes one position, and copies the part into the output. A value in the
carry of the loop is updated in place. But if each update is a row of a tile, the compiler keeps the
value in another layout inside the loop, and copies it before and after the loop, and to read it.
"""

import dataclasses
from collections.abc import Sequence

from tpudist.xla.estimate.timeline import Timeline, compute_seconds
from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Computation, Instruction

_MAX_SHARE = 0.25  # of a value, that an update writes
_NAMES = ("bitcast", "reshape", "copy-done")
_MOVES = frozenset(
    "parameter constant bitcast reshape copy transpose dynamic-slice dynamic-update-slice slice"
    " tuple compare add select broadcast convert".split()
)


@dataclasses.dataclass(frozen=True)
class LoopCopy:
    """Copies of values that a loop only updates.

    Attributes:
        source: The user's line "file:line" of the update; None if it is unknown.
        names: The user's names of the arguments that are the values; empty if they are unknown.
        is_carried: Whether the loop carries complete values, or else takes and returns parts.
        num_bytes: Bytes of all copies per step.
        seconds: Seconds of all copies per step.
    """

    source: str | None
    names: tuple[str, ...]
    is_carried: bool
    num_bytes: float
    seconds: float


def find(module: Module, simulated: Timeline, names: Sequence[str] = ()) -> list[LoopCopy]:
    """Returns the copies per step of values that loops only update, one entry per source line.

    The longest is first. `names` has the user's name of each parameter of the program.
    """
    events = {event.instruction.name: event for event in simulated.events}
    values = [
        _Value(module, loop, body, update, value)
        for loop in module.loops.values()
        for body in [module.computations[loop.callee("body") or ""]]
        for update in body.instructions.values()
        if (value := _value_of_update(module, update)) is not None
    ]
    # An output of a scan is updated, too: by the copy of a part that was updated before.
    copies_of_parts = {copy.name for value in values for copy in value.copies}
    found: dict[tuple[str | None, bool], LoopCopy] = {}
    for value in values:
        if value.update.name in copies_of_parts:
            continue
        num_bytes = seconds = 0.0
        for copy in value.copies:
            if (event := events.get(copy.name)) and (moved := _array_of_move(module, copy)):
                num_bytes += event.count * moved.num_bytes
                seconds += event.count * (compute_seconds(event) + event.exposed_s)
        number = value.parameter
        own = (names[number],) if number is not None and number < len(names) else ()
        source = module.origin(value.update).source
        old = found.get((source, value.is_carried), LoopCopy(source, (), value.is_carried, 0, 0))
        found[source, value.is_carried] = dataclasses.replace(
            old,
            names=tuple(sorted({*old.names, *own})),
            num_bytes=old.num_bytes + num_bytes,
            seconds=old.seconds + seconds,
        )
    return sorted((x for x in found.values() if x.num_bytes), key=lambda copy: -copy.seconds)


def _value_of_update(module: Module, instruction: Instruction) -> Instruction | None:
    """Returns the value if an instruction updates a small part of one, or None."""
    contents, updates = _contents(module, instruction), instruction
    if contents is not None:
        updates = contents.root
        while updates.opcode in _NAMES:
            updates = contents.instructions[updates.operands[0]]
    if updates.opcode != "dynamic-update-slice":
        return None
    siblings = module.computations[updates.computation].instructions
    value, part = (siblings[name] for name in updates.operands[:2])
    is_small = part.arrays[0].num_elements <= _MAX_SHARE * value.arrays[0].num_elements
    if not is_small or contents is None:
        return value if is_small else None
    while value.opcode in _NAMES:
        value = contents.instructions[value.operands[0]]
    if value.opcode != "parameter":
        return None
    return module.operands_of(instruction)[int(value.arguments)]


class _Value:
    """A value that a loop updates, and its way from the arguments of the program to its results.

    Attributes:
        update: The update.
        copies: Instructions that only move the value, or the part of it that is updated.
        is_carried: Whether the loop carries the value, or else takes and returns parts.
        parameter: Number of the parameter of the program; None if the value is not an argument.
    """

    def __init__(
        self,
        module: Module,
        loop: Instruction,
        body: Computation,
        update: Instruction,
        value: Instruction,
    ):
        self._module, self.update = module, update
        size = value.arrays[0].num_elements
        first, self.copies = self._walk_back(value, size)
        self.is_carried = bool(first.arrays) and first.arrays[0].num_elements == size
        ends, copies = self._walk_forward(update, size, reads=self.is_carried)
        self.copies += copies
        self.parameter = None
        index = _index(first)
        before = None if index is None else _element(module, loop, index)
        if index is None or before is None:
            return
        size = before.arrays[0].num_elements  # of the complete value
        before, copies = self._walk_back(before, size)
        self.parameter = self._find_parameter(before)
        if self.parameter is None:  # such as the gradients of all layers, which a scan stacks
            return
        self.copies += copies
        places = {index} | {str(i) for i, name in enumerate(body.root.operands) if name in ends}
        for user in module.computations[loop.computation].users.get(loop.name, ()):
            if _index(user) in places:
                self.copies += self._walk_forward(user, size)[1]

    def _walk_back(
        self, instruction: Instruction, size: int
    ) -> tuple[Instruction, list[Instruction]]:
        """Returns the first instruction with this value, and copies of `size` elements."""
        siblings = self._module.computations[instruction.computation].instructions
        copies = []
        while instruction.operands:
            moved = _array_of_move(self._module, instruction)
            if moved is not None and moved.num_elements == size:
                copies.append(instruction)
            elif instruction.opcode not in _NAMES:
                break
            instruction = siblings[instruction.operands[0]]
        return instruction, copies

    def _walk_forward(
        self, instruction: Instruction, size: int, reads: bool = False
    ) -> tuple[set[str], list[Instruction]]:
        """Returns the names of the instructions with this value, and copies of it.

        With `reads`, copies of parts in HBM count too.
        """
        waiting, seen, copies = [instruction], {instruction.name}, []
        while waiting:
            current = waiting.pop()
            users = self._module.computations[current.computation].users.get(current.name, ())
            for user in users:
                moved = _array_of_move(self._module, user)
                is_whole = moved is not None and moved.num_elements == size
                is_read = reads and moved is not None and moved.memory_space == shapes.HBM
                if (is_whole or is_read) and user not in copies:
                    copies.append(user)
                if (is_whole or user.opcode in _NAMES) and user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user)
        return seen, copies

    def _find_parameter(self, instruction: Instruction) -> int | None:
        """Returns the number of the parameter that has this value, through outer loops."""
        loops = {loop.callee("body"): loop for loop in self._module.loops.values()}
        while (index := _index(instruction)) is not None and instruction.computation in loops:
            before = _element(self._module, loops[instruction.computation], index)
            if before is None:
                return None
            while before.opcode in _NAMES or before.opcode == "copy":
                (before,) = self._module.operands_of(before)[:1]
            instruction = before
        is_argument = instruction.computation == self._module.entry.name
        is_parameter = instruction.opcode == "parameter"
        return int(instruction.arguments) if is_argument and is_parameter else None


def _index(instruction: Instruction) -> str | None:
    is_element = instruction.opcode == "get-tuple-element"
    return instruction.attribute("index") if is_element else None


def _element(module: Module, loop: Instruction, index: str) -> Instruction | None:
    """Returns an element of the first state of a loop; None if that is not a tuple."""
    (state,) = module.operands_of(loop)
    return module.operands_of(state)[int(index)] if state.opcode == "tuple" else None


def _array_of_move(module: Module, instruction: Instruction) -> shapes.Array | None:
    """Returns the array that an instruction moves; None if it computes, or only names a value."""
    if instruction.opcode in ("copy", "copy-start", "dynamic-slice"):
        return instruction.arrays[0] if instruction.arrays else None
    if instruction.opcode == "dynamic-update-slice":
        return module.operands_of(instruction)[1].arrays[0]
    contents = _contents(module, instruction)
    if contents is None or any(x.opcode not in _MOVES for x in contents.instructions.values()):
        return None
    for update in contents.instructions.values():
        if update.opcode == "dynamic-update-slice":
            return contents.instructions[update.operands[1]].arrays[0]
    return contents.root.arrays[0] if contents.root.arrays else None


def _contents(module: Module, instruction: Instruction) -> Computation | None:
    return module.contents_of(instruction) if instruction.opcode == "fusion" else None
