"""Runs a command that may hang; returns its output, and its stack if it had to be ended."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpudist.supervisor.worker_process import WorkerProcess

_GRACE_S = 2.0  # to print its stack, which takes milliseconds
_POLL_S = 0.02


@dataclass(frozen=True)
class ChildOutcome:
    """The result of a command.

    Attributes:
        exit_code: Exit code, or the negative number of the signal that ended it.
        hung: Whether it was ended after the timeout.
        lines: Output, with the stack if it was ended.
    """

    exit_code: int | None
    hung: bool
    lines: Sequence[str]

    def last_lines(self, most: int = 40) -> str:
        """Returns the last lines of the output."""
        return "\n".join(self.lines[-most:])


def run_to_end(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    listen: Callable[[str], None] = lambda line: None,
) -> ChildOutcome:
    """Runs a command, and ends it and its children after a timeout.

    A Python that does not end gets SIGABRT first. It then prints the stacks of its threads, even
    during C code (`faulthandler`).

    Args:
        command: Program and arguments.
        env: Environment variables to add to the environment of this process.
        timeout_s: Seconds until the command is ended.
        listen: Called with each line that the command prints.

    Raises:
        OSError: If there is no such program.
    """
    lines: list[str] = []
    child_env = {"PYTHONFAULTHANDLER": "1", **env}

    def read(_: int, line: str) -> None:
        lines.append(line)
        listen(line)

    child = WorkerProcess(0, command, child_env, read)
    try:
        hung = not _ends_within(child, timeout_s)
        if hung:
            child.send(signal.SIGABRT)
            _ends_within(child, _GRACE_S)
    finally:
        child.kill()
    return ChildOutcome(child.exit_code, hung, tuple(lines))


def _ends_within(child: WorkerProcess, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while child.exit_code is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
