"""Emulates two hosts on one machine: network namespaces with a cable that can be unplugged.

This needs Linux and root. Each host has its own address. Its host name resolves to that address,
because Gloo connects to it.
"""

import contextlib
import functools
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_numbers = itertools.count()  # of the pairs of this process


class IsolatedHosts:
    """Two hosts and the cable between them, which `make_isolated_hosts` creates.

    Args:
        name: Prefix of the names of the hosts.

    Attributes:
        addresses: Address of each host.
    """

    def __init__(self, name: str):
        self._names = [f"{name}-0", f"{name}-1"]
        self.addresses = ["10.0.0.1", "10.0.0.2"]  # no other pair can see them

    def prefix(self, process: int) -> Sequence[str]:
        """Returns the words before a command that run it on the host of a process."""
        return ("ip", "netns", "exec", self._names[process % 2])

    def address(self, process: int) -> str:
        """Returns the address of the host of a process."""
        return self.addresses[process % 2]

    def plug_in(self) -> None:
        """Connects the hosts, which is the initial state."""
        for name in self._names:
            _ip("-n", name, "link", "set", "cable", "up")

    def unplug(self) -> None:
        """Disconnects the hosts: no packet passes in either direction."""
        for name in self._names:
            _ip("-n", name, "link", "set", "cable", "down")

    def create(self) -> None:
        """Creates the hosts and the cable.

        Raises:
            subprocess.CalledProcessError: If that is not possible here.
        """
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            folder = _names_folder(name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
        first, second = self._names
        cable = ("cable", "type", "veth", "peer", "name", "cable")
        _ip("-n", first, "link", "add", *cable, "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
        self.plug_in()

    def remove(self) -> None:
        """Removes the hosts and the cable; ignores errors, because `create` may have failed."""
        # The cable ends with either of its namespaces.
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_names_folder(name), ignore_errors=True)


def _names_folder(name: str) -> Path:
    # `ip netns exec` mounts the files of this folder over those in /etc.
    return Path("/etc/netns") / name


@contextlib.contextmanager
def make_isolated_hosts() -> Iterator[IsolatedHosts]:
    """Creates two hosts with a cable, and removes them after the block."""
    # Names differ between tests that run at the same time, and between two pairs of one test.
    hosts = IsolatedHosts(f"tpudist-{os.getpid()}-{next(_numbers)}")
    try:
        hosts.create()
        yield hosts
    finally:
        hosts.remove()


@functools.cache
def why_unsupported() -> str:
    """Returns the reason why two hosts are impossible here; empty if they are possible."""
    if not shutil.which("ip"):
        return "the command ip is missing"
    if os.geteuid():
        return "only root can create network namespaces"
    try:
        # Only a trial tells: in a container, root may lack the permission.
        with make_isolated_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"cannot create network namespaces: {error.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
