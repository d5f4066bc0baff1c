"""Processes and what they have started, as the system sees them."""

import contextlib
import dataclasses
import time
from collections.abc import Collection
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """One process; its number is used again, but not with the same moment of its start."""

    pid: int
    start: int
    name: str = dataclasses.field(compare=False)


def descendants(pid: int) -> set[Process]:
    """All running descendants of a process."""
    found: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process, parent, state = _read(folder)
            if state not in "ZX":
                found.setdefault(parent, []).append(process)
    left, result = [pid], set()
    while left:
        children = found.get(left.pop(), [])
        result |= set(children)
        left += [x.pid for x in children]
    return result


def are_gone(processes: Collection[Process], within_s: float) -> bool:
    """Whether none of them is alive, soon enough."""
    end_s = time.monotonic() + within_s
    while any(map(_is_alive, processes)):
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.05)
    return True


def _is_alive(process: Process) -> bool:
    try:
        now, _, state = _read(Path(f"/proc/{process.pid}"))
    except OSError:
        return False
    return now == process and state not in "ZX"


def _read(folder: Path) -> tuple[Process, int, str]:
    before, _, after = (folder / "stat").read_text().rpartition(")")
    fields = after.split()
    return (
        Process(int(folder.name), int(fields[19]), before.split("(")[1]),
        int(fields[1]),
        fields[0],
    )
