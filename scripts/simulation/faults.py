"""Faults of a run: drawn from a seed, injected, and judged by what the processes then do.

Whatever happens, a run must end in one of two ways: all processes finish their work, or all end and
name the same process as the cause. It may not hang, and no process may end without a reason.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import re
from collections.abc import Callable

from simulation.process import Process
from simulation.simulation import Simulation
from simulation.training import Mesh, training

STEPS, STEP_S = 20, 1.0
MAX_SLOWNESS = 3000.0
"""The watch reads the verdict in slices of 1 s, so a round trip of a second would be too slow."""
END_S = 1500.0
"""Virtual seconds after the fault within which all processes must have ended."""


class Kind(enum.Enum):
    """Kind of fault of one process, or of its host."""

    CRASH = "is killed"
    POWER_OFF = "loses its host"
    STOP = "is stopped"
    BUSY = "runs no Python"
    SLOW_LINK = "has a slow network"
    SPLIT = "is split from all others"
    RESTART = "is killed and started again"
    DUPLICATE = "is started twice"
    CLOCK_JUMP = "has a clock that jumps"
    HANG = "hangs in its program"
    RAISE = "raises"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: Kind.
        process: Number of the process.
        at_s: Virtual time at which it happens.
        seconds: How long it lasts, or by how much the clock jumps.
        slowness: Factor of a slow network.
    """

    kind: Kind
    process: int
    at_s: float
    seconds: float
    slowness: float

    def __str__(self) -> str:
        return (
            f"process {self.process} {self.kind.value} at {self.at_s:.3f} s, {self.seconds:.3g} s"
        )


@dataclasses.dataclass
class Outcome:
    """Result of a run with a fault.

    Attributes:
        fault: The fault.
        cause: What all processes name as the cause; "" if all have finished their work.
        problems: What contradicts the rule; empty if all is well.
        fingerprint: Equal for two runs of one seed.
        known_s: Seconds from the fault until the last process has ended.
    """

    fault: Fault
    cause: str
    problems: list[str]
    fingerprint: tuple[float, int]
    known_s: float


def draw(generator: random.Random, count: int, kind: Kind | None = None) -> Fault:
    """Returns a random fault; most hit running steps, some the start."""
    starts = generator.random() < 0.25
    return Fault(
        kind or generator.choice(list(Kind)),
        # Process 0 has other duties than the rest, so it is hit more often.
        0 if generator.random() < 0.3 else generator.randrange(count),
        generator.uniform(0.0, 0.05) if starts else generator.uniform(0.05, STEPS * STEP_S),
        math.exp(generator.uniform(math.log(0.01), math.log(400))),
        math.exp(generator.uniform(math.log(2), math.log(MAX_SLOWNESS))),
    )


def run(
    seed: int, count: int | None = None, kind: Kind | None = None
) -> tuple[Outcome, list[Process]]:
    """Returns how a run with a fault ended, and its processes; all of it follows from the seed."""
    generator = random.Random(seed)
    count = count or generator.choice((2, 3, 4, 8, 16))
    fault = draw(generator, count, kind)
    simulation = Simulation(count, seed, collectives_fail=generator.random() < 0.5)
    mesh = Mesh(count)
    notice = None
    if generator.random() < 0.3:
        notice = generator.randrange(count), generator.uniform(0.0, STEPS * STEP_S)
    program = training(mesh, STEPS, STEP_S, meet=True, fault=_inner_fault(fault), notice=notice)
    simulation.scheduler.at(fault.at_s, lambda: _inject(simulation, fault, program))
    has_ended = simulation.run(program, fault.at_s + END_S)
    outcome = _judge(simulation, fault, has_ended)
    return outcome, [*simulation.processes, *simulation.former]


def _inner_fault(fault: Fault) -> Callable[[Process, int], None]:
    """Returns what the program itself does wrong."""

    def misbehave(process: Process, step: int) -> None:
        if process.index == fault.process and step * STEP_S >= fault.at_s:
            if fault.kind is Kind.RAISE:
                raise ValueError("a defect of the program")
            if fault.kind is Kind.HANG:
                process.wait()

    return misbehave


