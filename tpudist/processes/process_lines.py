"""A connection of each process to the first one, which the kernel closes when either is killed.

The death of a process is known at once so, whatever its threads were doing, and that of the first
process before JAX, which loses its service then, aborts the others. That of a host, and the loss
of the network, the kernels find out: they answer each other though a process may be stopped or
busy. Nothing is sent but who connects, that the first process is there, and that one ends well.
"""

import contextlib
import hmac
import ipaddress
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable

LINK_S = 15.0
"""After which a connection is given up whose other end does not answer, in the kernel."""
_WELL = b"E"
_THERE = b"."
_BEAT_S = 0.5
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
        self._closing = threading.Event()
        self._heard_s = math.inf  # of the first process

    def listen(self, host: str) -> str:
        """Where the others are to connect to, as text, of the first process.

        Raises:
            OSError: This host has no such address.
        """
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if is_v6(host) else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        _start(self._accept)
        _start(self._beat)
        return f"{self._listener.getsockname()[1]} {self._secret}"

    def connect(self, host: str, where: str) -> None:
        """Connects to the first process, which has said `where`.

        Raises:
            OSError: It cannot be reached.
        """
        port, secret = where.split()
        line = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        watch_link(line)
        line.sendall(f"{self._index} {secret}".encode().ljust(_GREETING))
        self._sockets.append(line)
        self._heard_s = time.monotonic()
        _start(self._wait_for_end, line, 0)

    def silence_s(self) -> float:
        """For how long the first process has not said that it is there; 0 without a connection."""
        return max(0.0, time.monotonic() - self._heard_s)

    def close(self) -> None:
        """Says that this process ends well."""
        self._closing.set()
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
        while not self._closing.is_set():
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
            watch_link(line)
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
                while (found := line.recv(1)) == _THERE:
                    self._heard_s = time.monotonic()
            except OSError:  # reset by a host that knows no such connection any more, or no answer
                found = b""
        if found != _WELL and not self._closing.is_set():
            self._lost(index)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_S):
            for line in list(self._sockets):
                with contextlib.suppress(OSError):  # full, as of a stopped process; or closed
                    line.send(_THERE, socket.MSG_DONTWAIT)


def watch_link(line: socket.socket) -> None:
    """Has the kernel give up a connection after `LINK_S` without an answer of the other one."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": LINK_S / 3,  # seconds
        "TCP_KEEPINTVL": LINK_S / 6,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": LINK_S * 1000,  # of what was sent, in ms
    }
    for name, value in options.items():
        if (number := getattr(socket, name, None)) is not None:  # not every system has all
            line.setsockopt(socket.IPPROTO_TCP, number, int(value))


def is_v6(host: str) -> bool:
    """Whether it is a numeric address of IPv6."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


def _start(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, name="tpudist line", daemon=True).start()
