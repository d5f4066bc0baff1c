"""The hosts of a run: which there are, and which of them this is."""

import dataclasses
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence

from tpudist.processes.peer_connections import is_ipv6

SECRET = "TPUDIST_SECRET"
"""A variable: what processes of one run know, and nobody else; the same on all hosts."""
PORT = 8470
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: Names or addresses, by which they reach each other.
        index: Which is this one.
        port: Where the first one is asked who belongs to the run; the processes of each host have
            those that follow. 0 for any that are free, of one host.
    """

    names: Sequence[str] = (LOOPBACK,)
    index: int = 0
    port: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this host says who belongs to the run."""
        return self.index == 0

    def processes(self, per_host: int) -> list[str]:
        """`host:port` of each process."""
        if len(self.names) == 1:
            host = self.names[0]
            return [_join(host, port) for port in _free_ports(host, per_host)]
        return [_join(host, self.port + 1 + i) for host in self.names for i in range(per_host)]

    def numbers(self, per_host: int) -> Iterator[int]:
        """Numbers for the processes of this host: first those of the run, then more."""
        yield from range(self.index * per_host, (self.index + 1) * per_host)
        number = len(self.names) * per_host + self.index
        while True:
            yield number
            number += len(self.names)

    def secret(self) -> str | None:
        """What the processes of several hosts know; None for one host, which makes one up."""
        if len(self.names) == 1:
            return None
        said = os.environ.get(SECRET) or ",".join(map(str, (*self.names, self.port)))
        return hashlib.sha256(said.encode()).hexdigest()[:32]


def find_this_host(names: Sequence[str]) -> list[int]:
    """Which of some names are this host's: those whose address is its own."""
    return [i for i, name in enumerate(names) if _is_here(name)]


def _is_here(name: str) -> bool:
    try:
        with socket.create_server((name, 0), family=_family(name)):
            return True
    except OSError:
        return False


def _family(name: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(name) else socket.AF_INET


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so that they differ."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.create_server((host, 0), family=_family(host)))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