def _inject(simulation: Simulation, fault: Fault, program: Callable[[Process], None]) -> None:
    process, scheduler = simulation.processes[fault.process], simulation.scheduler
    if process.exit_code is not None:
        return
    match fault.kind:
        case Kind.CRASH:
            simulation.kill(process)
        case Kind.POWER_OFF:
            simulation.power_off(process)
        case Kind.STOP:
            simulation.stop(process)
            scheduler.after(fault.seconds, lambda: simulation.go_on_after_stop(process))
        case Kind.BUSY:
            process.freeze()
            scheduler.after(fault.seconds, process.thaw)
        case Kind.SLOW_LINK:
            simulation.network.slow_down(fault.process, fault.slowness)
            scheduler.after(fault.seconds, lambda: simulation.network.slow_down(fault.process, 1.0))
        case Kind.SPLIT:
            simulation.split([fault.process], fault.seconds)
        case Kind.RESTART:
            simulation.kill(process)
            scheduler.after(fault.seconds, lambda: simulation.start_again(process, program))
        case Kind.DUPLICATE:
            simulation.start_again(process, program)
        case Kind.CLOCK_JUMP:
            process.clock_offset_s += fault.seconds
        case Kind.HANG | Kind.RAISE:
            pass  # the program does it


# What a process prints, and the process that it names.
_CAUSES = (
    r"Two processes have the number (\d+)",
    r"Process (0) cannot listen",
    r"Some timed out task names: task:(\d+)",
    r"Process (\d+) ended without a message",
    r"Process (\d+) failed, so",
    r"Process (\d+) \(pid .*?\) has not reported",
    r"have waited \d+ s for process (\d+)",
    r"has waited \d+ s for process (\d+)",
    r"waited [\d.]+ s .*?, for process(?:es)? ([\d, -]+)\. All",
    r"but process(?:es)? ([\d, -]+) left",
    r"processes, process(?:es)? ([\d, -]+) did not connect",
    r"could not reach process (0) ",
    r"Cannot reach process (0),",
    r"(program at) .*? does not accept processes",
    r"(differ)",
)


def cause_of(process: Process) -> str:
    """Returns what a process names as the cause of its end: a number, or ""."""
    for line in process.printed:
        for pattern in _CAUSES:
            if found := re.search(pattern, line, re.DOTALL):
                return found[1]
    return ""


def _judge(simulation: Simulation, fault: Fault, has_ended: bool) -> Outcome:
    problems: list[str] = []
    everyone = [*simulation.processes, *simulation.former]
    for process in everyone:
        problems += [f"process {process.index}: {x}" for x in process.defects]
    if not has_ended:
        running = [x.index for x in simulation.processes if x.exit_code is None]
        problems.append(f"processes {running} have not ended")
    witnesses = [x for x in everyone if x.index != fault.process]
    if fault.kind in (Kind.DUPLICATE, Kind.RESTART):
        # The second process either takes part, or ends with a reason of its own.
        second = [x for x in everyone if x.index == fault.process and x.exit_code not in (0, None)]
        problems += [
            f"process {x.index} ended with {x.exit_code} and no reason"
            for x in second
            if x.exit_code > 0 and not cause_of(x)
        ]
    causes: dict[str, list[int]] = {}
    for process in witnesses:
        finished = process.exit_code == 0 and process.has_finished
        cause = "" if finished else cause_of(process) or f"unknown ({process.exit_code})"
        causes.setdefault(cause, []).append(process.index)
    if len(causes) > 1 or any(x not in ("", str(fault.process)) for x in causes):
        problems.append(f"causes: {causes}")
    steps = {x.progress for x in witnesses if x.has_finished}
    if len(steps) > 1:
        problems.append(f"processes stopped after different numbers of steps: {steps}")
    known_s = max(x.ended_s for x in everyone) - fault.at_s
    fingerprint = simulation.scheduler.now_s, simulation.scheduler.num_events
    return Outcome(fault, "; ".join(causes), problems, fingerprint, known_s)
