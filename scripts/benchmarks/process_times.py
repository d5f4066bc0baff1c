"""The CPU time of all processes that a program has started, including orphaned ones."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "TPUDIST_BENCHMARK_MARK"
"""The variable that a program and whatever it starts have in common."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(mark: str) -> float:
    """CPU seconds of all processes whose variable `MARK` is `mark`, and of their dead children."""
    return sum(_cpu_s_of(process) for process in _marked(mark))


def pids(mark: str) -> list[int]:
    """The processes of a mark."""
    return [int(process.name) for process in _marked(mark)]


def _marked(mark: str) -> list[Path]:
    entry = f"{MARK}={mark}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def _cpu_s_of(process: Path) -> float:
    try:
        text = (process / "stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # a name may have spaces
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
