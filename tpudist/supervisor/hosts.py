"""The hosts of a run, their addresses and ports, and the place of this host among them."""

import dataclasses
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence

from tpudist.processes.host import this_host
from tpudist.processes.peer_connections import is_ipv6

SECRET = "TPUDIST_SECRET"
"""Environment variable: secret of the processes of a run, the same on all hosts."""
PORT = 8470
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: Names or addresses by which the hosts reach each other.
        index: Index of this host in `names`.
        port: Port of the first host's supervisor. The processes of each host use the following
            ports. 0 for any free ports, if there is one host.
    """

    names: Sequence[str] = (LOOPBACK,)
    index: int = 0
    port: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first host, whose supervisor manages the members of the run."""
        return self.index == 0

    def processes(self, per_host: int) -> list[str]:
        """Returns `host:port` of each process."""
        if len(self.names) == 1:
            host = self.names[0]
            return [_join(host, port) for port in _free_ports(host, per_host)]
        return [_join(host, self.port + 1 + i) for host in self.names for i in range(per_host)]

    def numbers(self, per_host: int) -> Iterator[int]:
        """Yields numbers for processes of this host: of the run first, then of additional ones."""
        # Additional processes (spares, replacements) of different hosts must not collide, and hosts
        # do not talk about numbers: each host takes every n-th number after those of the run.
        yield from range(self.index * per_host, (self.index + 1) * per_host)
        number = len(self.names) * per_host + self.index
        while True:
            yield number
            number += len(self.names)

    def secret(self) -> str | None:
        """Returns the secret of the run; None for one host, which creates a random one."""
        if len(self.names) == 1:
            return None
        # Without the variable the secret only tells runs apart: anybody can compute it.
        text = os.environ.get(SECRET) or ",".join(map(str, (*self.names, self.port)))
        # A hash, because the secret is part of an address that is split at spaces; 128 bits are
        # enough.
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_this_host(names: Sequence[str]) -> list[int]:
    """Returns the indices of the names that are addresses of this host."""
    return [i for i, name in enumerate(names) if _is_here(name)]


def _is_here(name: str) -> bool:
    # Only an address of this host can be bound.
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
    """Returns different free ports: each stays bound until all are found."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(this_host().listen(host, 0, _family(host)))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
