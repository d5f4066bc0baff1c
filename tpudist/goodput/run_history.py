"""Reads the files in which the processes of a run have recorded their time (`goodput`).

A run consists of attempts: all of its processes start, and after a failure all start again.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpudist.goodput.goodput import SUBFOLDER

# Kinds of records in the files of earlier versions -> their names now.
_FORMER_KINDS = {"goes on": "resume"}

Record = Mapping[str, Any]  # one line of a file


class NoRecords(ValueError):
    """The folder has no records to explain."""


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One process, from its start to its end. Times are in seconds since 1970.

    Attributes:
        process: Number of the process.
        began: Time of its start.
        ended: Last time at which it is known to have run.
        ended_well: Whether the program ended normally.
        seconds: Seconds in each phase, by the name of the phase.
        records: All records of the process.
    """

    process: int
    began: float
    ended: float
    ended_well: bool
    seconds: Mapping[str, float]
    records: Sequence[Record]

    def of_kind(self, kind: str) -> list[Record]:
        """Returns the records of one kind."""
        return [x for x in self.records if x["kind"] == kind]

    @property
    def num_calls(self) -> int:
        """Number of program calls that the process has begun."""
        return max((x["calls"] for x in self.of_kind("time")), default=0)


Attempt = Mapping[int, Lifetime]  # by the number of the process


def read_run(folder: str | Path) -> list[Attempt]:
    """Returns the attempts of a run in order.

    Raises:
        NoRecords: If the folder does not exist, or has no records.
    """
    subfolder = Path(folder) / SUBFOLDER
    files = sorted(subfolder.glob("process-*-*.jsonl"))
    lifetimes = sorted(filter(None, map(_read, files)), key=lambda x: x.began)
    if not lifetimes:
        if not Path(folder).exists():
            raise NoRecords(f"The folder {folder} does not exist in {Path.cwd()}.")
        raise NoRecords(
            f"{subfolder} has no records of processes. To write them, call "
            f"tpudist.record_goodput({str(folder)!r}) in the program, or set "
            f"TPUDIST_GOODPUT={folder}."
        )
    # The numbers in the file names do not tell which files belong to one attempt, because a process
    # that ends early may have no file. So they are grouped by time: a second start of the same
    # process begins the next attempt.
    run: list[dict[int, Lifetime]] = [{}]
    for lifetime in lifetimes:
        if lifetime.process in run[-1]:
            run.append({})
        run[-1][lifetime.process] = lifetime
    return [dict(sorted(attempt.items())) for attempt in run]


def _read(file: Path) -> Lifetime | None:
    records = []
    for text in file.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(text))
        except ValueError:  # the last line of a process that was killed while it wrote
            continue
    if not records or records[0].get("kind") != "start":
        return None
    records = [x | {"kind": _FORMER_KINDS.get(x["kind"], x["kind"])} for x in records]
    seconds: dict[str, float] = {}
    for record in records:
        if record["kind"] == "time":
            for name, value in record["seconds"].items():
                seconds[name] = seconds.get(name, 0.0) + value
    return Lifetime(
        process=records[0]["process"],
        began=records[0]["began"],
        # The phases add up to the time until the last "time"; later records have no seconds.
        ended=max(x["time"] for x in records if x["kind"] in ("start", "time")),
        ended_well=records[-1]["kind"] == "end",
        seconds=seconds,
        records=records,
    )
