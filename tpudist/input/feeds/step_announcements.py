"""Announcements of the steps that processes have read, and the verdict on them.

Each process announces the rows of all steps that it has read and that are not agreed yet. The first
process finds how many of these steps all processes can take. Everything here is computed from
messages, without communication.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NotRequired, TypeAlias, TypedDict

from tpudist.input.feeds.step_counts import ReplicaOrder
from tpudist.input.process_rounds import expand, group

# Number of equal steps; rows of each replica of the process; description of the batches.
Run: TypeAlias = tuple[int, Sequence[int], str]


class Announcement(TypedDict):
    """What one process has read, from the first step that is not agreed.

    Attributes:
        runs: The steps.
        replicas: Number of replicas of the process.
        ended: Whether the process has no data after these steps.
        failure: Error of the read after these steps; empty if there was none.
        drops: Whether a step in which a replica has no batch is dropped.
        oldest: First step whose position may still be requested in this process.
    """

    runs: Sequence[Run]
    replicas: int
    ended: bool
    failure: str
    drops: bool
    oldest: int


class Verdict(TypedDict):
    """The steps that all processes take next.

    Attributes:
        num_steps: Number of steps.
        ended: Whether no process has data after them.
        drops: Whether a step in which a replica has no batch is dropped, and ends the pass.
        rows: Each different list of runs (number of equal steps, rows of the replicas of a process)
            of these steps.
        owners: Runs of (number of an item of `rows`, number of processes), in their order.
        description: Description of the batches of the last of these steps.
        num_announced: Most steps that a process has announced.
        oldest: First step whose position may still be requested in any process.
        sender: Position of the process that sends the others an example of the first step's
            batches; None if all have one.
        errors: Position of a process and error of its read of the first step, for each error.
        different: Positions and descriptions of two processes whose batches do not fit together.
    """

    num_steps: int
    ended: bool
    drops: bool
    rows: Sequence[Sequence[tuple[int, Sequence[int]]]]
    owners: list[tuple[int, int]]
    description: str | None
    num_announced: int
    oldest: int
    sender: int | None
    errors: NotRequired[list[tuple[int, str]]]
    different: NotRequired[list[tuple[int, str]]]


def judge(announcements: list[Announcement], description: str | None) -> Verdict:
    """Returns the verdict on the announcements of all processes.

    A process without a batch pads with an example. It needs at most one new example for the steps
    of a verdict, for the first step: a verdict ends before a step for which it needs another one.

    Args:
        announcements: One for each process, in their order. Equal ones are one object.
        description: Description of the batches of the last step before these. All processes have an
            example of them.
    """
    different, owners = group(announcements)
    lengths = [sum(count for count, _, _ in x["runs"]) for x in different]
    to_come = [length for length, x in zip(lengths, different, strict=True) if not x["ended"]]
    verdict: Verdict = {
        # A process without more data feeds padding to the end of the last process.
        "num_steps": min(to_come, default=max(lengths)),
        "ended": not to_come,
        "drops": any(x["drops"] for x in different),
        "rows": [],
        "owners": [],
        "description": description,
        "num_announced": max(lengths),
        "oldest": min(x["oldest"] for x in different),
        "sender": None,
    }
    if to_come and not verdict["num_steps"]:
        failures = [different[i]["failure"] for i in expand(owners)]
        verdict["errors"] = [(i, text) for i, text in enumerate(failures) if text]
    _compare(verdict, different, owners)
    # Only what the processes need, so that equal rows are equal texts: it goes to all of them.
    rows = [tuple(_rows_of(x, verdict["num_steps"])) for x in different]
    kinds = {x: x for x in rows}
    verdict["rows"], verdict["owners"] = group([kinds[rows[i]] for i in expand(owners)])
    return verdict


def _compare(
    verdict: Verdict, different: Sequence[Announcement], owners: Sequence[tuple[int, int]]
) -> None:
    """Compares the batches of all processes in each step; shortens the verdict if needed."""
    for start, runs in _segments(different, verdict["num_steps"]):
        found = {run[2] for run in runs if run is not None}
        is_new = None in runs and verdict["description"] not in found
        if start and (len(found) > 1 or is_new):
            verdict["num_steps"], verdict["ended"] = start, False
            return
        if len(found) > 1 or is_new:
            of_processes = enumerate(runs[i] for i in expand(owners))
            batches = [(i, run[2]) for i, run in of_processes if run is not None]
            if len(found) > 1:
                other = next(x for x in batches if x[1] != batches[0][1])
                verdict["different"] = [batches[0], other]
                return
            verdict["sender"] = batches[0][0]
        verdict["description"] = found.pop()


def _segments(
    announcements: Sequence[Announcement], num_steps: int
) -> Iterator[tuple[int, list[Run | None]]]:
    """Yields each step at which a run begins, with the run of each announcement; None after it."""
    ends = [list(itertools.accumulate(run[0] for run in x["runs"])) for x in announcements]
    starts = sorted({end for x in ends for end in x if end < num_steps} | {0}) if num_steps else ()
    numbers = [0] * len(ends)
    for start in starts:
        for i, x in enumerate(ends):
            while numbers[i] < len(x) and x[numbers[i]] <= start:
                numbers[i] += 1
        yield (
            start,
            [
                x["runs"][number] if number < len(x["runs"]) else None
                for x, number in zip(announcements, numbers, strict=True)
            ],
        )


def _rows_of(announcement: Announcement, num_steps: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields runs of (number of equal steps, rows) for the first `num_steps` steps."""
    missing = num_steps
    for count, rows, _ in announcement["runs"]:
        if missing:
            yield min(count, missing), tuple(rows)
            missing -= min(count, missing)
    if missing:
        yield missing, (0,) * announcement["replicas"]


def rows_of_steps(verdict: Verdict, order: ReplicaOrder) -> Iterator[tuple[int, ...]]:
    """Yields the rows of all replicas in each step of a verdict, until one that is dropped."""
    owners = expand(verdict["owners"])
    kinds = [list(itertools.accumulate(count for count, _ in runs)) for runs in verdict["rows"]]
    numbers = [0] * len(kinds)
    start = 0
    for end in sorted({end for ends in kinds for end in ends}):
        for i, ends in enumerate(kinds):
            while ends[numbers[i]] <= start:
                numbers[i] += 1
        rows = [runs[number][1] for runs, number in zip(verdict["rows"], numbers, strict=True)]
        counts = order.order([rows[i] for i in owners])
        if verdict["drops"] and not all(counts):
            return
        yield from itertools.repeat(counts, end - start)
        start = end


def runs_of(steps: Sequence[tuple[Sequence[int], str]]) -> list[Run]:
    """Returns runs of equal (rows, description)."""
    groups = itertools.groupby(steps)
    return [(len(list(same)), rows, description) for (rows, description), same in groups]


def describe_difference(processes: Sequence[int], different: Sequence[tuple[int, object]]) -> str:
    """Returns two processes and their texts, for an error; see `Verdict.different`."""
    (first, text), (other, other_text) = different
    return f"process {processes[first]} {text}, process {processes[other]} {other_text}"
