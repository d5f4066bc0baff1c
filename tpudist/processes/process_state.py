"""Reads the state of a process of this host from the kernel, whatever the process itself reports.

A silent process may be stopped, or compute in C without letting Python threads run. Only its own
kernel can distinguish the two. The state of a process of another host is unknown.
"""

import enum
import sys

from tpudist.processes.host import this_host


class State(enum.Enum):
    """State of a process, as its kernel reports it."""

    GONE = "gone"
    STOPPED = "stopped"
    DEBUGGED = "stopped by a debugger"
    RUNNING = "running"


# A place is "<pid namespace> <pid> <host name>". Two containers of one host may use the same pid,
# and two hosts the same host name, so processes are on one host only if their namespaces agree.


def here(pid: int | None = None) -> str:
    """Returns the place of a process of this host, by default of this one."""
    return f"{this_host().namespace()} {pid or this_host().pid()} {this_host().name()}"


def describe(place: str) -> str:
    """Returns a text for a place, such as "pid 4711 on node7"."""
    _, pid, host = place.split(" ", 2)
    return f"pid {pid} on {host}"


def pid_here(place: str) -> int | None:
    """Returns the pid of the process at a place, or None if it is on another host."""
    namespace, pid, _ = place.split(" ", 2)
    return int(pid) if namespace == this_host().namespace() else None


def find(place: str) -> State | None:
    """Returns the state of the process at a place, or None if this host does not know it."""
    pid = pid_here(place)
    if sys.platform != "linux" or pid is None:
        return None
    try:
        letter = this_host().state_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return State.GONE
    except OSError:
        return None
    # Letters of proc(5). Z is a zombie, which no longer runs, and X a dead process.
    return {"T": State.STOPPED, "t": State.DEBUGGED, "Z": State.GONE, "X": State.GONE}.get(
        letter, State.RUNNING
    )
