"""Faults of a run: drawn from a seed, and injected.

Whatever happens, a run must end in one of two ways: all processes finish their work, or all end and
name the same process as the cause. It may not hang, and no process may end without a reason. A
fault that harms nobody must not end a run. `outcomes` judges that.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import signal
from collections.abc import Callable, Sequence

from simulation.process import Process
from simulation.simulation import Simulation

STEPS, STEP_S = 20, 1.0
MAX_SLOWNESS = 10_000.0
"""A round trip of 2 to 3 s; hosts whose round trip is `DEAD_PEER_S` count as lost."""
LONGEST_S = 400.0


class Kind(enum.Enum):
    """Kind of fault of one process, or of its host."""

    CRASH = "is killed"
    POWER_OFF = "loses its host"
    STOP = "is stopped"
    BUSY = "runs no Python"
    SLOW_LINK = "has a slow network"
    SPLIT = "is split from all other hosts"
    RESTART = "is killed and started again"
    DUPLICATE = "is started twice"
    CLOCK_JUMP = "has a clock that jumps"
    HANG = "hangs in its program"
    RAISE = "raises"
    TERMINATE = "receives SIGTERM"

    @property
    def is_of_host(self) -> bool:
        """Whether it hits all processes of a host."""
        return self in (Kind.POWER_OFF, Kind.SLOW_LINK, Kind.SPLIT)


KINDS = tuple(x for x in Kind if x is not Kind.TERMINATE)
"""Kinds for runs without a supervisor, whose programs receive requests to end by a notice."""
_HARMLESS_S = {
    Kind.STOP: 15.0,  # the watch ends a run after 20 s if it knows that a process is stopped
    Kind.BUSY: 80.0,  # after 90 s if it knows nothing
    Kind.SPLIT: 10.0,  # connections end after 15 s
    Kind.SLOW_LINK: math.inf,
    Kind.CLOCK_JUMP: math.inf,
}
"""Seconds for which a fault of a kind must not end a run."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: Kind.
        process: Number of the process.
        at_s: Virtual time at which it happens.
        seconds: Duration, or jump of the clock.
        slowness: Factor of a slow network.
    """

    kind: Kind
    process: int
    at_s: float
    seconds: float
    slowness: float

    @property
    def is_harmless(self) -> bool:
        """Whether all processes must continue."""
        return self.seconds < _HARMLESS_S.get(self.kind, 0.0)

    def __str__(self) -> str:
        return (
            f"process {self.process} {self.kind.value} at {self.at_s:.3f} s, {self.seconds:.3g} s"
        )


def draw(
    generator: random.Random, count: int, kinds: Sequence[Kind] = KINDS, start: float = 0.25
) -> Fault:
    """Returns a random fault; with the probability `start`, it hits the start of the run."""
    starts = generator.random() < start
    return Fault(
        generator.choice(kinds),
        # Process 0 has other duties than the rest, so it is hit more often.
        0 if generator.random() < 0.3 else generator.randrange(count),
        generator.uniform(0.0, 0.05) if starts else generator.uniform(0.05, STEPS * STEP_S),
        math.exp(generator.uniform(math.log(0.01), math.log(LONGEST_S))),
        math.exp(generator.uniform(math.log(2), math.log(MAX_SLOWNESS))),
    )


def misbehavior(faults: Sequence[Fault]) -> Callable[[Process, int], None]:
    """Returns what the program itself does wrong, in each process before each step."""
    inner = [x for x in faults if x.kind in (Kind.RAISE, Kind.HANG)]

    def misbehave(process: Process, step: int) -> None:
        for fault in inner:
            if process.index == fault.process and process.simulation.scheduler.now_s >= fault.at_s:
                if fault.kind is Kind.RAISE:
                    raise ValueError("a defect of the program")
                process.wait()

    return misbehave


def inject(
    simulation: Simulation,
    faults: Sequence[Fault],
    find: Callable[[Fault], Process | None],
    program: Callable[[Process], None] = lambda process: None,
) -> None:
    """Injects faults at their times.

    Args:
        simulation: The run.
        faults: The faults.
        find: Returns the process that a fault hits at its time, if there is one.
        program: Program of processes that a fault starts.
    """

    def strike(fault: Fault) -> None:
        process = find(fault)
        if process is not None and process.exit_code is None:
            _strike(simulation, fault, process, program)

    for fault in faults:
        simulation.scheduler.at(fault.at_s, lambda fault=fault: strike(fault))


def _strike(
    simulation: Simulation, fault: Fault, process: Process, program: Callable[[Process], None]
) -> None:
    scheduler = simulation.scheduler
    match fault.kind:
        case Kind.CRASH:
            simulation.kill(process)
        case Kind.POWER_OFF:
            simulation.power_off(process.place)
        case Kind.STOP:
            simulation.stop(process)
            scheduler.after(fault.seconds, lambda: simulation.go_on_after_stop(process))
        case Kind.BUSY:
            process.freeze()
            scheduler.after(fault.seconds, process.thaw)
        case Kind.SLOW_LINK:
            simulation.network.slow_down(process.place, fault.slowness)
            scheduler.after(fault.seconds, lambda: simulation.network.slow_down(process.place, 1.0))
        case Kind.SPLIT:
            simulation.split([process.place], fault.seconds)
        case Kind.RESTART:
            simulation.kill(process)
            scheduler.after(fault.seconds, lambda: simulation.start_again(process, program))
        case Kind.DUPLICATE:
            simulation.start_again(process, program)
        case Kind.CLOCK_JUMP:
            process.clock_offset_s += fault.seconds
        case Kind.TERMINATE:
            process.send_signal(signal.SIGTERM)
        case Kind.HANG | Kind.RAISE:
            pass  # the program does it
