"""Process 0's side of the rendezvous: it receives the other processes. See `rendezvous`."""

import contextlib
import logging
import selectors
import socket
from collections.abc import Iterable

from tpudist.errors import StartupError
from tpudist.options.member_names import format_members
from tpudist.processes import rendezvous_messages
from tpudist.processes.host import this_host
from tpudist.processes.rendezvous_messages import Introduction, LineReader
from tpudist.processes.reported_wait import ReportedWait
from tpudist.processes.startup_address import listen

_log = logging.getLogger("tpudist")

HOLDER_S = 2.0
"""Seconds to wait for another program that has the port to identify itself."""
LATE_S = 6.0
"""Seconds for which process 0 reports an error to processes that arrive late."""
_SLICE_S = 0.5  # between two looks at the clock
_SEND_S = 0.5  # an answer fits into the buffer of a connection, unless the guest is dead
_CLOSE_S = 2.0  # for all guests together to close their connections


def receive(host: str, port: int, num_processes: int, wait: ReportedWait) -> None:
    """Returns when all processes have introduced themselves and have got their answer.

    Raises:
        StartupError: As `rendezvous.join`.
    """
    try:
        server = listen(host, port)
    except StartupError:
        _ask_port_holder(host, port, num_processes)
        raise
    with server, this_host().selector() as selector:
        guests = _Guests(num_processes)
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        try:
            while guests.missing:
                _serve_guests(server, selector, guests)
                wait.report(
                    lambda: (
                        f"Process 0 at {host}:{port} waits for "
                        f"{format_members('process', guests.missing)} of {num_processes}"
                    )
                )
                if wait.is_over and guests.missing:
                    missing = format_members("process", guests.missing)
                    raise StartupError(
                        f"Of {num_processes} processes, {missing} did not connect to {host}:{port} "
                        f"within {wait.timeout_s:g} s. Check that it was started, that it "
                        f"uses this address, and that its host can reach this one."
                    )
            # Before the answer: guests take the next program that listens here for JAX's service.
            server.close()
            guests.answer({"ok": True})
        except StartupError as error:
            guests.answer({"error": str(error)})
            if not wait.is_over:
                _answer_late_guests(server, guests, str(error))
            raise
        finally:
            guests.close()


def _serve_guests(
    server: socket.socket, selector: selectors.BaseSelector, guests: "_Guests"
) -> None:
    """Accepts new guests and reads what the others have sent, for at most `_SLICE_S`."""
    for key, _ in selector.select(_SLICE_S):
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        if connection is server:
            with contextlib.suppress(OSError):  # the guest has gone again
                guest, _ = server.accept()
                guest.setblocking(False)
                guests.open(guest)
                selector.register(guest, selectors.EVENT_READ)
        elif not guests.read(connection):
            selector.unregister(connection)
            connection.close()


def _answer_late_guests(server: socket.socket, guests: "_Guests", problem: str) -> None:
    """Reports an error to processes that have not arrived yet, which would wait for 300 s."""
    deadline = this_host().monotonic() + LATE_S
    num_late = guests.num_expected - guests.num_introduced
    if num_late > 0:
        _log.warning(
            "The run cannot start. Notifying the other processes for %g s: %s", LATE_S, problem
        )
    server.settimeout(0.1)
    # Not all open connections count: a stranger may have one.
    while num_late > 0 and this_host().monotonic() < deadline:
        with contextlib.suppress(OSError):
            guest, _ = server.accept()
            num_late -= 1
            guests.open(guest)
            guests.answer({"error": problem}, [guest])


def _ask_port_holder(host: str, port: int, num_processes: int) -> None:
    """Introduces this process to the program that has its port, if that is another process 0.

    The other process 0 then reports to all processes that two have the number 0.

    Raises:
        StartupError: If there is another process 0; with its report.
    """
    with contextlib.suppress(OSError):
        with this_host().connect(host, port, _SLICE_S) as connection:
            reader = LineReader(connection)
            if rendezvous_messages.is_greeting(reader.read(this_host().monotonic() + HOLDER_S)):
                introduction = rendezvous_messages.introduce(num_processes, 0)
                connection.sendall(rendezvous_messages.encode(introduction))
                if answer := reader.read(this_host().monotonic() + HOLDER_S):
                    rendezvous_messages.check_answer(answer, host, port)


