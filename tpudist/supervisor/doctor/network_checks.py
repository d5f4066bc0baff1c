"""Checks host names, the port of the coordinator, and connections to other hosts."""

import socket

from tpudist.cluster_resolver.tpu_hosts import TPU_PORT
from tpudist.processes import startup_address
from tpudist.supervisor import process_files
from tpudist.supervisor.doctor.checks import Answer, Verdict, call_each
from tpudist.supervisor.doctor.cluster_environment import Cluster

NAMES_S = 6.0
CONNECT_S = 4.0
_SHOWN = 4


def check_host_names(cluster: Cluster, timeout_s: float = NAMES_S) -> list[Answer]:
    """Checks whether this host can resolve the name of each host of the cluster."""
    asked = "host names"
    if not cluster.addresses:
        return [Answer(asked, "no name to look up")]
    found = call_each(_addresses, cluster.hosts, timeout_s)
    unknown = [f"{x}: {error}" for x, error in found.items() if isinstance(error, Exception)]
    if unknown:
        remedy = "Use names that this host knows, add them to /etc/hosts, or use IP addresses."
        text = f"{len(unknown)} of {len(found)} unknown: {_list(unknown)}"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    return [Answer(asked, f"{len(found)} known: {_list(list(found))}")]


def check_host_name(
    cluster: Cluster, name: str | None = None, timeout_s: float = NAMES_S
) -> list[Answer]:
    """Checks whether this host's name resolves to its own address, which gloo needs for CPUs."""
    asked = "this host's name"
    name = socket.gethostname() if name is None else name
    found = call_each(_addresses, [name], timeout_s)[name]
    if isinstance(found, Exception):
        remedy = f"Add it to /etc/hosts with an address of this host, such as '10.0.0.1 {name}'."
        return [Answer(asked, f"{name} is unknown: {found}", Verdict.FAIL, remedy)]
    ours = [x for x in found if is_local_address(x)]
    if not ours:
        remedy = f"Correct {name} in /etc/hosts or in the DNS."
        text = f"{name} is {_list(found)}, which is not an address of this host"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    if len(cluster.hosts) > 1 and all(x.startswith("127.") or x == "::1" for x in ours):
        remedy = (
            f"Let {name} resolve to the address that other hosts use, because CPUs connect to it "
            f"(gloo)."
        )
        return [
            Answer(asked, f"{name} is {_list(ours)}, only on this host", Verdict.WARNING, remedy)
        ]
    return [Answer(asked, f"{name} is {_list(ours)}")]


def check_port(cluster: Cluster, default_port: int = TPU_PORT) -> list[Answer]:
    """Checks whether process 0 can listen for the others, if this is process 0."""
    asked = "coordinator's port"
    if cluster.addresses and cluster.index != 0:
        return [Answer(asked, f"{cluster.addresses[0]}: belongs to another process")]
    address = cluster.addresses[0] if cluster.addresses else f"0.0.0.0:{default_port}"
    host, port = startup_address.parse_address(address)
    problem = startup_address.problem_of_address(host, port)
    if problem:
        listeners = process_files.listeners(port)
        if listeners:
            remedy = f"{', '.join(listeners)} listens there: end it, or choose another port."
        else:
            remedy = "As root, find the program that listens: ss -ltnp"
        verdict = Verdict.FAIL if len(cluster.addresses) > 1 else Verdict.WARNING
        return [Answer(asked, problem, verdict, remedy)]
    if host.startswith(("127.", "localhost")) and len(cluster.hosts) > 1:
        remedy = "Use a name or address by which other hosts reach this one."
        text = f"{address} is free, but processes on other hosts cannot reach it"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    default = "" if cluster.addresses else ", JAX's default,"
    return [Answer(asked, f"{address}{default} is free")]


def check_connections(cluster: Cluster, timeout_s: float = CONNECT_S) -> list[Answer]:
    """Checks whether the hosts of the other processes answer."""
    # A refused connection is an answer: the host is up, and its process has not started yet. A
    # firewall that refuses looks the same.
    asked = "other processes"
    others = [x for i, x in enumerate(cluster.addresses) if i != cluster.index]
    if not others:
        return [Answer(asked, "none")]
    found = call_each(lambda x: _connect(x, timeout_s), others, timeout_s + 1)
    unknown = [x for x, error in found.items() if isinstance(error, socket.gaierror)]
    problems = {x: error for x, error in found.items() if isinstance(error, Exception)}
    silent = [f"{x}: {error}" for x, error in problems.items() if x not in unknown]
    if silent:
        remedy = "Check that the host is up, and that no firewall closes this port."
        text = f"{len(silent)} of {len(found)} unreachable: {_list(silent)}"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    num_listen = sum(found[x] == "listens" for x in found)
    text = f"{len(found) - len(unknown)} reached; a program listens at {num_listen} of them"
    if unknown:  # the check of names has failed already
        text += f"; {len(unknown)} with an unknown name not tried"
    return [Answer(asked, text)]


def is_local_address(address: str) -> bool:
    """Whether a socket can be bound to an address, so that it is an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            # UDP: nothing is sent, and no port of TCP is used up.
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def _connect(address: str, timeout_s: float) -> str:
    try:
        socket.create_connection(startup_address.parse_address(address), timeout_s).close()
    except ConnectionRefusedError:
        return "refuses"
    return "listens"


def _list(things: list[str]) -> str:
    more = f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return ", ".join(things[:_SHOWN]) + more
