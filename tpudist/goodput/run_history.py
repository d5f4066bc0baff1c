"""Reads the files in which the processes of a run have recorded their time (`goodput`)."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpudist.goodput.goodput import FOLDER

# Kinds of records in the files of earlier versions -> their names now.
_FORMER_KINDS = {"goes on": "resume"}


class NoLedger(ValueError):
    """The folder has no records to explain."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One process, from one start to its end. Times are in seconds since 1970.

    Attributes:
        process: Number of the process.
        began: Time of its start.
        ended: Last time at which it is known to have run.
        ended_well: Whether the program ended normally.
        seconds: Seconds in each phase, by the name of the phase.
        lines: All records of the process.
    """

    process: int
    began: float
    ended: float
    ended_well: bool
    seconds: Mapping[str, float]
    lines: Sequence[Mapping[str, Any]]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Returns the records of one kind."""
        return [x for x in self.lines if x["kind"] == kind]

    @property
    def num_calls(self) -> int:
        """Number of program calls that the process has begun."""
        return max((x["calls"] for x in self.of_kind("time")), default=0)


def read_run(folder: str | Path) -> list[dict[int, Start]]:
    """Returns for each start of a run, in order, the records of its processes by their numbers.

    Raises:
        NoLedger: If the folder does not exist, or has no records.
    """
    ledger = Path(folder) / FOLDER
    files = sorted(ledger.glob("process-*-*.jsonl"))
    starts = sorted(filter(None, map(_read, files)), key=lambda x: x.began)
    if not starts:
        if not Path(folder).exists():
            raise NoLedger(f"The folder {folder} does not exist in {Path.cwd()}.")
        raise NoLedger(
            f"{ledger} has no records of processes. To write them, call "
            f"tpudist.record_goodput({str(folder)!r}) in the program, or set "
            f"TPUDIST_GOODPUT={folder}."
        )
    # The numbers in the file names do not tell which starts belong together, because a process that
    # ends early may have no file. So starts are grouped by time: a second start of the same process
    # begins the next start of the run.
    run: list[dict[int, Start]] = [{}]
    for start in starts:
        if start.process in run[-1]:
            run.append({})
        run[-1][start.process] = start
    return [dict(sorted(x.items())) for x in run]


def _read(file: Path) -> Start | None:
    lines = []
    for text in file.read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the last line of a process that was killed while it wrote
            continue
    if not lines or lines[0].get("kind") != "start":
        return None
    lines = [line | {"kind": _FORMER_KINDS.get(line["kind"], line["kind"])} for line in lines]
    seconds: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "time":
            for name, value in line["seconds"].items():
                seconds[name] = seconds.get(name, 0.0) + value
    return Start(
        process=lines[0]["process"],
        began=lines[0]["began"],
        ended=max(x["time"] for x in lines if x["kind"] in ("start", "time")),
        ended_well=lines[-1]["kind"] == "end",
        seconds=seconds,
        lines=lines,
    )
