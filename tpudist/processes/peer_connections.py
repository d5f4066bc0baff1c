"""Notices at once that a process was killed, by a TCP connection from each process to process 0.

The kernel closes the connection when a process dies, whatever its threads were doing. If a host or
the network fails, keepalive notices it: the kernels answer each other even if a process is stopped
or busy. The others learn the death of process 0 here before JAX, which has lost its coordination
service, aborts them.

Messages, after a greeting with the index and the secret of the process that connects:

| byte | from | meaning |
|---|---|---|
| `.` | process 0, twice a second | process 0 runs Python |
| `E` | either side, last | this process exits in order, or does not serve this peer: no loss |
| `S` | another process, last | this process exits because process 0 was silent |
"""

import contextlib
import hmac
import ipaddress
import secrets
import selectors
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
_PAUSE_S = 0.1  # after a connection that could not be accepted
_THREAD = "tpudist peer connections"
_GREETING_BYTES = 64  # index and secret, padded with spaces: a fixed length needs no parser


class PeerConnections:
    """The connections of this process: one to process 0 or, in process 0, one from each other.

    One thread serves all of them.

    Args:
        index: Index of this process.
        lost: Called in that thread with the index of a process that was killed, and with whether it
            exited because process 0, which is this one, was silent.
    """

    def __init__(self, index: int, lost: Callable[[int, bool], None]):
        self._index, self._lost = index, lost
        # The other process of each connection, after its greeting.
        self._peers: dict[socket.socket, int] = {}
        self._listener: socket.socket | None = None
        # In process 0: the part of each greeting that has arrived, and the deadline for the rest.
        self._greetings: dict[socket.socket, tuple[bytes, float]] = {}
        self._secret = ""
        self._closing, self._has_taken_leave = this_host().event(), this_host().event()
        self._heard_s: float | None = None  # when process 0 last sent a beat, in the others

    def listen(self, address: str) -> str:
        """Listens in process 0; returns port and secret for `connect` in the others.

        Raises:
            OSError: If `address` is not an address of this host.
        """
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
        self._listener = listener = this_host().listen(address, 0, family)
        listener.setblocking(False)
        this_host().start_thread(self._serve, listener, name=_THREAD)
        return f"{listener.getsockname()[1]} {self._secret}"

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
        connection.sendall(f"{self._index} {secret}".encode().ljust(_GREETING_BYTES))
        enable_keepalive(connection)
        connection.setblocking(False)
        self._peers[connection] = 0
        self._heard_s = this_host().monotonic()
        this_host().start_thread(self._serve, connection, name=_THREAD)

    def silence_s(self) -> float:
        """Returns the seconds since process 0 was heard; 0 without a connection."""
        heard_s = self._heard_s  # read once: the thread of the connection may forget it
        return 0.0 if heard_s is None else this_host().monotonic() - heard_s

    def close(self) -> None:
        """Announces that this process exits in order, and closes all connections."""
        self._closing.set()
        for connection in list(self._peers):
            # A process that is stopped does not read. It gets neither this nor anything else.
            with contextlib.suppress(OSError):
                connection.send(_EXIT)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        self._has_taken_leave.set()

    def give_up(self) -> None:
        """Announces to process 0, which is silent, that this process exits for that reason.

        Process 0 reads it if it continues. Otherwise it would take this exit for a loss.
        """
        for connection in list(self._peers):
            with contextlib.suppress(OSError):
                connection.send(_GIVES_UP)

    def _serve(self, first: socket.socket) -> None:
        """Serves the listener of process 0, or the connection of another process, until the end."""
        with this_host().selector() as selector:
            selector.register(first, selectors.EVENT_READ)
            next_beat_s = this_host().monotonic() + _BEAT_S
            while selector.get_map() and not self._closing.is_set():
                left_s = next_beat_s - this_host().monotonic() if first is self._listener else None
                for key, _ in selector.select(left_s and max(left_s, 0.0)):
                    assert isinstance(key.fileobj, socket.socket), key
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._receive(key.fileobj, selector)
                if first is self._listener and this_host().monotonic() >= next_beat_s:
                    next_beat_s = this_host().monotonic() + _BEAT_S
                    self._send_beats()
                    self._drop_late(selector)
        if self._closing.is_set():
            # A connection that closes before its farewell would be a loss to the other process.
            self._has_taken_leave.wait()
        for connection in (first, *self._greetings, *self._peers):
            connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            while not self._closing.is_set():
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                try:
                    selector.register(connection, selectors.EVENT_READ)
                except OSError:
                    _turn_away(connection)
                    raise
                self._greetings[connection] = b"", this_host().monotonic() + _CONNECT_S
        except BlockingIOError:  # there are no more
            pass
        except OSError:  # the peer has gone again, or the kernel is out of descriptors or memory
            self._closing.wait(_PAUSE_S)

    def _receive(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Reads the greeting or the messages of a connection that has data or has ended."""
        # A connection ends with an exit message, with the end of the stream when the kernel of a
        # dead process closes it, or with an error: a reset by a host that has restarted, or no
        # answer for `DEAD_PEER_S`.
        before, _ = self._greetings.get(connection, (b"", 0.0))
        is_greeting = connection in self._greetings
        try:
            data = connection.recv(_GREETING_BYTES - len(before))
        except BlockingIOError:  # it had data, which the kernel has dropped
            return
        except OSError:
            data = b""
        if is_greeting and data:
            self._greet(connection, before + data, selector)
        elif data and set(data) == set(_BEAT):
            self._heard_s = this_host().monotonic()
        else:
            index = self._peers.get(connection)
            self._forget(connection, selector)
            if index is not None and _EXIT not in data and not self._closing.is_set():
                self._lost(index, _GIVES_UP in data)

    def _greet(
        self, connection: socket.socket, data: bytes, selector: selectors.BaseSelector
    ) -> None:
        """Identifies a peer whose greeting is complete; drops peers with a wrong secret."""
        if len(data) < _GREETING_BYTES:
            self._greetings[connection] = data, self._greetings[connection][1]
            return
        index, _, secret = data.decode(errors="replace").strip().partition(" ")
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            self._forget(connection, selector)
            return
        del self._greetings[connection]
        with contextlib.suppress(OSError):  # it has ended; the next read notices that
            enable_keepalive(connection)
            connection.setblocking(False)
        self._peers[connection] = int(index)

    def _forget(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        self._greetings.pop(connection, None)
        self._peers.pop(connection, None)
        self._heard_s = None  # without a connection, its silence means nothing
        connection.close()

    def _send_beats(self) -> None:
        for connection in list(self._peers):
            # A stopped process does not read, and its buffer fills: that must not stop this thread.
            with contextlib.suppress(OSError):
                connection.send(_BEAT)

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        now = this_host().monotonic()
        for connection in [x for x, (_, late_s) in self._greetings.items() if now > late_s]:
            selector.unregister(connection)
            del self._greetings[connection]
            _turn_away(connection)


def _turn_away(connection: socket.socket) -> None:
    """Closes a connection that may be of a peer, which must not take that for a loss."""
    with contextlib.suppress(OSError):
        connection.send(_EXIT)
    connection.close()


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
