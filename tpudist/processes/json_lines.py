"""TCP connections that carry one JSON object per line, and bytes; each side notices the end.

The supervisor and its processes talk this way. A connection begins with a secret in plain text:
use it in a private network only.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from tpudist.processes.host import this_host
from tpudist.processes.peer_connections import enable_keepalive, is_ipv6

_CONNECT_S = 10.0
_SECRET_BYTES = 32  # hexadecimal digits: 128 bits


class JsonConnection:
    """One connection, to which any thread may write lines, and from which one thread reads.

    Args:
        connection: Connected socket; this object closes it.
    """

    def __init__(self, connection: socket.socket):
        enable_keepalive(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file: IO[bytes] = connection.makefile("rb")
        self._lock = this_host().lock()  # lines of two threads must not mix

    @classmethod
    def of_descriptor(cls, descriptor: int) -> "JsonConnection":
        """Returns the connection of an inherited descriptor; see `skip_to`."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Returns the descriptor of the socket."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a line with `message` as an object.

        Raises:
            OSError: If the other side has gone.
        """
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: bytes | np.ndarray) -> None:
        """Sends bytes, after a line that contains their number.

        No other thread may send meanwhile: its line would be read as a part of the bytes.
        """
        self._socket.sendall(data)

    def read_bytes(self, count: int) -> bytes:
        """Returns `count` bytes that the other side sent by `send_bytes`.

        Raises:
            OSError: If the connection ends before.
        """
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionError(f"The connection ended after {len(data)} of {count} bytes.")
        return data

    def read(self) -> dict[str, Any] | None:
        """Returns the next line, or None if the other side has gone."""
        try:
            line = self._file.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def skip_to(self, key: str) -> None:
        """Reads up to and including the next line that has `key`.

        A program that took over the connection from another one begins with this: the first line
        that it sees may be incomplete.

        Raises:
            OSError: If the other side has gone.
        """
        while line := self._file.readline():
            try:
                if key in json.loads(line):
                    return
            except ValueError:  # the rest of a line that the earlier program began to read
                pass
        raise ConnectionError("The connection has ended.")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields lines until the other side has gone."""
        while (message := self.read()) is not None:
            yield message

    def local_host(self) -> str:
        """Returns the address of this side."""
        return self._socket.getsockname()[0]

    def close(self) -> None:
        """Ends the connection for both sides."""
        # `close` alone does not wake a thread that reads; `shutdown` does. `_file` is closed with
        # the last reference to it: a thread that reads has its lock.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            pass
        self._socket.close()


class Listener:
    """A server that accepts connections from peers that know the secret.

    Args:
        host: Address of this host; the server listens on no other.
        secret: 32 characters; see `make_secret`.
        serve: Called with each connection, in a thread of its own.
        port: Port to listen on; 0 for any free port.

    Attributes:
        port: Port on which it listens.

    Raises:
        OSError: If `host` is not an address of this host, or the port is taken.
    """

    def __init__(
        self, host: str, secret: str, serve: Callable[[JsonConnection], None], *, port: int = 0
    ):
        self._secret, self._serve = secret, serve
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        self._socket = this_host().listen(host, port, family)
        self.port: int = self._socket.getsockname()[1]
        _start_thread(self._accept)

    def close(self) -> None:
        """Stops listening; open connections stay open."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # some systems refuse this for a socket that only listens
            pass
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:  # closed; else the peer went before it was accepted
                    return
                continue
            _start_thread(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_CONNECT_S)
                greeting = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL)
            except OSError:
                return
            if hmac.compare_digest(greeting, self._secret.encode()):
                self._serve(JsonConnection(connection))


def connect(host: str, port: int, secret: str, timeout_s: float = _CONNECT_S) -> JsonConnection:
    """Connects to a `Listener`.

    Raises:
        OSError: If it cannot be reached.
    """
    connection = this_host().connect(host, port, timeout_s)
    connection.sendall(secret.encode())
    return JsonConnection(connection)


def make_secret() -> str:
    """Returns a random secret for a `Listener`."""
    return secrets.token_hex(_SECRET_BYTES // 2)


def _start_thread(run: Callable[..., None], *args: object) -> None:
    this_host().start_thread(run, *args, name="tpudist connection")
