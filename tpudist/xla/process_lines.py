"""A connection of each process to the first one, which the kernel closes when either is killed.

The death of a process is known at once so, whatever its threads were doing, and that of the first
process before JAX, which loses its service then, aborts the others. Nothing is sent but who
connects, and that a process ends well.
"""

import contextlib
import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable

_WELL = b"E"
_CONNECT_S = 10.0
_GREETING = 64  # bytes: who connects, and the secret


class Lines:
    """Those of this process: one to the first process, or in that one, to all others."""

    def __init__(self, index: int, lost: Callable[[int], None]):
        """No connection yet.

        Args:
            index: Of this process.
            lost: Called in a thread with the number of a process that was killed.
        """
        self._index, self._lost = index, lost
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._secret = ""
        self._closing = False

    def listen(self, host: str) -> str:
        """Where the others are to connect to, as text, of the first process.

        Raises:
            OSError: This host has no such address.
        """
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        _start(self._accept)
        return f"{self._listener.getsockname()[1]} {self._secret}"

    def connect(self, host: str, where: str) -> None:
        """Connects to the first process, which has said `where`.

        Raises:
            OSError: It cannot be reached.
        """
        port, secret = where.split()
        line = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        line.settimeout(None)
        line.sendall(f"{self._index} {secret}".encode().ljust(_GREETING))
        self._sockets.append(line)
        _start(self._wait_for_end, line, 0)

    def close(self) -> None:
        """Says that this process ends well."""
        self._closing = True
        for line in self._sockets:
            with contextlib.suppress(OSError):
                line.sendall(_WELL)
                line.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closing:
            try:
                line, _ = self._listener.accept()
            except OSError:  # this process closes, or who connects has gone
                continue
            _start(self._greet, line)

    def _greet(self, line: socket.socket) -> None:
        """Finds out who has connected; whoever does not know the secret is nobody."""
        try:
            line.settimeout(_CONNECT_S)
            greeting = line.recv(_GREETING, socket.MSG_WAITALL).decode(errors="replace")
            line.settimeout(None)
        except OSError:
            greeting = ""
        index, _, secret = greeting.strip().partition(" ")
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            line.close()
            return
        self._sockets.append(line)
        self._wait_for_end(line, int(index))

    def _wait_for_end(self, line: socket.socket, index: int) -> None:
        with line:
            try:
                found = line.recv(1)
            except OSError:  # reset by a host that knows no such connection any more
                found = b""
        if found != _WELL and not self._closing:
            self._lost(index)


def _is_v6(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


def _start(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, name="tpudist line", daemon=True).start()
