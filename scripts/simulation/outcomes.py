"""Outcomes of runs with faults: whether all processes continued, or ended for the same cause."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from simulation.faults import KINDS, STEP_S, STEPS, Fault, Kind, draw, inject, misbehavior
from simulation.process import Process
from simulation.simulation import Simulation
from simulation.training import make_mesh, training

END_S = 1500.0
"""Virtual seconds after the last fault within which all processes must have ended."""


@dataclasses.dataclass
class Outcome:
    """Result of a run.

    Attributes:
        faults: The faults.
        cause: Cause that all processes name; "" if all have finished their work.
        problems: Contradictions to the rule; empty if all is well.
        fingerprint: Equal for two runs of one seed.
        known_s: Seconds from the first fault until the last process has ended.
    """

    faults: Sequence[Fault]
    cause: str
    problems: list[str]
    fingerprint: tuple[float, int]
    known_s: float

    @classmethod
    def of(
        cls,
        simulation: Simulation,
        drawn: Sequence[Fault],
        cause: str,
        problems: list[str],
        processes: Sequence[Process],
    ) -> Outcome:
        """Returns the outcome of a run that has ended, with the end of these processes."""
        fingerprint = simulation.scheduler.now_s, simulation.scheduler.num_events
        first_s = min((x.at_s for x in drawn), default=0.0)
        known_s = max(x.ended_s for x in processes) - first_s
        return cls(drawn, cause, problems, fingerprint, known_s)


def run(
    seed: int, count: int | None = None, kind: Kind | None = None, num_faults: int | None = None
) -> tuple[Outcome, list[Process]]:
    """Returns how a run with faults ended, and its processes; all of it follows from the seed.

    Args:
        seed: The seed.
        count: Number of processes; by default one of 2 to 16.
        kind: Kind of all faults; by default each has one of its own.
        num_faults: Number of faults; by default 0 to 3, mostly 1.
    """
    generator = random.Random(seed)
    count = count or generator.choice((2, 3, 4, 8, 16))
    per_host = generator.choice((1, 1, 2, 4))
    if num_faults is None:
        num_faults = generator.choices((0, 1, 2, 3), (1, 6, 2, 1))[0]
    kinds = KINDS if kind is None else (kind,)
    drawn = [draw(generator, count, kinds) for _ in range(num_faults)]
    collectives_fail, notice = generator.random() < 0.5, None
    if generator.random() < 0.3:
        notice = generator.randrange(count), generator.uniform(0.0, STEPS * STEP_S)
    simulation = Simulation(count, seed, per_host=per_host, collectives_fail=collectives_fail)
    return run_with(simulation, drawn, notice)


def run_with(
    simulation: Simulation, drawn: Sequence[Fault], notice: tuple[int, float] | None = None
) -> tuple[Outcome, list[Process]]:
    """Returns how a run with certain faults ended, and its processes; see `training`."""
    mesh, misbehave = make_mesh(simulation.count), misbehavior(drawn)
    program = training(mesh, STEPS, STEP_S, meet=True, fault=misbehave, notice=notice)
    inject(simulation, drawn, lambda x: simulation.processes[x.process], program)
    has_ended = simulation.run(program, max((x.at_s for x in drawn), default=0.0) + END_S)
    outcome = _judge(simulation, drawn, has_ended)
    return outcome, [*simulation.processes, *simulation.former]


# What a process prints, and the process that it names.
_CAUSES = (
    r"Two processes have the number (\d+)",
    r"Process (0) cannot listen",
    r"Some timed out task names: task:(\d+)",
    r"coordination service, in process (0) at",
    r"JAX: lost the service, in process (0)",  # which aborts others before a watch has started
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


def _hit_by(simulation: Simulation, fault: Fault) -> set[int]:
    """Returns the numbers of the processes that a fault hits."""
    if not fault.kind.is_of_host:
        return {fault.process}
    place = simulation.processes[fault.process].place
    return {x.index for x in simulation.processes if x.place == place}


def _judge(simulation: Simulation, drawn: Sequence[Fault], has_ended: bool) -> Outcome:
    problems: list[str] = []
    everyone = [*simulation.processes, *simulation.former]
    for process in everyone:
        problems += [f"process {process.index}: {x}" for x in process.defects]
    if not has_ended:
        running = [x.index for x in simulation.processes if x.exit_code is None]
        problems.append(f"processes {running} have not ended")
    harmful = [x for x in drawn if not x.is_harmless]
    hit = {i for fault in harmful for i in _hit_by(simulation, fault)}
    disturbed = {i for fault in drawn for i in _hit_by(simulation, fault)} - hit
    problems += _find_unexplained(harmful, everyone)
    witnesses = [x for x in everyone if x.index not in hit]
    causes: dict[str, list[int]] = {}
    for process in witnesses:
        finished = process.exit_code == 0 and process.has_finished
        cause = "" if finished else cause_of(process) or f"unknown ({process.exit_code})"
        # A process that runs no Python, or is unreachable, cannot report why the others end.
        if not hit or process.index not in disturbed:
            causes.setdefault(cause, []).append(process.index)
    if len(causes) > 1 or any(x not in ("", *map(str, hit)) for x in causes):
        problems.append(f"causes: {causes}")
    steps = {x.progress for x in witnesses if x.has_finished}
    if len(steps) > 1:
        problems.append(f"processes stopped after different numbers of steps: {steps}")
    return Outcome.of(simulation, drawn, "; ".join(causes), problems, everyone)


def _find_unexplained(harmful: Sequence[Fault], everyone: Sequence[Process]) -> list[str]:
    """Returns which second processes with a number neither took part, nor ended with a reason."""
    twice = {x.process for x in harmful if x.kind in (Kind.DUPLICATE, Kind.RESTART)}
    twice -= {x.process for x in harmful if x.kind is Kind.RAISE}  # its own reason
    return [
        f"process {x.index} ended with {x.exit_code} and no reason"
        for x in everyone
        if x.index in twice and (x.exit_code or 0) > 0 and not cause_of(x)
    ]
