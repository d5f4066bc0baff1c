"""Diagnoses a run: where its time went, which process made others wait, and the largest causes."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tpudist.goodput.goodput import stride_of
from tpudist.goodput.run_history import Start

LOST = "lost"
REPLAYED = "steps again"
WAITED = "wait for a slower one"
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


Run = Sequence[Mapping[int, Start]]


def diagnose(run: Run) -> Diagnosis:
    """Diagnoses a run from the result of `read_run`."""
    all_starts = [start for starts in run for start in starts.values()]
    wall_s = max(x.ended for x in all_starts) - min(x.began for x in all_starts)
    processes = sorted({x.process for x in all_starts})
    deaths = [_find_death(starts) for starts in run]
    seconds = {i: _seconds_of(i, run, deaths) for i in processes}
    late = _find_lateness(run, processes)
    # A process that waits in a collective is in the step phase. So the lateness of the other
    # processes is taken out of its steps.
    waits = {i: sum(x for j, x in late.items() if j != i) for i in processes}
    for i, spent in seconds.items():
        waited = min(waits[i], spent.get("step", 0.0))
        if waited:
            spent["step"] -= waited
            spent[WAITED] = waited
    causes = [
        *_restarts(run, deaths),
        *_changes(run),
        *_compiles(run),
        *_other_phases(seconds),
        *_late(late),
    ]
    causes = sorted((x for x in causes if x.seconds > _MIN_CAUSE_S), key=lambda x: -x.seconds)
    return Diagnosis(wall_s, seconds, late, causes)


def _find_death(starts: Mapping[int, Start]) -> float:
    """Returns the time at which the first process failed; infinity if none did."""
    return min((x.ended for x in starts.values() if not x.ended_well), default=math.inf)


def _seconds_of(process: int, run: Run, deaths: Sequence[float]) -> dict[str, float]:
    """Returns the seconds of one process by activity, with lost and repeated steps separate."""
    # After the death of another process, steps have no effect: they are lost, as is the time until
    # the next start. Steps that the next start repeats are `REPLAYED` there. Both are taken out of
    # the step phase, so the total stays the wall time.
    total: dict[str, float] = {}
    before: Start | None = None
    for starts, death in zip(run, deaths, strict=True):
        if process not in starts:
            continue
        start = starts[process]
        spent = dict(start.seconds)
        lost_s = min(max(0.0, start.ended - death), spent.get("step", 0.0))
        if before is not None:
            spent[LOST] = max(0.0, start.began - before.ended)
            again = min(_replay_s(before, start), spent.get("step", 0.0) - lost_s)
            if again > 0:
                spent["step"] -= again
                spent[REPLAYED] = again
        if lost_s:
            spent["step"] -= lost_s
            spent[LOST] = spent.get(LOST, 0.0) + lost_s
        for name, value in spent.items():
            total[name] = total.get(name, 0.0) + value
        before = start
    return total


def _replay_s(before: Start, start: Start) -> float:
    """Returns the seconds in which a start repeated steps of the previous start."""
    # From the call of the checkpoint that was restored to the last call before the failure. Calls
    # count equally, because the time of each is unknown.
    restores = start.of_kind("restore")
    if not start.num_calls:
        return 0.0
    saves = {x["path"]: x["calls"] for x in before.of_kind("save")}
    saved = saves.get(restores[-1]["path"], 0) if restores else 0
    repeated = min(max(0, before.num_calls - saved), start.num_calls)
    return start.seconds.get("step", 0.0) * repeated / start.num_calls


def _restarts(run: Run, deaths: Sequence[float]) -> list[Cause]:
    """Returns restarts after failures, with all time that they took."""
    causes = []
    for before, after, death in zip(run, run[1:], deaths, strict=False):
        pairs = [(before[i], after[i]) for i in before.keys() & after.keys()]
        spent = max(
            max(0.0, began.began - min(ended.ended, death))
            + _replay_s(ended, began)
            + began.seconds.get("start", 0.0)
            + began.seconds.get("compile", 0.0)
            for ended, began in pairs
        )
        first = min(before.values(), key=lambda x: (x.ended_well, x.ended))
        reasons = [x["message"] for start in before.values() for x in start.of_kind("verdict")]
        reasons += [x["why"] for start in before.values() for x in start.of_kind("generation")]
        reasons = [x for x in reasons if x]
        why = reasons[0].splitlines()[0] if reasons else f"process {first.process} ended"
        causes.append(Cause(spent, f"all processes were restarted: {why}"))
    return causes


def _changes(run: Run) -> list[Cause]:
    """Returns changes of the processes of a program that survives them (`experimental.survive`)."""
    longest: dict[tuple[int, str], float] = {}
    for start in (x for starts in run for x in starts.values()):
        for began, ended, line in _spans_of_changes(start):
            key = line["number"], line["why"]
            longest[key] = max(longest.get(key, 0.0), ended - began)
    return [
        Cause(
            spent, f"{why or 'the processes changed'}: the others continued with generation {n + 1}"
        )
        for (n, why), spent in longest.items()
    ]


def _spans_of_changes(start: Start) -> list[tuple[float, float, Mapping[str, Any]]]:
    """Returns the spans from each change of the processes to the end of the next first step."""
    ends = [x["time"] for x in start.of_kind("resume")]
    spans = []
    for line in start.of_kind("generation"):
        after = (x for x in ends if x > line["began"])
        if (ended := next(after, None)) is not None:
            spans.append((line["began"], ended, line))
    return spans


def _compiles(run: Run) -> list[Cause]:
    """Returns functions that were compiled more than once, other than after changes."""
    by_process: dict[tuple[str, int], tuple[float, int, str]] = {}
    for start in (x for starts in run for x in starts.values()):
        spans = _spans_of_changes(start)
        for line in start.of_kind("compile"):
            is_of_change = any(began < line["time"] <= ended for began, ended, _ in spans)
            if line["number"] > 1 and not is_of_change:
                key = line["function"], start.process
                spent, times, _ = by_process.get(key, (0.0, 0, ""))
                by_process[key] = spent + line["seconds"], times + 1, line["cause"]
    largest: dict[str, tuple[float, int, str]] = {}
    for (name, _), compiles in by_process.items():
        largest[name] = max(largest.get(name, (0.0, 0, "")), compiles)
    return [
        Cause(spent, f"'{name}' was compiled again, {times} time(s): {cause}")
        for name, (spent, times, cause) in largest.items()
    ]


def _other_phases(seconds: Mapping[int, Mapping[str, float]]) -> list[Cause]:
    causes = []
    for name, text in (
        ("input", "process {} waited for its input"),
        ("checkpoint", "process {} saved or restored checkpoints"),
        ("wait for others", "process {} waited for others on the host"),
    ):
        worst = max(seconds, key=lambda i: seconds[i].get(name, 0.0))
        causes.append(Cause(seconds[worst].get(name, 0.0), text.format(worst)))
    return causes


def _late(late: Mapping[int, float]) -> list[Cause]:
    return [
        Cause(seconds, f"process {i} started its steps later than the others, which waited for it")
        for i, seconds in late.items()
    ]


def _find_lateness(run: Run, processes: Sequence[int]) -> dict[int, float]:
    """Returns for each process the seconds for which others waited for it to begin a call."""
    # A long run records only some calls (`stride_of`). The calls between them are assumed to wait
    # as long as the median recorded call with the same stride. Long pauses are all recorded, so
    # what exceeds the median counts once and not per stride.
    late = dict.fromkeys(processes, 0.0)
    for starts in run:
        if len(starts) < 2:
            continue
        begins = {i: _begins_of(start) for i, start in starts.items()}
        common = set.intersection(*(set(x) for x in begins.values()))
        waits: dict[int, dict[int, list[float]]] = {}  # by stride and process
        for call in sorted(common):
            if call + 1 not in common:
                continue
            last, waited_s = _wait_at(call, begins)
            by_process = waits.setdefault(stride_of(call), {i: [] for i in starts})
            for i in starts:
                by_process[i].append(waited_s if i == last else 0.0)
        for stride, by_process in waits.items():
            for i, waits_s in by_process.items():
                usual = statistics.median(waits_s) if stride > 1 else 0.0
                late[i] += stride * usual * len(waits_s) + sum(x - usual for x in waits_s)
    return late


def _wait_at(call: int, begins: Mapping[int, Mapping[int, float]]) -> tuple[int, float]:
    """Returns the process that began a call last, and the seconds that the first one waited."""
    # If the first process begins the next call after the last one has begun this call, it waited in
    # this call. Otherwise it runs ahead (steps are dispatched asynchronously) and waits some calls
    # later. Then its pause there is longer than the pause of the last process, which never waits.
    first = min(begins, key=lambda i: begins[i][call])
    last = max(begins, key=lambda i: begins[i][call])
    behind_s = begins[last][call] - begins[first][call]
    if begins[first][call + 1] >= begins[last][call]:
        return last, behind_s
    pauses = [begins[i][call + 1] - begins[i][call] for i in (first, last)]
    return last, max(0.0, min(behind_s, pauses[0] - pauses[1]))


def _begins_of(start: Start) -> dict[int, float]:
    begins = {line["call"]: line["began"] for line in start.of_kind("call")}
    for line in start.of_kind("gap"):
        begins |= {call: began for call, began in line["begins"]}
    return begins
