"""The side of processes 1, 2, ... of the rendezvous: they visit process 0. See `rendezvous`."""

import socket
import time

from tpudist.errors import StartupError
from tpudist.processes import rendezvous_messages
from tpudist.processes.rendezvous_messages import LineReader
from tpudist.processes.reported_wait import ReportedWait
from tpudist.processes.startup_address import resolve

STRANGER_S = 4.0
"""Seconds until a listener that does not greet is another program: process 0 greets at once."""
_SLICE_S = 0.5
_RETRY_S = 0.2
_SERVICE_S = 5.0


def visit(host: str, port: int, num_processes: int, index: int, wait: ReportedWait) -> None:
    """Returns when process 0 has answered that all processes have come.

    Raises:
        StartupError: As `rendezvous.join`.
    """
    introduction = rendezvous_messages.encode(rendezvous_messages.introduce(num_processes, index))
    place = f"process 0 at {host}:{port}"
    resolve(host, port)
    problem = "no process listens there"
    # Since when something has listened without a greeting. A refused connection or a greeting
    # resets it; a lost connection does not, because a stranger may close every connection.
    stranger_since: float | None = None
    while not wait.is_over:
        answer: bytes | None = b""
        try:
            with socket.create_connection((host, port), timeout=5.0) as connection:
                stranger_since = stranger_since or time.monotonic()
                reader = LineReader(connection)
                connection.sendall(introduction)
                greeting = reader.read(stranger_since + STRANGER_S)
                if greeting and not rendezvous_messages.is_greeting(greeting):
                    raise rendezvous_messages.stranger_error(host, port)
                if greeting:
                    stranger_since = None
                    answer = _wait_for_answer(reader, index, place, wait)
        except OSError as error:
            problem = str(error)
            if isinstance(error, ConnectionRefusedError):
                stranger_since = None
        if answer:
            rendezvous_messages.check_answer(answer, host, port)
            _wait_for_service(host, port)
            return
        if stranger_since is not None and time.monotonic() > stranger_since + STRANGER_S:
            raise rendezvous_messages.stranger_error(host, port)
        wait.report(
            lambda problem=problem: (
                f"Process {index} of {num_processes} waits for {place} ({problem})"
            )
        )
        time.sleep(_RETRY_S)
    raise StartupError(
        f"Process {index} of {num_processes} could not reach {place} within "
        f"{wait.timeout_s:g} s ({problem}). Check that it was started, and that this host "
        f"({socket.gethostname()}) can reach it."
    )


def _wait_for_service(host: str, port: int) -> None:
    """Returns when JAX's service listens: a process that comes before retries after a full second.

    Also returns after `_SERVICE_S`, because JAX itself waits and reports then.
    """
    deadline = time.monotonic() + _SERVICE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.005)


def _wait_for_answer(
    reader: LineReader, index: int, place: str, wait: ReportedWait
) -> bytes | None:
    while True:
        answer = reader.read(time.monotonic() + _SLICE_S)
        if answer is not None:
            return answer
        wait.report(lambda: f"Process {index} has connected to {place} and waits for the others")
        # Process 0 gives up at `timeout_s` and its answer says why, so it gets some time more.
        if wait.waited_s > wait.timeout_s + 10 * _SLICE_S:
            return None
