"""Ends the processes that a command has started, and removes its folder, when this program ends.

Servers in the background outlive a program that is killed. So a small separate process starts
them: it adopts orphans (PR_SET_CHILD_SUBREAPER of prctl(2)), so that it loses none of them. It
waits until this program ends or closes the guard, and then kills them. Linux only.

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
"""Name of the file with the command's output, in its folder."""
END_S = 20.0
"""Maximum seconds until killed processes are gone."""
MARGIN_S = 10.0
"""Seconds for the guard itself to end after that."""
MAX_OUTPUT = 2000
"""Characters of a command's output in an error: its end."""
_POLL_S = 0.5  # delay until the guard notices that the program was killed
_STEP_S = 0.05  # the same, while the command runs; and the delay until its end is noticed
_REAP_S = 0.02  # between two rounds of killing
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


class ProcessGuard:
    """A command whose processes and folder end with this program.

    Runs the command to its end; processes that it leaves in the background stay.

    Args:
        command: Words of the command.
        folder: Existing folder, which is removed in the end.
        env: Environment of the command.
        timeout_s: Maximum seconds for the command.

    Raises:
        RuntimeError: If the command fails or takes longer; the message contains its output.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str], *, timeout_s: float
    ):
        # `-I -S`: without modules of the user and of site-packages, it starts fast.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,  # so that Ctrl-C reaches only the program
            bufsize=0,
        )
        assert self._process.stdout is not None
        poll = select.poll()  # `select.select` does not support descriptors above 1023
        poll.register(self._process.stdout, select.POLLIN)
        is_ready = poll.poll(timeout_s * 1000)
        code = self._process.stdout.readline().decode().strip() if is_ready else ""
        if code != "0":
            text = ""
            with contextlib.suppress(OSError):
                text = (folder / LOG).read_text(errors="replace")[-MAX_OUTPUT:]
            self.close()
            outcome = f"ended with {code}" if code else f"did not finish within {timeout_s:g} s"
            raise RuntimeError(f"`{' '.join(command)}` {outcome}.\n{text}".rstrip())

    def close(self) -> None:
        """Ends all processes and removes the folder; may be called again."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\n")  # a fork may keep the pipe open, so a byte is sent
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing more can be done here
            self._process.wait(END_S + MARGIN_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# The guard.


def main(program: int, folder: str, command: list[str]) -> None:
    """Runs the command, waits for the program, and ends everything."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A signal to all processes of a job must not end the guard before the others. Handlers, because
    # the command would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with open(os.path.join(folder, LOG), "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    while process.poll() is None and _is_wanted(program, _STEP_S):
        pass
    if process.returncode is not None:
        with contextlib.suppress(OSError):  # the program may be gone
            os.write(1, f"{process.returncode}\n".encode())
    while _is_wanted(program, _POLL_S):
        with contextlib.suppress(ChildProcessError):
            _reap()
    _end_descendants()
    shutil.rmtree(folder, ignore_errors=True)


def _is_wanted(program: int, wait_s: float) -> bool:
    # The program writes to stdin to close the guard. If it dies, the guard gets another parent.
    is_closed, _, _ = select.select([0], [], [], wait_s)
    return not is_closed and os.getppid() == program


def _end_descendants() -> None:
    """Kills descendants until none is left."""
    # Repeats, because a process may have forked just before it was killed. Ends when the guard has
    # no children: orphans become its children.
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            _reap()
        except ChildProcessError:  # no children
            return
        time.sleep(_REAP_S)


def _reap() -> None:
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass


def _descendants(pid: int) -> Iterator[int]:
    """Yields all descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat") as file:
                # State and parent follow the program's name, which may contain any character.
                parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    left = [pid]
    while left:
        of_process = children.get(left.pop(), [])
        yield from of_process
        left += of_process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
