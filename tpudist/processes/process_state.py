"""How a process of this host is, as the kernel sees it, whatever it tells of itself.

A process that tells nothing may be stopped, or may compute in C and let no thread of Python run.
Only its own kernel can say which. The kernel of another host cannot be asked: None then.
"""

import enum
import os
import socket
import sys
from pathlib import Path

_PROC = Path("/proc")


class State(enum.Enum):
    """What a process does."""

    GONE = "gone"
    STOPPED = "stopped"
    DEBUGGED = "stopped by a debugger"
    RUNNING = "running"


def here(pid: int | None = None) -> str:
    """Where a process of this host is, by default this one: with the namespace of its pid."""
    return f"{_namespace()} {pid or os.getpid()} {socket.gethostname()}"


def describe(place: str) -> str:
    """A place in words: "pid 4711 on node7"."""
    _, pid, host = place.split(" ", 2)
    return f"pid {pid} on {host}"


def pid_here(place: str) -> int | None:
    """The pid of the process at a place; None on another host."""
    namespace, pid, _ = place.split(" ", 2)
    return int(pid) if namespace == _namespace() else None


def find(place: str) -> State | None:
    """How the process at a place is; None if only another host knows."""
    namespace, pid, _ = place.split(" ", 2)
    if sys.platform != "linux" or namespace != _namespace():
        return None
    try:
        letter = (_PROC / pid / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return State.GONE
    except OSError:
        return None
    return {"T": State.STOPPED, "t": State.DEBUGGED, "Z": State.GONE, "X": State.GONE}.get(
        letter, State.RUNNING
    )


def _namespace() -> str:
    """What two processes have in common whose pids mean the same."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return f"unknown/{os.getpid()}"
