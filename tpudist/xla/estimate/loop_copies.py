"""Finds large values that a loop copies although it only updates a small part of them.

A cache that a `scan` takes as input and returns as output is such a value: each iteration copies
its part out of the input, writes one position, and copies the part into the output. A value in the
carry of the loop is updated in place.
"""

import dataclasses

from tpudist.xla.estimate.timeline import Timeline, compute_seconds
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
    """Copies of a value that a loop only updates.

    Attributes:
        source: The user's line "file:line" of the update; None if it is unknown.
        num_bytes: Bytes of all copies per step.
        seconds: Seconds of all copies per step.
    """

    source: str | None
    num_bytes: float
    seconds: float


def find(module: Module, simulated: Timeline) -> list[LoopCopy]:
    """Returns the copies per step of values that loops only update, the longest first."""
    counts: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for event in simulated.events:
        name = event.instruction.name
        counts[name] = event.count
        seconds[name] = event.count * (compute_seconds(event) + event.exposed_s)
    found = []
    for loop in module.loops.values():
        body = module.computations[loop.callee("body") or ""]
        for update in body.instructions.values():
            if (value := _value_of_update(module, update)) is None:
                continue
            copies = _copies_around(module, body, update, value)
            if copies:
                size = value.arrays[0].num_bytes
                num_bytes = sum(counts.get(copy.name, 0.0) * size for copy in copies)
                total_s = sum(seconds.get(copy.name, 0.0) for copy in copies)
                found.append(LoopCopy(module.origin(update).source, num_bytes, total_s))
    return sorted(found, key=lambda copy: -copy.seconds)


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


def _copies_around(
    module: Module, body: Computation, update: Instruction, value: Instruction
) -> list[Instruction]:
    """Returns the instructions that only move the value before or after its update."""
    size = value.arrays[0].num_elements
    copies, before = [], value
    while before.opcode in _NAMES or _moves(module, before, size):
        if before.opcode not in _NAMES:
            copies.append(before)
        if not before.operands:
            break
        before = body.instructions[before.operands[0]]
    waiting = [update]
    while waiting:
        for user in body.users.get(waiting.pop().name, ()):
            if user.opcode in _NAMES or _moves(module, user, size):
                waiting.append(user)
                copies += [user] * (user.opcode not in _NAMES and user not in copies)
    return copies


def _moves(module: Module, instruction: Instruction, size: int) -> bool:
    """Returns whether an instruction only moves an array of `size` elements."""
    if instruction.opcode in ("copy", "copy-start", "dynamic-slice"):
        return bool(instruction.arrays) and instruction.arrays[0].num_elements == size
    contents = _contents(module, instruction)
    if contents is None:
        if instruction.opcode != "dynamic-update-slice":
            return False
        return module.operands_of(instruction)[1].arrays[0].num_elements == size
    inside = contents.instructions.values()
    if not all(x.opcode in _MOVES for x in inside):
        return False
    moved = [contents.root.arrays[0].num_elements] if contents.root.arrays else []
    for update in inside:
        if update.opcode == "dynamic-update-slice":
            moved = [contents.instructions[update.operands[1]].arrays[0].num_elements]
    return size in moved


def _contents(module: Module, instruction: Instruction) -> Computation | None:
    return module.contents_of(instruction) if instruction.opcode == "fusion" else None
