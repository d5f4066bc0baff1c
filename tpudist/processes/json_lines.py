"""Connections that carry one JSON text per line, whose end both sides notice."""

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from tpudist.processes.process_lines import is_v6, watch_link

_CONNECT_S = 10.0
_GREETING = 32  # bytes of the secret, in hexadecimal


class JsonLines:
    """One connection."""

    def __init__(self, connection: socket.socket):
        """Of a socket, which it closes."""
        watch_link(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file: IO[bytes] = connection.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def of_descriptor(cls, descriptor: int) -> "JsonLines":
        """One that another program in this process has opened; see `skip_to`."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a line.

        Raises:
            OSError: The other side has gone.
        """
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: Any) -> None:
        """Sends bytes after a line that has said how many."""
        self._socket.sendall(data)

    def read_bytes(self, count: int) -> bytes:
        """What `send_bytes` has sent.

        Raises:
            OSError: There is less.
        """
        found = self._file.read(count)
        if len(found) < count:
            raise ConnectionError(f"The connection ended after {len(found)} of {count} bytes.")
        return found

    def read(self) -> dict[str, Any] | None:
        """The next line; None when the other side has gone."""
        try:
            line = self._file.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def skip_to(self, key: str) -> None:
        """Reads up to a line that has a key, be what comes before whole lines or not.

        Raises:
            OSError: The other side has gone.
        """
        while line := self._file.readline():
            try:
                if key in json.loads(line):
                    return
            except ValueError:  # the rest of a line that was half read
                pass
        raise ConnectionError("The connection has ended.")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Lines until the other side has gone."""
        while (message := self.read()) is not None:
            yield message

    def local_host(self) -> str:
        """The address of this side."""
        return self._socket.getsockname()[0]

    def close(self) -> None:
        """Ends it, for both sides."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            pass
        self._socket.close()


class Listener:
    """Where others connect, if they know the secret.

    Attributes:
        port: The number.
    """

    def __init__(
        self, host: str, secret: str, serve: Callable[[JsonLines], None], *, port: int = 0
    ):
        """Listens.

        Args:
            host: The address of this host, and no other.
            secret: 32 characters; see `make_secret`.
            serve: Called with each connection, in a thread of its own.
            port: Which; 0 for any that is free.

        Raises:
            OSError: The address is another host's, or the port is taken.
        """
        self._secret, self._serve = secret, serve
        family = socket.AF_INET6 if is_v6(host) else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        _start(self._accept)

    def close(self) -> None:
        """Listens no more; connections stay."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected, which is no matter
            pass
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue
            _start(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_CONNECT_S)
                greeting = connection.recv(_GREETING, socket.MSG_WAITALL)
            except OSError:
                return
            if hmac.compare_digest(greeting, self._secret.encode()):
                self._serve(JsonLines(connection))


def connect(host: str, port: int, secret: str, timeout_s: float = _CONNECT_S) -> JsonLines:
    """Connects to a listener.

    Raises:
        OSError: It cannot be reached.
    """
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.sendall(secret.encode())
    return JsonLines(connection)


def make_secret() -> str:
    """One for a listener."""
    return secrets.token_hex(_GREETING // 2)


def _start(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, name="tpudist connection", daemon=True).start()
