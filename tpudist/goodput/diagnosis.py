"""What the time of a run went to, who made others wait, and the causes, the largest first."""

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
_LEAST_S = 0.05  # of a cause that is told


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that has taken time which steps could have had.

    Attributes:
        seconds: How much, of the process that it took most of.
        text: What it was, with the process.
    """

    seconds: float
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What a run's time went to.

    Attributes:
        wall_s: From the first start of a process to the last end.
        seconds: Of each process, by what it was spent with; they add up to its wall time.
        lateness_s: Of each process, for how long others waited for it to begin a call.
        causes: The largest first.
    """

    wall_s: float
    seconds: Mapping[int, Mapping[str, float]]
    lateness_s: Mapping[int, float]
    causes: Sequence[Cause]


Run = Sequence[Mapping[int, Start]]


def diagnose(run: Run) -> Diagnosis:
    """Explains a run, as `read_run` gives it."""
    every = [start for starts in run for start in starts.values()]
    wall_s = max(x.ended for x in every) - min(x.began for x in every)
    processes = sorted({x.process for x in every})
    deaths = [_find_death(starts) for starts in run]
    seconds = {i: _seconds_of(i, run, deaths) for i in processes}
    late = _find_lateness(run, processes)
    waits = {i: sum(x for j, x in late.items() if j != i) for i in processes}
    for i, spent in seconds.items():
        waited = min(waits[i], spent.get("step", 0.0))
        if waited:
            spent["step"] -= waited
            spent[WAITED] = waited
    causes = [
        *_restarts(run, deaths),
        *_changes(run),
        *_inputs(seconds),
        *_compiles(run),
        *_others(seconds),
        *_late(late),
    ]
    causes = sorted((x for x in causes if x.seconds > _LEAST_S), key=lambda x: -x.seconds)
    return Diagnosis(wall_s, seconds, late, causes)


def _find_death(starts: Mapping[int, Start]) -> float:
    """When the first process ended that did not end well; never, if there is none."""
    return min((x.ended for x in starts.values() if not x.ended_well), default=math.inf)


def _seconds_of(process: int, run: Run, deaths: Sequence[float]) -> dict[str, float]:
    """Of one process; what came to nothing, and what was done a second time, apart."""
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
    """For how long a start did steps that the one before had done already."""
    restores = start.of_kind("restore")
    if not start.num_calls:
        return 0.0
    saves = {x["path"]: x["calls"] for x in before.of_kind("save")}
    saved = saves.get(restores[-1]["path"], 0) if restores else 0
    again = min(max(0, before.num_calls - saved), start.num_calls)
    return start.seconds.get("step", 0.0) * again / start.num_calls


def _restarts(run: Run, deaths: Sequence[float]) -> list[Cause]:
    """Processes that did not come to their end, with all that was done again for it."""
    found = []
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
        said = [x["message"] for start in before.values() for x in start.of_kind("verdict")]
        said += [x["why"] for start in before.values() for x in start.of_kind("generation")]
        said = [x for x in said if x]
        why = said[0].splitlines()[0] if said else f"process {first.process} ended"
        found.append(Cause(spent, f"all processes were restarted: {why}"))
    return found


def _changes(run: Run) -> list[Cause]:
    """Other processes than before, of a program that survives in its processes."""
    found: dict[tuple[int, str], float] = {}
    for start in (x for starts in run for x in starts.values()):
        for began, ended, line in _spans_of_changes(start):
            key = line["number"], line["why"]
            found[key] = max(found.get(key, 0.0), ended - began)
    return [
        Cause(
            spent, f"{why or 'the processes changed'}: the others continued with generation {n + 1}"
        )
        for (n, why), spent in found.items()
    ]


def _spans_of_changes(start: Start) -> list[tuple[float, float, Mapping[str, Any]]]:
    """From when to when a process had no program, or one that had yet to do its first step."""
    ends = [x["time"] for x in start.of_kind("goes on")]
    spans = []
    for line in start.of_kind("generation"):
        after = (x for x in ends if x > line["began"])
        if (ended := next(after, None)) is not None:
            spans.append((line["began"], ended, line))
    return spans


def _inputs(seconds: Mapping[int, Mapping[str, float]]) -> list[Cause]:
    worst = max(seconds, key=lambda i: seconds[i].get("input", 0.0))
    return [Cause(seconds[worst].get("input", 0.0), f"process {worst} waited for its input")]


def _compiles(run: Run) -> list[Cause]:
    """Programs that were compiled again; the first time is no loss."""
    of_each: dict[tuple[str, int], tuple[float, int, str]] = {}
    for start in (x for starts in run for x in starts.values()):
        spans = _spans_of_changes(start)
        for line in start.of_kind("compile"):
            is_of_change = any(began < line["time"] <= ended for began, ended, _ in spans)
            if line["number"] > 1 and not is_of_change:
                key = line["function"], start.process
                spent, times, _ = of_each.get(key, (0.0, 0, ""))
                of_each[key] = spent + line["seconds"], times + 1, line["cause"]
    found: dict[str, tuple[float, int, str]] = {}
    for (name, _), each in of_each.items():
        found[name] = max(found.get(name, (0.0, 0, "")), each)
    return [
        Cause(spent, f"'{name}' was compiled again, {times} time(s): {cause}")
        for name, (spent, times, cause) in found.items()
    ]


def _others(seconds: Mapping[int, Mapping[str, float]]) -> list[Cause]:
    found = []
    for name, text in (
        ("checkpoint", "process {} saved or restored checkpoints"),
        ("wait for others", "process {} waited for others on the host"),
    ):
        worst = max(seconds, key=lambda i: seconds[i].get(name, 0.0))
        found.append(Cause(seconds[worst].get(name, 0.0), text.format(worst)))
    return found


def _late(late: Mapping[int, float]) -> list[Cause]:
    return [
        Cause(seconds, f"process {i} started its steps later than the others, which waited for it")
        for i, seconds in late.items()
    ]


def _find_lateness(run: Run, processes: Sequence[int]) -> dict[int, float]:
    """For how long others waited for each process to begin a call that they had begun.

    Of long runs not every call is known: those between are taken to be as the median of those that
    are, and long pauses, which are known all, count by themselves.
    """
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
            of_stride = waits.setdefault(stride_of(call), {i: [] for i in starts})
            for i in starts:
                of_stride[i].append(waited_s if i == last else 0.0)
        for stride, of_stride in waits.items():
            for i, found in of_stride.items():
                usual = statistics.median(found) if stride > 1 else 0.0
                late[i] += stride * usual * len(found) + sum(x - usual for x in found)
    return late


def _wait_at(call: int, begins: Mapping[int, Mapping[int, float]]) -> tuple[int, float]:
    """Who has begun a call last, and how long the one that began it first has waited for that.

    If that one begins the next call after the last has begun this one, it has waited in this one.
    If before, it runs ahead, and waits some calls later: then its pause there is longer than that
    of the last one, which waits for nobody.
    """
    first = min(begins, key=lambda i: begins[i][call])
    last = max(begins, key=lambda i: begins[i][call])
    behind_s = begins[last][call] - begins[first][call]
    if begins[first][call + 1] >= begins[last][call]:
        return last, behind_s
    pauses = [begins[i][call + 1] - begins[i][call] for i in (first, last)]
    return last, max(0.0, min(behind_s, pauses[0] - pauses[1]))


def _begins_of(start: Start) -> dict[int, float]:
    found = {line["call"]: line["began"] for line in start.of_kind("call")}
    for line in start.of_kind("gap"):
        found |= {call: began for call, began in line["begins"]}
    return found
