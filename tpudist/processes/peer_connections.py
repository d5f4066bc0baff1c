"""Notices at once that a process was killed, by a TCP connection from each process to process 0.

The kernel closes the connection when a process dies, whatever its threads were doing. If a host or
the network fails, keepalive notices it: the kernels answer each other even if a process is stopped
or busy. The others learn the death of process 0 here before JAX, which has lost its coordination
service, aborts them.

Messages, after a greeting with the index and the secret of the process that connects:

| byte | from | meaning |
|---|---|---|
| `.` | process 0, twice a second | process 0 runs Python |
| `E` | either side, last | this process exits in order: its end is not a loss |
| `S` | another process, last | this process exits because process 0 was silent |
"""

import contextlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable

from tpudist.processes.host import this_host

DEAD_PEER_S = 15.0
"""Seconds without an answer of the other kernel after which a connection is given up."""
_EXIT = b"E"
_GIVES_UP = b"S"
_BEAT = b"."
_BEAT_S = 0.5
_CONNECT_S = 10.0
_GREETING_BYTES = 64  # index and secret, padded with spaces: a fixed length needs no parser


class PeerConnections:
    """The connections of this process: one to process 0 or, in process 0, one from each other.

    Args:
        index: Index of this process.
        lost: Called in a thread with the index of a process that was killed, and with whether it
            exited because process 0, which is this one, was silent.
    """

    def __init__(self, index: int, lost: Callable[[int, bool], None]):
        self._index, self._lost = index, lost
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._secret = ""
        self._closing = this_host().event()
        self._heard_s: float | None = None  # when process 0 last sent a beat, in the others

    def listen(self, address: str) -> str:
        """Listens in process 0; returns port and secret for `connect` in the others.

        Raises:
            OSError: If `address` is not an address of this host.
        """
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
        self._listener = this_host().listen(address, 0, family)
        _start_thread(self._accept)
        _start_thread(self._beat)
        return f"{self._listener.getsockname()[1]} {self._secret}"

    def connect(self, address: str, port_and_secret: str) -> None:
        """Connects to process 0.

        Args:
            address: Address of the host of process 0.
            port_and_secret: Result of its `listen`.

        Raises:
            OSError: If it cannot be reached.
        """
        port, secret = port_and_secret.split()
        connection = this_host().connect(address, int(port), _CONNECT_S)
        enable_keepalive(connection)
        connection.sendall(f"{self._index} {secret}".encode().ljust(_GREETING_BYTES))
        self._sockets.append(connection)
        self._heard_s = this_host().monotonic()
        _start_thread(self._wait_for_end, connection, 0)

    def silence_s(self) -> float:
        """Returns the seconds since process 0 was heard; 0 without a connection."""
        return 0.0 if self._heard_s is None else this_host().monotonic() - self._heard_s

    def close(self) -> None:
        """Announces that this process exits in order, and closes all connections."""
        self._closing.set()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.sendall(_EXIT)
                connection.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def give_up(self) -> None:
        """Announces to process 0, which is silent, that this process exits for that reason.

        Process 0 reads it if it continues. Otherwise it would take this exit for a loss.
        """
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.send(_GIVES_UP, socket.MSG_DONTWAIT)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # this process closes, or the peer has gone again
                continue
            _start_thread(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """Identifies the peer and then waits for its end; drops peers with a wrong secret."""
        try:
            connection.settimeout(_CONNECT_S)
            greeting = connection.recv(_GREETING_BYTES, socket.MSG_WAITALL).decode(errors="replace")
            enable_keepalive(connection)
        except OSError:
            greeting = ""
        index, _, secret = greeting.strip().partition(" ")
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            connection.close()
            return
        self._sockets.append(connection)
        self._wait_for_end(connection, int(index))

    def _wait_for_end(self, connection: socket.socket, index: int) -> None:
        # Ends with an exit message, with the end of the stream when the kernel of a dead process
        # closes it, or with an error: a reset by a host that has restarted, or no answer for
        # `DEAD_PEER_S`.
        with connection:
            try:
                while (message := connection.recv(1)) == _BEAT:
                    self._heard_s = this_host().monotonic()
            except OSError:
                message = b""
        if message != _EXIT and not self._closing.is_set():
            self._lost(index, message == _GIVES_UP)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_S):
            for connection in list(self._sockets):
                # A stopped process does not read, and its buffer fills: that must not stop this
                # thread, so it does not wait.
                with contextlib.suppress(OSError):
                    connection.send(_BEAT, socket.MSG_DONTWAIT)


def enable_keepalive(connection: socket.socket) -> None:
    """Makes the kernel give up a connection whose other kernel is silent for `DEAD_PEER_S`.

    Operations of the socket then wait without another limit.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Idle connections are probed after 1/3 of the time and then four times, 1/6 apart: 1/3 + 4/6.
    # TCP_USER_TIMEOUT is the same limit for a connection with data that was not acknowledged,
    # where the kernel sends no probes.
    options = {
        "TCP_KEEPIDLE": DEAD_PEER_S / 3,  # s
        "TCP_KEEPINTVL": DEAD_PEER_S / 6,  # s
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": DEAD_PEER_S * 1000,  # ms
    }
    for name, value in options.items():
        if (number := getattr(socket, name, None)) is not None:  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, number, int(value))


def is_ipv6(host: str) -> bool:
    """Whether `host` is a numeric IPv6 address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


def _start_thread(run: Callable[..., None], *args: object) -> None:
    this_host().start_thread(run, *args, name="tpudist peer connection")
