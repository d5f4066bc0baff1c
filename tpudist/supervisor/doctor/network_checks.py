"""Checks of the network: names of hosts, the coordinator's port, and whether hosts are reached."""

import socket

from tpudist.processes import startup_address
from tpudist.supervisor import process_files
from tpudist.supervisor.doctor.checks import Answer, Verdict, ask_each
from tpudist.supervisor.doctor.cluster_environment import TPU_PORT, Cluster

NAMES_S = 6.0
CONNECT_S = 4.0
_SHOWN = 4


def look_up_hosts(cluster: Cluster, timeout_s: float = NAMES_S) -> list[Answer]:
    """Whether the name of each host of the cluster is known here."""
    asked = "host names"
    if not cluster.addresses:
        return [Answer(asked, "no name to look up")]
    found = ask_each(_addresses, cluster.hosts, timeout_s)
    unknown = [f"{x}: {error}" for x, error in found.items() if isinstance(error, Exception)]
    if unknown:
        remedy = "Use names that this host knows, add them to /etc/hosts, or use IP addresses."
        text = f"{len(unknown)} of {len(found)} unknown: {_list(unknown)}"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    return [Answer(asked, f"{len(found)} known: {_list(list(found))}")]


def look_up_this_host(
    cluster: Cluster, name: str | None = None, timeout_s: float = NAMES_S
) -> list[Answer]:
    """Whether this host's name leads to an address of its own, as gloo wants it between CPUs."""
    asked = "this host's name"
    name = socket.gethostname() if name is None else name
    found = ask_each(_addresses, [name], timeout_s)[name]
    if isinstance(found, Exception):
        remedy = f"Add it to /etc/hosts with an address of this host, such as '10.0.0.1 {name}'."
        return [Answer(asked, f"{name} is unknown: {found}", Verdict.FAIL, remedy)]
    ours = [x for x in found if is_of_this_host(x)]
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


def try_port(cluster: Cluster, default_port: int = TPU_PORT) -> list[Answer]:
    """Whether the first process could listen for the others, if this is the first one."""
    asked = "coordinator's port"
    if cluster.addresses and cluster.index != 0:
        return [Answer(asked, f"{cluster.addresses[0]}: belongs to another process")]
    address = cluster.addresses[0] if cluster.addresses else f"0.0.0.0:{default_port}"
    host, port = startup_address.parse_address(address)
    problem = startup_address.problem_of_address(host, port)
    if problem:
        who = process_files.listeners(port)
        remedy = f"{', '.join(who)} listens there: end it, or choose another port."
        remedy = remedy if who else "As root, find the program that listens: ss -ltnp"
        verdict = Verdict.FAIL if len(cluster.addresses) > 1 else Verdict.WARNING
        return [Answer(asked, problem, verdict, remedy)]
    if host.startswith(("127.", "localhost")) and len(cluster.hosts) > 1:
        remedy = "Use a name or address by which other hosts reach this one."
        text = f"{address} is free, but processes on other hosts cannot reach it"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    default = "" if cluster.addresses else ", JAX's default,"
    return [Answer(asked, f"{address}{default} is free")]


def reach_others(cluster: Cluster, timeout_s: float = CONNECT_S) -> list[Answer]:
    """Whether the hosts of the other processes answer; that nothing listens yet is no failure.

    A port that a firewall closes with a refusal looks like one at which nothing listens.
    """
    asked = "other processes"
    others = [x for i, x in enumerate(cluster.addresses) if i != cluster.index]
    if not others:
        return [Answer(asked, "none")]
    found = ask_each(lambda x: _connect(x, timeout_s), others, timeout_s + 1)
    unknown = [x for x, said in found.items() if isinstance(said, socket.gaierror)]
    problems = {x: said for x, said in found.items() if isinstance(said, Exception)}
    silent = [f"{x}: {said}" for x, said in problems.items() if x not in unknown]
    if silent:
        remedy = "Check that the host is up, and that no firewall closes this port."
        text = f"{len(silent)} of {len(found)} unreachable: {_list(silent)}"
        return [Answer(asked, text, Verdict.FAIL, remedy)]
    num_listen = sum(found[x] == "listens" for x in found)
    text = f"{len(found) - len(unknown)} reached; a program listens at {num_listen} of them"
    if unknown:  # a failure of the names already
        text += f"; {len(unknown)} with an unknown name not tried"
    return [Answer(asked, text)]


def is_of_this_host(address: str) -> bool:
    """Whether an address is one of this host's: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
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