class _Guests:
    """The processes that have connected to process 0.

    Attributes:
        num_expected: Number of processes that are expected to connect, also after an error.
        num_introduced: Number of processes that have introduced themselves.
        missing: Numbers of the other processes.
    """

    def __init__(self, num_processes: int):
        self._own = rendezvous_messages.introduce(num_processes, 0)
        # Text of each open connection, and the connection of each process that is introduced.
        # A guest that closes its connection leaves both, so that it may come again.
        self._texts: dict[socket.socket, bytes] = {}
        self._known: dict[int, tuple[socket.socket, Introduction]] = {}
        self.num_expected = num_processes - 1
        self.num_introduced = 0
        self.missing = set(range(1, num_processes))
        # Once for all guests: it looks up a version.
        self._greeting = rendezvous_messages.make_greeting()

    def open(self, connection: socket.socket) -> None:
        self._texts[connection] = b""
        with contextlib.suppress(OSError):  # `read` notices that it has gone
            connection.sendall(self._greeting)

    def read(self, connection: socket.socket) -> bool:
        """Reads available data; returns whether to keep the connection.

        Raises:
            StartupError: If the process does not fit this run.
        """
        try:
            data = connection.recv(rendezvous_messages.MAX_BYTES)
        except OSError:
            data = b""
        self._texts[connection] += data
        text = self._texts[connection]
        if not data or len(text) > rendezvous_messages.MAX_BYTES:
            del self._texts[connection]
            gone = [i for i, x in self._known.items() if x[0] is connection]
            for i in gone:
                del self._known[i]
            self.missing.update(i for i in gone if i < self._own["count"])
            self.num_introduced = len(self._known)
            return False
        if text.endswith(b"\n"):
            introduction = rendezvous_messages.parse_introduction(text)
            if introduction is None:
                del self._texts[connection]
                return False
            self._admit(connection, introduction)
        return True

    def _admit(self, connection: socket.socket, guest: Introduction) -> None:
        index, host = guest["index"], self._own
        # After an error, guests that are still expected get it, too: by the larger of both counts.
        self.num_expected = max(self.num_expected, guest["count"] - 1)
        self.num_introduced += 1
        # This guest, unless another one had the number before.
        known_connection, known = self._known.setdefault(index, (connection, guest))
        self.missing.discard(index)
        for name, theirs, ours in (
            ("number of processes", guest["count"], host["count"]),
            ("version of jax", guest["jax"], host["jax"]),
            ("version of tpudist", guest["tpudist"], host["tpudist"]),
        ):
            if theirs != ours:
                raise StartupError(
                    f"Process {index} ({guest['who']}) has {name} {theirs}, but process 0 "
                    f"({host['who']}) has {ours}. All processes of a run must have the same {name}."
                )
        if known_connection is not connection or index == 0:
            other = host if index == 0 else known
            self.num_expected += 1  # this guest is one more than there are numbers
            raise StartupError(
                f"Two processes have the number {index}: {other['who']}; {guest['who']}. Give each "
                f"process its own number, from 0 to {host['count'] - 1}, such as the index of its "
                f"task in TF_CONFIG."
            )

    def answer(self, answer: object, guests: Iterable[socket.socket] | None = None) -> None:
        """Sends an answer to some guests, by default to all."""
        for connection in self._texts if guests is None else guests:
            with contextlib.suppress(OSError):
                connection.settimeout(_SEND_S)
                connection.sendall(rendezvous_messages.encode(answer))

    def close(self) -> None:
        """Closes all connections, after the guests have closed theirs."""
        # The side that closes first keeps the port in TIME_WAIT for a minute, and JAX needs it.
        deadline = this_host().monotonic() + _CLOSE_S
        for connection in self._texts:
            with contextlib.suppress(OSError):
                while this_host().monotonic() < deadline and connection.recv(
                    rendezvous_messages.MAX_BYTES
                ):
                    pass
            connection.close()
