"""A process that becomes the same program again, started anew, with its number and its state.

For devices that only the end of a program gives back, such as those of a TPU: the new program
replaces the old one in its process (`exec`), so that nothing of the old one is left, and those who
watch the process see the same one. What it keeps is the connection to the supervisor, and the state
of the run in a file that is memory and has no name.
"""

import dataclasses
import os
import sys
import time
from typing import NoReturn

from tpudist.goodput import goodput
from tpudist.preemption.survival import state_transfer
from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import generations
from tpudist.processes.json_lines import JsonLines

_KEPT = "TPUDIST_KEPT"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is left of the program that ran in this process before.

    Attributes:
        line: To the supervisor.
        state: The newest that it had.
    """

    line: JsonLines
    state: StateCopy | None


def why_not() -> str:
    """Why a program cannot be replaced so on this system; empty where it can."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        return ""
    return f"{sys.platform} has no in-memory files that outlive a program (Linux has memfd_create)"


def take() -> Kept | None:
    """What the program before this one has kept, once; None if this is the first one."""
    kept = os.environ.pop(_KEPT, None)
    if kept is None:
        return None
    line, state = map(int, kept.split())
    os.set_inheritable(line, False)
    return Kept(
        JsonLines.of_descriptor(line),
        state_transfer.take_from_memory(state) if state >= 0 else None,
    )


def restart(line: JsonLines, state: StateCopy | None) -> NoReturn:
    """Replaces this program by itself, started anew; what its threads do ends in its midst."""
    descriptors = [line.fileno(), -1 if state is None else state_transfer.put_into_memory(state)]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # those of libraries hold devices
            try:
                os.set_inheritable(int(name), int(name) in descriptors)
            except OSError:  # closed by now
                pass
    os.environ[_KEPT] = " ".join(map(str, descriptors))
    goodput.close()
    os.environ[goodput.REPLACED_AT] = repr(time.time())
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(os.environ.get(generations.FOLDER, "."))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
