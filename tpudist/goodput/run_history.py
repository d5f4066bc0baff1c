"""Reads what the processes of a run have noted of their time."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpudist.goodput.goodput import FOLDER


class NoLedger(ValueError):
    """The folder has no records to explain."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One process, from one start to its end.

    Attributes:
        process: Its number.
        began: When it was started, in seconds since 1970.
        ended: When it is last known to have run.
        ended_well: Whether it came to its end by itself.
        seconds: What it spent with each phase, by name.
        lines: All that it has noted.
    """

    process: int
    began: float
    ended: float
    ended_well: bool
    seconds: Mapping[str, float]
    lines: Sequence[Mapping[str, Any]]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Its lines of one kind."""
        return [x for x in self.lines if x["kind"] == kind]

    @property
    def num_calls(self) -> int:
        """How many calls of programs it has begun."""
        return max((x["calls"] for x in self.of_kind("time")), default=0)


def read_run(folder: str | Path) -> list[dict[int, Start]]:
    """For each time that a run was started, what its processes have noted, in order.

    A process that ends before it notes anything is not among them: what belongs together is found
    by when it began.

    Raises:
        NoLedger: If the folder does not exist, or contains no notes.
    """
    where = Path(folder) / FOLDER
    files = sorted(where.glob("process-*-*.jsonl"))
    starts = sorted(filter(None, map(_read, files)), key=lambda x: x.began)
    if not starts:
        if not Path(folder).exists():
            raise NoLedger(f"The folder {folder} does not exist in {Path.cwd()}.")
        raise NoLedger(
            f"{where} has no records of processes. To write them, call "
            f"tpudist.record_goodput({str(folder)!r}) in the program, or set "
            f"TPUDIST_GOODPUT={folder}."
        )
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
        except ValueError:  # the last one, of a process that was killed
            continue
    if not lines or lines[0].get("kind") != "start":
        return None
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
