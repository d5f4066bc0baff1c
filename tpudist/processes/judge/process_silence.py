"""Decides how long a process that does not report may be silent, and describes its silence."""

import dataclasses
import math

from tpudist.processes import process_state
from tpudist.processes.process_state import State

WARN_S = 4.0
"""Seconds of silence, or of waiting for a process, until a warning."""
STOPPED_S = 20.0
"""Seconds until all processes end if the kernel says that the silent process is stopped."""
SILENT_S = 90.0
"""Seconds until all processes end if a process is silent and nothing more is known about it.

A little less than JAX's own 100 s, so that our message comes first. Not much less, because a long
computation in C that does not release Python's lock is silent, too. A death of a process, a host or
the network is noticed sooner; see `peer_connections`.
"""


@dataclasses.dataclass(frozen=True)
class Silence:
    """A process that does not report.

    Attributes:
        text: Description, with the state of the process as its kernel reports it.
        limit_s: Seconds that the silence may last; infinite in a debugger.
    """

    text: str
    limit_s: float

    @property
    def warning(self) -> str:
        """The description and the consequence."""
        if self.limit_s == math.inf:
            return self.text
        return f"{self.text} After {self.limit_s:g} s all processes end."


def describe_silence(index: int, seconds: float, place: str) -> Silence:
    """Returns the silence of a process that has not reported for some seconds.

    Args:
        index: Index of the process.
        seconds: Seconds since its last report.
        place: Host and pid of the process; see `process_state`.
    """
    text = f"Process {index} ({process_state.describe(place)}) has not reported for {seconds:.0f} s"
    match process_state.find(place):
        case None:
            return Silence(
                f"{text}: it is stopped, its host is busy or unreachable, or it runs C code that "
                f"does not release Python's lock.",
                SILENT_S,
            )
        case State.STOPPED:
            return Silence(f"{text}: it was stopped by SIGSTOP or Ctrl-Z.", STOPPED_S)
        case State.DEBUGGED:
            return Silence(f"{text}: a debugger has stopped it.", math.inf)
        case State.GONE:
            return Silence(f"{text}: it no longer exists.", 0.0)
        case State.RUNNING:
            return Silence(
                f"{text}: it runs C code that does not release Python's lock, or its host is busy "
                f"or unreachable.",
                SILENT_S,
            )
