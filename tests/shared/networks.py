"""Two hosts on one machine, for `start_processes`; see `tpudist.pytest_plugin.isolated_hosts`."""

import contextlib
from collections.abc import Iterator

from processes import Host
from tpudist.pytest_plugin import isolated_hosts
from tpudist.pytest_plugin.isolated_hosts import IsolatedHosts, why_unsupported

__all__ = ["TwoHosts", "make_two_hosts", "why_unsupported"]


class TwoHosts:
    """Two hosts, and the cable between them.

    Attributes:
        hosts: Hosts on which processes can be started.
    """

    def __init__(self, made: IsolatedHosts):
        self.hosts = [Host(made.prefix(i), made.address(i)) for i in range(2)]
        self.plug_in, self.unplug = made.plug_in, made.unplug


@contextlib.contextmanager
def make_two_hosts() -> Iterator[TwoHosts]:
    """Two hosts with a cable; none is left after the block."""
    with isolated_hosts.make_isolated_hosts() as made:
        yield TwoHosts(made)
