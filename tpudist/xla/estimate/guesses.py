"""Lists the parts of a step whose time is guessed, with their seconds.

These are instructions that no rule prices (`scheduled_cycles`), loops of unknown length, which
count once, and conditionals: one branch of each counts.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from tpudist.xla.estimate.timeline import Event, Timeline, compute_seconds
from tpudist.xla.hlo.hlo_module import Module
from tpudist.xla.hlo.instructions import Instruction


@dataclasses.dataclass(frozen=True)
class Guess:
    """A part of a step whose time is guessed.

    Attributes:
        what: The part, such as "sort".
        seconds: Seconds per step that the estimate of the step counts for it; for a conditional,
            seconds by which its slowest branch is slower than its fastest.
        source: The user's line "file:line"; None if it is unknown.
        branches: Seconds per run of the branches of a conditional; empty for other parts.
        counted: Number of the branch that counts; None in plans of older versions, which count the
            slowest.
    """

    what: str
    seconds: float
    source: str | None
    branches: tuple[float, ...] = ()
    counted: int | None = None


def list_guesses(module: Module, simulated: Timeline) -> tuple[Guess, ...]:
    """Returns the guessed parts of a step, longest first; parts of one line are one guess."""
    sums: dict[tuple[str, str | None], Guess] = {}
    for guess in _guesses(module, simulated):
        key = guess.what, guess.source
        before = sums[key].seconds if key in sums else 0.0
        sums[key] = dataclasses.replace(guess, seconds=before + guess.seconds)
    return tuple(sorted(sums.values(), key=lambda guess: -guess.seconds))


def sum_seconds(module: Module, simulated: Timeline) -> float:
    """Returns the seconds per step of guessed instructions and of loops of unknown length."""
    guessed = {id(event): event for event in simulated.events if event.price and event.price.guess}
    for loop in module.unknown_loops:
        body = _computations_of(module, loop)
        guessed |= {id(event): event for event in _events_in(body, simulated.events)}
    return _sum(guessed.values())


def _guesses(module: Module, simulated: Timeline) -> Iterator[Guess]:
    for event in simulated.events:
        if event.price and event.price.guess:
            origin = module.origin(event.instruction)
            yield Guess(event.price.guess, _sum([event]), origin.source)
    loops = module.unknown_loops
    bodies = [_computations_of(module, loop) for loop in loops]
    for loop, body in zip(loops, bodies, strict=True):
        if any(loop.computation in other for other in bodies):
            continue  # one iteration of the outer loop contains it
        seconds = _sum(_events_in(body, simulated.events))
        yield Guess("one iteration of a loop of unknown length", seconds, _source(module, loop))
    for conditional in simulated.conditionals:
        seconds, source = conditional.seconds, _source(module, conditional.instruction)
        spread = conditional.count * (max(seconds) - min(seconds))
        yield Guess("conditional", spread, source, seconds, conditional.counted)


def _source(module: Module, instruction: Instruction) -> str | None:
    return instruction.source or module.origin(instruction).source


def _computations_of(module: Module, loop: Instruction) -> set[str]:
    """Returns the names of the computations in the body of a loop, at any depth."""
    inside, waiting = set(), [loop.callee("body") or ""]
    while waiting:
        name = waiting.pop()
        if name in inside or name not in module.computations:
            continue
        inside.add(name)
        for instruction in module.computations[name].instructions.values():
            waiting += [callee for _, callee in instruction.called]
    return inside


def _events_in(computations: set[str], events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.instruction.computation in computations]


def _sum(events: Iterable[Event]) -> float:
    """Returns the seconds per step of events, with the waits for their transfers."""
    return sum(event.count * (compute_seconds(event) + event.exposed_s) for event in events)
