"""One process of a run: started, its output read line by line, and ended with all it made."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tpudist.processes import process_state

# Asks Linux to kill the process when the one that has started it dies, and becomes the program.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit(75)  # it has died already
os.execvp(sys.argv[2], sys.argv[2:])
"""


class WorkerProcess:
    """A process that runs a command, in a group of its own.

    Attributes:
        index: Its number in the run.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        env: Mapping[str, str],
        write: Callable[[int, str], None],
    ):
        """Starts it, from the thread that lives longest: on Linux it dies with that one.

        Args:
            index: Its number.
            command: The program and its arguments.
            env: More environment variables.
            write: Called with its number and each line that it prints, without the line's end.

        Raises:
            OSError: There is no such program.
        """
        if sys.platform == "linux":
            leash = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            command = [*leash, *command]
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
        """None while it runs; the negative number of the signal that has ended it."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether its kernel says that it is stopped, by SIGSTOP or Ctrl-Z."""
        place = process_state.here(self._process.pid)
        return process_state.find(place) is process_state.State.STOPPED

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it runs still."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it, and what it has started and left behind."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all have ended
            pass
        self._process.wait()
        self._reader.join(1.0)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._write(self.index, line.decode(errors="replace").rstrip("\r\n"))
