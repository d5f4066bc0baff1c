"""Finds the processes that use a file, a device or a port.

Reads /proc, so it finds only processes that this user may inspect.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_LISTENS = "0A"  # state TCP_LISTEN in /proc/net/tcp
_SHOWN = 60  # characters of a command


def holders(matches: Callable[[str], bool]) -> list[str]:
    """Returns other processes with certain files open, each as `process 12 (python train.py)`.

    Args:
        matches: Called with the path of an open file; returns whether it is one of them.
    """
    pids = {pid for pid, file in _open_files() if matches(file)} - {os.getpid()}
    return [describe(pid) for pid in sorted(pids)]


def listeners(port: int) -> list[str]:
    """Returns the processes that listen at a port of this host."""
    sockets = {f"socket:[{inode}]" for inode in _list_inodes(port)}
    pids = {pid for pid, file in _open_files() if file in sockets}
    return [describe(pid) for pid in sorted(pids)]


def describe(pid: int) -> str:
    """Returns the number and the command of a process, as a text."""
    try:
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        parts = []
    command = " ".join(x.decode(errors="replace") for x in parts if x)
    command = " ".join(command.split())
    shown = command if len(command) <= _SHOWN else f"{command[: _SHOWN - 3]}..."
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def _open_files() -> Iterator[tuple[int, str]]:
    """Yields pid and path of each open file of all processes that this user may inspect."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            numbers = os.listdir(folder)
        except OSError:  # it has ended, or is another user's
            continue
        for number in numbers:
            with contextlib.suppress(OSError):  # closed in the meantime
                yield int(folder.parent.name), os.readlink(folder / number)


def _list_inodes(port: int) -> Iterator[str]:
    """Yields the inodes of the sockets that listen at a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            # Columns, see proc(5): sl local_address rem_address st tx_queue:rx_queue tr:tm->when
            # retrnsmt uid timeout inode. An address is "0100007F:1F40", the port in hex digits.
            _, address, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == _LISTENS and int(address.rpartition(":")[2], 16) == port:
                yield inode
