"""Diagnoses a run: where its time went, which process made others wait, and the largest causes."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from tpudist.goodput.goodput import Phase, stride_of
from tpudist.goodput.run_history import Attempt, Lifetime, Record

LOST = "lost"
REPLAYED = "steps again"
WAITED = "wait for a slower one"
_STEP = Phase.STEP.value
_MIN_CAUSE_S = 0.05  # smaller causes are not reported


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of lost time.

    Attributes:
        seconds: Lost seconds of the process that lost most.
        text: Description of the cause, with the process.
    """

    seconds: float
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The time of a run.

    Attributes:
        wall_s: Seconds from the first start of a process to the last end.
        seconds: Seconds of each process by activity; they add up to the wall time of the process.
        lateness_s: For each process, seconds for which others waited for it to begin a call.
        causes: Causes of lost time, largest first.
    """

    wall_s: float
    seconds: Mapping[int, Mapping[str, float]]
    lateness_s: Mapping[int, float]
    causes: Sequence[Cause]


def diagnose(run: Sequence[Attempt]) -> Diagnosis:
    """Diagnoses a run from the result of `read_run`."""
    lifetimes = [lifetime for attempt in run for lifetime in attempt.values()]
    wall_s = max(x.ended for x in lifetimes) - min(x.began for x in lifetimes)
    processes = sorted({x.process for x in lifetimes})
    failures = [_find_failure(attempt) for attempt in run]
    seconds = {i: _seconds_of(i, run, failures) for i in processes}
    lateness = _find_lateness(run, processes)
    # A process that waits in a collective is in the step phase. So the lateness of the other
    # processes is taken out of its steps.
    for i, spent in seconds.items():
        others = sum(late_s for j, late_s in lateness.items() if j != i)
        if waited := min(others, spent.get(_STEP, 0.0)):
            spent[_STEP] -= waited
            spent[WAITED] = waited
    causes = [
        *_restarts(run, failures),
        *_changes(lifetimes),
        *_compiles(lifetimes),
        *_other_phases(seconds),
        *_late_processes(lateness),
    ]
    causes = sorted((x for x in causes if x.seconds > _MIN_CAUSE_S), key=lambda x: -x.seconds)
    return Diagnosis(wall_s, seconds, lateness, causes)


def _find_failure(attempt: Attempt) -> float:
    """Returns the time at which the first process failed; infinity if none did."""
    return min((x.ended for x in attempt.values() if not x.ended_well), default=math.inf)


def _seconds_of(
    process: int, run: Sequence[Attempt], failures: Sequence[float]
) -> dict[str, float]:
    """Returns the seconds of one process by activity, with lost and repeated steps separate."""
    # After the failure of another process, steps have no effect: they are lost, as is the time
    # until the next attempt. Steps that the next attempt repeats are `REPLAYED` there. Both are
    # taken out of the step phase, so the total stays the wall time.
    total: dict[str, float] = {}
    before: Lifetime | None = None
    for attempt, failure in zip(run, failures, strict=True):
        lifetime = attempt.get(process)
        if lifetime is None:
            continue
        spent = dict(lifetime.seconds)
        lost_s = min(max(0.0, lifetime.ended - failure), spent.get(_STEP, 0.0))
        if before is not None:
            spent[LOST] = max(0.0, lifetime.began - before.ended)
            again = min(_replay_s(before, lifetime), spent.get(_STEP, 0.0) - lost_s)
            if again > 0:
                spent[_STEP] -= again
                spent[REPLAYED] = again
        if lost_s:
            spent[_STEP] -= lost_s
            spent[LOST] = spent.get(LOST, 0.0) + lost_s
        for name, value in spent.items():
            total[name] = total.get(name, 0.0) + value
        before = lifetime
    return total


def _replay_s(before: Lifetime, after: Lifetime) -> float:
    """Returns the seconds in which a process repeated steps of its previous attempt."""
    # From the call of the checkpoint that was restored to the last call before the failure. Calls
    # count equally, because the time of each is unknown.
    if not after.num_calls:
        return 0.0
    restores = after.of_kind("restore")
    saves = {x["path"]: x["calls"] for x in before.of_kind("save")}
    saved = saves.get(restores[-1]["path"], 0) if restores else 0
    repeated = min(max(0, before.num_calls - saved), after.num_calls)
    return after.seconds.get(_STEP, 0.0) * repeated / after.num_calls


def _restarts(run: Sequence[Attempt], failures: Sequence[float]) -> list[Cause]:
    """Returns restarts after failures, with all time that they took."""
    causes = []
    for (before, after), failure in zip(itertools.pairwise(run), failures, strict=False):
        lost_s = max(
            max(0.0, after[i].began - min(before[i].ended, failure))
            + _replay_s(before[i], after[i])
            + after[i].seconds.get(Phase.STARTUP.value, 0.0)
            + after[i].seconds.get(Phase.COMPILE.value, 0.0)
            for i in before.keys() & after.keys()
        )
        first = min(before.values(), key=lambda x: (x.ended_well, x.ended))
        reasons = [x["message"] for process in before.values() for x in process.of_kind("verdict")]
        reasons += [x["why"] for process in before.values() for x in process.of_kind("generation")]
        reasons = [x for x in reasons if x]
        why = reasons[0].splitlines()[0] if reasons else f"process {first.process} ended"
        causes.append(Cause(lost_s, f"all processes were restarted: {why}"))
    return causes


def _changes(lifetimes: Sequence[Lifetime]) -> list[Cause]:
    """Returns changes of the processes of a program that survives them (`experimental.survive`)."""
    longest: dict[tuple[int, str], float] = {}
    for began, ended, generation in itertools.chain(*map(_spans_of_changes, lifetimes)):
        key = generation["number"], generation["why"]
        longest[key] = max(longest.get(key, 0.0), ended - began)
    return [
        Cause(
            lost_s,
            f"{why or 'the processes changed'}: the others continued with generation {n + 1}",
        )
        for (n, why), lost_s in longest.items()
    ]


def _spans_of_changes(lifetime: Lifetime) -> list[tuple[float, float, Record]]:
    """Returns the spans from each change of the processes to the end of the next first step."""
    ends = [x["time"] for x in lifetime.of_kind("resume")]
    spans = []
    for generation in lifetime.of_kind("generation"):
        after = (x for x in ends if x > generation["began"])
        if (ended := next(after, None)) is not None:
            spans.append((generation["began"], ended, generation))
    return spans


def _compiles(lifetimes: Sequence[Lifetime]) -> list[Cause]:
    """Returns functions that were compiled more than once, other than after changes."""
    recompiles: dict[str, dict[int, list[Record]]] = {}  # by function and process
    for lifetime in lifetimes:
        spans = _spans_of_changes(lifetime)
        for compiled in lifetime.of_kind("compile"):
            is_of_change = any(began < compiled["time"] <= ended for began, ended, _ in spans)
            if compiled["number"] > 1 and not is_of_change:
                by_process = recompiles.setdefault(compiled["function"], {})
                by_process.setdefault(lifetime.process, []).append(compiled)
    causes = []
    for name, by_process in recompiles.items():
        lost_s, worst = max(
            ((sum(x["seconds"] for x in records), records) for records in by_process.values()),
            key=lambda x: x[0],
        )
        cause = worst[-1]["cause"]
        causes.append(Cause(lost_s, f"'{name}' was compiled again, {len(worst)} time(s): {cause}"))
    return causes


def _other_phases(seconds: Mapping[int, Mapping[str, float]]) -> list[Cause]:
    causes = []
    for phase, text in (
        (Phase.INPUT, "process {} waited for its input"),
        (Phase.CHECKPOINT, "process {} saved or restored checkpoints"),
        (Phase.WAIT, "process {} waited for others on the host"),
    ):
        worst = max(seconds, key=lambda i: seconds[i].get(phase.value, 0.0))
        causes.append(Cause(seconds[worst].get(phase.value, 0.0), text.format(worst)))
    return causes


def _late_processes(lateness: Mapping[int, float]) -> list[Cause]:
    return [
        Cause(late_s, f"process {i} started its steps later than the others, which waited for it")
        for i, late_s in lateness.items()
    ]


def _find_lateness(run: Sequence[Attempt], processes: Sequence[int]) -> dict[int, float]:
    """Returns for each process the seconds for which others waited for it to begin a call."""
    # A long run records only some calls (`stride_of`). The calls between them are assumed to wait
    # as long as the median recorded call with the same stride. Long pauses are all recorded, so
    # what exceeds the median counts once and not per stride.
    lateness = dict.fromkeys(processes, 0.0)
    for attempt in run:
        if len(attempt) < 2:
            continue
        begins = {i: _begins_of(lifetime) for i, lifetime in attempt.items()}
        common = set.intersection(*(set(x) for x in begins.values()))
        waits: dict[int, dict[int, list[float]]] = {}  # by stride and process
        for call in sorted(common):
            if call + 1 not in common:
                continue
            last, waited_s = _wait_at(call, begins)
            by_process = waits.setdefault(stride_of(call), {i: [] for i in attempt})
            for i in attempt:
                by_process[i].append(waited_s if i == last else 0.0)
        for stride, by_process in waits.items():
            for i, waits_s in by_process.items():
                usual = statistics.median(waits_s) if stride > 1 else 0.0
                lateness[i] += stride * usual * len(waits_s) + sum(x - usual for x in waits_s)
    return lateness


def _wait_at(call: int, begins: Mapping[int, Mapping[int, float]]) -> tuple[int, float]:
    """Returns the process that began a call last, and the seconds that the first one waited."""
    first = min(begins, key=lambda i: begins[i][call])
    last = max(begins, key=lambda i: begins[i][call])
    behind_s = begins[last][call] - begins[first][call]
    # If the first process begins the next call after the last one has begun this call, it waited in
    # this call.
    if begins[first][call + 1] >= begins[last][call]:
        return last, behind_s
    # Otherwise it runs ahead, because steps are dispatched asynchronously, and it waits only where
    # its pause is longer than the pause of the last process, which never waits. Example: calls take
    # 1 s, process 0 may be 3 calls ahead, and process 1 is 10 s late from call 20 on. Process 0
    # begins call 22 at 22 s and call 23 at 31 s, when call 20 has ended. Process 1 begins them at
    # 32 s and 33 s. So process 0 waited 9 - 1 s in call 22, and nothing in the calls 20 and 21.
    first_pause, last_pause = (begins[i][call + 1] - begins[i][call] for i in (first, last))
    return last, max(0.0, min(behind_s, first_pause - last_pause))


def _begins_of(lifetime: Lifetime) -> dict[int, float]:
    """Returns when the process began each recorded call."""
    begins = {x["call"]: x["began"] for x in lifetime.of_kind("call")}
    for gap in lifetime.of_kind("gap"):
        begins |= {call: began for call, began in gap["begins"]}
    return begins
