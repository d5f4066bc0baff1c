"""Outcomes of runs under supervisors with faults: whether the remaining processes continued."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from simulation.faults import STEP_S, STEPS, Fault, Kind, draw, inject, misbehavior
from simulation.launching import LaunchedRun, surviving_training
from simulation.outcomes import END_S, Outcome
from simulation.process import Process

KINDS = (
    Kind.CRASH,
    Kind.POWER_OFF,
    Kind.STOP,
    Kind.BUSY,
    Kind.SLOW_LINK,
    Kind.SPLIT,
    Kind.CLOCK_JUMP,
    Kind.HANG,
    Kind.RAISE,
    Kind.TERMINATE,
)
RESULT = sum(range(STEPS))
_STOPPED_S = 2.5
"""Seconds for which a process may be stopped; after 3 s, its supervisor kills it."""
_ENDS_RUN = (
    r"(process \d+) raised",
    r"Cannot reach the supervisor on (\S+),",
    r"(process \d+) .*: giving up",
    r"(giving up)",
)


def run(
    seed: int, num_hosts: int | None = None, kind: Kind | None = None, num_faults: int | None = None
) -> tuple[Outcome, list[Process]]:
    """Returns how a run ended, and its supervisors and processes; see `outcomes.run`."""
    generator = random.Random(seed)
    num_hosts = num_hosts or generator.choice((1, 2, 3, 4, 8))
    per_host = generator.choice((1, 2))
    if num_faults is None:
        num_faults = generator.choices((0, 1, 2, 3), (1, 5, 3, 2))[0]
    kinds = KINDS if kind is None else (kind,)
    if num_hosts * per_host == 1:  # nobody would wait for a process that hangs
        kinds = [x for x in kinds if x is not Kind.HANG]
    drawn = [draw(generator, num_hosts * per_host, kinds, 0.1) for _ in range(num_faults)]
    launched = LaunchedRun(
        num_hosts,
        per_host,
        surviving_training(STEPS, STEP_S, misbehavior(drawn)),
        seed,
        spares=generator.choice((0, 0, 1)),
        restarts=generator.choice((0, 0, 2)),
        collectives_fail=generator.random() < 0.5,
    )
    return run_with(launched, drawn)


def run_with(
    launched: LaunchedRun, drawn: Sequence[Fault], result: int = RESULT
) -> tuple[Outcome, list[Process]]:
    """Returns how a run with certain faults ended; `result` is what each process must return."""
    simulation = launched.simulation

    def find(fault: Fault) -> Process | None:
        return next((x for x in launched.workers if x.index == fault.process), None)

    inject(simulation, drawn, find)
    launched.start()
    has_ended = simulation.go_on(max((x.at_s for x in drawn), default=0.0) + END_S)
    outcome = _judge(launched, drawn, has_ended, result)
    return outcome, [*launched.supervisors, *launched.workers]


def _judge(launched: LaunchedRun, drawn: Sequence[Fault], has_ended: bool, result: int) -> Outcome:
    everyone = [*launched.supervisors, *launched.workers]
    problems = [f"process {x.index}: {text}" for x in everyone for text in x.defects]
    hung = {x.process for x in drawn if x.kind is Kind.HANG}
    running = {x.index for x in launched.workers if x.exit_code is None}
    if not has_ended and not running <= hung:  # nobody waits if all processes that are left hang
        problems.append(f"not ended: {[x.index for x in everyone if x.exit_code is None]}")
    for process in launched.workers:
        if process.has_finished and process.result != result:
            problems.append(f"process {process.index} has the result {process.result}")
    per_host = launched.per_host
    hit, hit_places = set[int](), set[int]()
    for fault in drawn:
        place = fault.process // per_host
        if fault.is_harmless and (fault.kind is not Kind.STOP or fault.seconds < _STOPPED_S):
            continue
        if fault.kind.is_of_host:
            hit_places.add(place)
        else:
            hit.add(fault.process)
    witnesses = [x for x in launched.workers if x.index not in hit and x.place not in hit_places]
    must_continue = 0 not in hit_places and not any(x.kind is Kind.RAISE for x in drawn)
    ends: dict[str, list[int]] = {}
    for process in witnesses:
        if process.exit_code == 0 and not process.has_finished:
            continue  # a spare that was not needed
        if process.exit_code == 0:
            end = ""
        else:
            lines = "\n".join(launched.supervisors[process.place].printed)
            named = [found[1] for x in _ENDS_RUN if (found := re.search(x, lines))]
            end = named[0] if named else f"unknown ({process.exit_code})"
        ends.setdefault(end, []).append(process.index)
    if any(end.startswith("unknown") or (end and must_continue) for end in ends) or len(ends) > 1:
        problems.append(f"ends: {ends}")
    if witnesses and must_continue and not any(x.has_finished for x in witnesses):
        problems.append("no process has finished")
    cause = "; ".join(x for x in ends if x)
    return Outcome.of(launched.simulation, drawn, cause, problems, everyone)
