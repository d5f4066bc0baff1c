"""Restarts the program in its own process (`exec`), and keeps its connection and its state.

For devices that are released only when a program ends, such as a TPU's. The process stays the same
for the supervisor, with its pid. Two descriptors survive: the connection to the supervisor, and an
anonymous file in memory with the state of the run.
"""

import dataclasses
import os
import sys
import time
from typing import NoReturn

from tpudist.goodput import goodput
from tpudist.preemption.survival import state_transfer
from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import supervisor_variables
from tpudist.processes.json_lines import JsonConnection

_KEPT_VARIABLE = "TPUDIST_KEPT"  # has the two descriptors, -1 for no state


@dataclasses.dataclass(frozen=True)
class PreviousProgram:
    """Remains of the program that ran in this process before.

    Attributes:
        connection: Connection to the supervisor.
        state: Newest state of the program, if it had one.
    """

    connection: JsonConnection
    state: StateCopy | None


def why_not_supported() -> str:
    """Returns why this system does not support it, or ""."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        return ""
    return f"{sys.platform} has no in-memory files that outlive a program (Linux has memfd_create)"


def take_previous() -> PreviousProgram | None:
    """Returns the remains of the previous program, once; None if this is the first program."""
    descriptors = os.environ.pop(_KEPT_VARIABLE, None)
    if descriptors is None:
        return None
    connection, state = map(int, descriptors.split())
    # Otherwise a child of the program would keep the connection open after the program's end. The
    # descriptor of the state is closed below.
    os.set_inheritable(connection, False)
    return PreviousProgram(
        JsonConnection.of_descriptor(connection),
        state_transfer.read_from_memory(state) if state >= 0 else None,
    )


def restart(connection: JsonConnection, state: StateCopy | None) -> NoReturn:
    """Replaces this program by a new start of itself. All other threads end where they are."""
    state_descriptor = -1 if state is None else state_transfer.write_to_memory(state)
    descriptors = [connection.fileno(), state_descriptor]
    for name in os.listdir("/proc/self/fd"):
        # Libraries may have made their descriptors inheritable; these would keep devices open.
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), int(name) in descriptors)
            except OSError:  # closed meanwhile
                pass
    os.environ[_KEPT_VARIABLE] = " ".join(map(str, descriptors))
    goodput.close()
    os.environ[goodput.REPLACED_AT] = repr(time.time())
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(os.environ.get(supervisor_variables.FOLDER_VARIABLE, "."))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
