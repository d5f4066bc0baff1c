"""Ends what a command has started, and removes its folder, when this program ends: however it ends.

Servers that put themselves in the background outlive a program that is killed. So a small process
of its own starts them: orphans become its children (PR_SET_CHILD_SUBREAPER of prctl(2), Linux), so
that none of them is lost sight of, and it waits for this program to end, or to say that it is done.

The guard is this file, run as a script: it imports neither tpudist nor JAX.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LOG = "start.log"
"""What the command has printed, in its folder."""
END_S = 20.0
"""How long the processes of the command have to go, once they are killed."""
_POLL_S = 0.5  # a program that is killed is seen so late
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


class ProcessGuard:
    """A command whose processes and folder go with this program."""

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str], *, timeout_s: float
    ):
        """Runs the command to its end; what it leaves in the background stays.

        Args:
            command: Its words.
            folder: Removed in the end. Exists already.
            env: The environment of the command.
            timeout_s: How long the command may take.

        Raises:
            RuntimeError: It fails, or takes longer; with what it has printed.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,  # a Ctrl-C is for the program
            bufsize=0,
        )
        assert self._process.stdout is not None
        poll = select.poll()  # `select.select` has no room for numbers above 1023
        poll.register(self._process.stdout, select.POLLIN)
        came = poll.poll(timeout_s * 1000)
        code = self._process.stdout.readline().decode().strip() if came else ""
        if code != "0":
            text = ""
            with contextlib.suppress(OSError):
                text = (folder / LOG).read_text(errors="replace")[-2000:]
            self.close()
            how = f"ended with {code}" if code else f"did not finish within {timeout_s:g} s"
            raise RuntimeError(f"`{' '.join(command)}` {how}.\n{text}".rstrip())

    def close(self) -> None:
        """Ends all processes and removes the folder; may be called again."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\n")  # a fork of this program may hold the pipe open
        self._process.wait(END_S + 10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# The guard.


def main(program: int, folder: str, command: list[str]) -> None:
    """Runs the command, waits for the program, and ends what there is."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Who ends all processes of a job means this one last. SIG_IGN would be inherited.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with open(os.path.join(folder, LOG), "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    while process.poll() is None and _is_wanted(program, 0.05):
        pass
    if process.returncode is not None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(1, f"{process.returncode}\n".encode())
    while _is_wanted(program, _POLL_S):
        with contextlib.suppress(ChildProcessError):
            _reap()
    _end_descendants()
    shutil.rmtree(folder, ignore_errors=True)


def _is_wanted(program: int, wait_s: float) -> bool:
    said_so, _, _ = select.select([0], [], [], wait_s)
    return not said_so and os.getppid() == program


def _end_descendants() -> None:
    """Kills until there is nobody: who was about to start a process may have done so."""
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            _reap()
        except ChildProcessError:  # there are no children
            return
        time.sleep(0.02)


def _reap() -> None:
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass


def _descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat") as file:
                # After the name of the program, which may hold anything: the state, the parent.
                parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    left = [pid]
    while left:
        found = children.get(left.pop(), [])
        yield from found
        left += found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
