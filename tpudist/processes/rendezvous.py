"""The rendezvous of a run's processes, before JAX connects them: finds out who is missing or wrong.

JAX's own start-up waits for 300 s without naming a process. A taken port, two processes with the
same number or a wrong count abort it, or make it hang. So process 0 first listens at its address,
the others report to it who they are, and all start JAX together once every process has arrived.

    processes 1 ...                          process 0
                                             listens at the address
    connect, again if nobody listens   --->  accepts
    wait for the greeting              <---  greeting: this is a tpudist run
    introduction: index, count, versions ->  compares it with its own
                                             waits until every index has come
    wait for the answer                <---  closes the port, then answers "ok" or an error
    wait until JAX's service listens         starts JAX's service at the same port

`rendezvous_host` has the right column, `rendezvous_guest` the left one. Every wait ends: process 0
gives up after `timeout_s` and names the missing processes in its answer. The others give up a
little later, in case the answer does not come.
"""

from tpudist.processes import rendezvous_guest, rendezvous_host
from tpudist.processes.reported_wait import ReportedWait
from tpudist.processes.startup_address import parse_address

TIMEOUT_S = 300.0
REPORT_S = 5.0
"""Seconds until a wait is first reported."""


def join(address: str, num_processes: int, index: int, timeout_s: float = TIMEOUT_S) -> None:
    """Returns when all processes have come to `address` and fit together.

    Args:
        address: `host:port` of process 0.
        num_processes: Number of processes of the run.
        index: Number of this process, from 0.
        timeout_s: Seconds to wait for the others.

    Raises:
        ValueError: If `address` is not `host:port`, or `index` is not below `num_processes`.
        StartupError: In every process that has arrived, if the address cannot be used, a process
            is missing, two have the same number, or counts or versions differ.
    """
    host, port = parse_address(address)
    if not 0 <= index < num_processes:
        raise ValueError(
            f"The process number {index} is invalid: with {num_processes} processes, the numbers "
            f"are 0 to {num_processes - 1}. Correct the number."
        )
    wait = ReportedWait(REPORT_S, timeout_s)
    if index:
        rendezvous_guest.visit(host, port, num_processes, index, wait)
    else:
        rendezvous_host.receive(host, port, num_processes, wait)
