"""The other processes' side of the rendezvous: they visit process 0. See `rendezvous`."""

from tpudist.errors import StartupError
from tpudist.processes import rendezvous_messages
from tpudist.processes.host import this_host
from tpudist.processes.rendezvous_messages import LineReader
from tpudist.processes.reported_wait import ReportedWait
from tpudist.processes.startup_address import resolve

STRANGER_S = 4.0
"""Seconds until a listener that does not greet is another program: process 0 greets at once."""
_CONNECT_S = 5.0
_RETRY_S = 0.2  # between two visits
_SLICE_S = 0.5  # between two looks at the clock
_EXTRA_S = 5.0  # process 0 gives up at the limit, and its answer, which says why, takes a moment
_SERVICE_RETRY_S, _LONGEST_SERVICE_RETRY_S = 0.005, 0.05
_CONNECTIONS_PER_S = 10_000  # that all processes together try at one host
_SERVICE_S = 5.0  # for JAX's service to listen; after that JAX itself waits and reports


def visit(host: str, port: int, num_processes: int, index: int, wait: ReportedWait) -> None:
    """Returns when process 0 has answered that all processes have come.

    Raises:
        StartupError: As `rendezvous.join`.
    """
    resolve(host, port)
    process_0 = _Process0(host, port, num_processes, index)
    who, place = f"Process {index} of {num_processes}", f"process 0 at {host}:{port}"
    while not wait.is_over:
        answer = process_0.visit(wait)
        if answer is not None:
            rendezvous_messages.check_answer(answer, host, port)
            _wait_for_service(host, port, num_processes)
            return
        wait.report(lambda: f"{who} waits for {place} ({process_0.problem})")
        this_host().sleep(_RETRY_S)
    raise StartupError(
        f"{who} could not reach {place} within {wait.timeout_s:g} s ({process_0.problem}). Check "
        f"that it was started, and that this host ({this_host().name()}) can reach it."
    )


class _Process0:
    """Process 0, or whatever listens at its address.

    Attributes:
        problem: Reason why the last visit brought no answer.
    """

    def __init__(self, host: str, port: int, num_processes: int, index: int):
        self.problem = "no process listens there"
        self._host, self._port, self._index = host, port, index
        self._introduction = rendezvous_messages.encode(
            rendezvous_messages.introduce(num_processes, index)
        )
        # Since when something has listened without a greeting. A refused connection or a greeting
        # resets it; a lost connection does not, because a stranger may close every connection.
        self._silent_since_s: float | None = None

    def visit(self, wait: ReportedWait) -> bytes | None:
        """Connects once; returns the answer, or None if there is none yet.

        Raises:
            StartupError: If another program listens.
        """
        answer: bytes | None = None
        try:
            with this_host().connect(self._host, self._port, _CONNECT_S) as connection:
                if self._silent_since_s is None:
                    self._silent_since_s = this_host().monotonic()
                reader = LineReader(connection)
                connection.sendall(self._introduction)
                greeting = reader.read(self._silent_since_s + STRANGER_S)
                if greeting and not rendezvous_messages.is_greeting(greeting):
                    raise rendezvous_messages.stranger_error(self._host, self._port)
                if greeting:
                    self._silent_since_s = None
                    answer = self._wait_for_answer(reader, wait)
        except OSError as error:
            self.problem = str(error)
            if isinstance(error, ConnectionRefusedError):
                self._silent_since_s = None
        if answer:  # not empty, as after a lost connection
            return answer
        silent_since_s = self._silent_since_s
        if silent_since_s is not None and this_host().monotonic() > silent_since_s + STRANGER_S:
            raise rendezvous_messages.stranger_error(self._host, self._port)
        return None

    def _wait_for_answer(self, reader: LineReader, wait: ReportedWait) -> bytes | None:
        """Returns the answer, b"" if the connection is lost, or None if none arrives in time."""
        while True:
            answer = reader.read(this_host().monotonic() + _SLICE_S)
            if answer is not None:
                return answer
            wait.report(
                lambda: (
                    f"Process {self._index} has connected to process 0 at "
                    f"{self._host}:{self._port} and waits for the others"
                )
            )
            if wait.waited_s > wait.timeout_s + _EXTRA_S:
                return None


def _wait_for_service(host: str, port: int, num_processes: int) -> None:
    """Returns when JAX's service listens: a process that comes before retries after a full second.

    Also returns after `_SERVICE_S`.
    """
    deadline = this_host().monotonic() + _SERVICE_S
    # A refused connection costs little, but thousands of processes ask one host. The pauses grow,
    # because many processes on the host of process 0 would keep it from starting the service.
    pause_s = max(_SERVICE_RETRY_S, num_processes / _CONNECTIONS_PER_S)
    longest_s = max(_LONGEST_SERVICE_RETRY_S, pause_s)
    while this_host().monotonic() < deadline:
        try:
            this_host().connect(host, port, 1.0).close()
            return
        except OSError:
            this_host().sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
