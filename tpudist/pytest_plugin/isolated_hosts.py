"""Two hosts on one machine: network namespaces with a cable between them that can be unplugged.

Only root can make them, where the kernel has them (Linux). Each has an address of its own, and its
name leads to that address, as Gloo wants it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


class IsolatedHosts:
    """Those, and the cable.

    Attributes:
        addresses: Of each.
    """

    def __init__(self, name: str, network: str):
        """None is made yet.

        Args:
            name: What their names begin with.
            network: What their addresses begin with: three numbers.
        """
        self._names = [f"{name}0", f"{name}1"]
        self.addresses = [f"{network}.1", f"{network}.2"]

    def prefix(self, process: int) -> Sequence[str]:
        """What runs a command on the host of a process."""
        return ("ip", "netns", "exec", self._names[process % 2])

    def address(self, process: int) -> str:
        """Of the host of a process."""
        return self.addresses[process % 2]

    def plug_in(self) -> None:
        """Connects them, which they are at first."""
        for name in self._names:
            _ip("-n", name, "link", "set", "cable", "up")

    def unplug(self) -> None:
        """No packet reaches the other one any more, and none comes back."""
        for name in self._names:
            _ip("-n", name, "link", "set", "cable", "down")

    def _make(self) -> None:
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

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_names_folder(name), ignore_errors=True)


def _names_folder(name: str) -> Path:
    """What `ip netns exec` puts in the place of files in /etc."""
    return Path("/etc/netns") / name


@contextlib.contextmanager
def make_isolated_hosts() -> Iterator[IsolatedHosts]:
    """Two hosts with a cable; none is left after the block."""
    number = os.getpid() % 65536
    made = IsolatedHosts(f"tpudist{number}", f"10.{number >> 8}.{number & 255}")
    try:
        made._make()
        yield made
    finally:
        made._remove()


def why_not() -> str:
    """Why there cannot be two hosts here; empty if there can."""
    if not shutil.which("ip"):
        return "the command ip is missing"
    if os.geteuid():
        return "only root can create network namespaces"
    try:
        with make_isolated_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"cannot create network namespaces: {error.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
