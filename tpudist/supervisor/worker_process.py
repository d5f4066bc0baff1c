"""WorkerProcess: a child process whose output is read by line and that ends with its children."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from tpudist.processes import process_state
from tpudist.processes.exit_codes import EXIT_PEER_LOST

# A small program that becomes the command. First it asks Linux to kill it when its parent dies
# (PR_SET_PDEATHSIG is 1), even by SIGKILL. The setting survives exec. `preexec_fn` could do the
# same, but is not safe in a process with threads.
_DIE_WITH_PARENT = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit({EXIT_PEER_LOST})  # the parent died before prctl
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Worker(Protocol):
    """A child process of a supervisor."""

    @property
    def index(self) -> int:
        """Number of the process in the run."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or Ctrl-Z."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process if it is running."""
        ...

    def kill(self) -> None:
        """Kills the process and all processes that it started."""
        ...


class WorkerProcess:
    """A process that runs a command, in a process group of its own.

    Create it in a thread that lives as long as the process is needed: Linux kills the process when
    the thread that started it ends.

    Args:
        index: Number of the process in the run.
        command: Program and arguments.
        env: Environment variables to add to the environment of this process.
        write: Called in a thread with `index` and each line of output, without the line's end.

    Attributes:
        index: Number of the process in the run.

    Raises:
        OSError: If there is no such program.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        env: Mapping[str, str],
        write: Callable[[int, str], None],
    ):
        if sys.platform == "linux":
            prefix = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            command = [*prefix, *command]
        self.index = index
        self._write = write
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children can be ended with it
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or Ctrl-Z."""
        place = process_state.here(self._process.pid)
        return process_state.find(place) is process_state.State.STOPPED

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process if it is running."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and all processes that it started."""
        # Also if the process itself has ended: its children keep the group, and its number, in use.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        # `wait` removes the zombie. The reader ends when nobody has the pipe open any more; a child
        # in another process group may keep it open, hence the limit.
        self._process.wait()
        self._reader.join(1.0)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._write(self.index, line.decode(errors="replace").rstrip("\r\n"))
