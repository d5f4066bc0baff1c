"""The address at which process 0 listens while the processes of a run start."""

import errno
import os
import socket

from tpudist.errors import StartupError
from tpudist.processes.host import this_host

RESOLVE_S = 10.0
"""Seconds to retry an unknown host name: the name of a new pod is unknown for some seconds."""
_RETRY_S = 0.5


def parse_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port`.

    Raises:
        ValueError: If `address` has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"The address of the first process is {address!r}. It must be host:port with a port "
            f"from 1 to 65535, such as '10.0.0.1:8476'."
        )
    return host.strip("[]"), int(port)


def problem_of_address(host: str, port: int) -> str:
    """Returns why process 0 cannot listen at an address now, or "" if it can."""
    try:
        listen(host, port).close()
    except StartupError as error:
        return str(error)
    return ""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address.

    Raises:
        StartupError: If that is impossible; the message names the cause and a remedy.
    """
    problems: list[OSError] = []
    for family, host_and_port in resolve(host, port):
        try:
            return this_host().listen(*host_and_port, family)
        except OSError as error:
            problems.append(error)
    # A name may have addresses of several networks. A taken port says more than a missing network.
    problem = next((x for x in problems if x.errno == errno.EADDRINUSE), problems[-1])
    remedy = {
        errno.EADDRINUSE: "Another program uses the port, perhaps an earlier run or a second "
        "process with the number 0. End that program, or choose another port.",
        errno.EADDRNOTAVAIL: f"This host ({this_host().name()}) does not have this address. "
        f"Start process 0 on the host that the address names.",
        errno.EACCES: "Ports below 1024 are reserved for the system. Choose another port.",
    }.get(problem.errno or 0, "Choose another address.")
    raise StartupError(
        f"Process 0 cannot listen at {host}:{port} ({os.strerror(problem.errno or 0)}). {remedy}"
    ) from problem


def resolve(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """Returns the family and the address of each address of a host.

    Raises:
        StartupError: If the host is still unknown after `RESOLVE_S`.
    """
    start = this_host().monotonic()
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # An IPv6 address has two more parts, flow and scope, which `create_server` rejects.
            return [(family, (str(sockaddr[0]), port)) for family, *_, sockaddr in found]
        except (OSError, UnicodeError) as error:
            if this_host().monotonic() - start > RESOLVE_S - _RETRY_S:
                raise StartupError(
                    f"The host {host!r} of the first process is unknown on {this_host().name()} "
                    f"({error}). Use a name that all hosts know, or an IP address."
                ) from error
            this_host().sleep(_RETRY_S)
