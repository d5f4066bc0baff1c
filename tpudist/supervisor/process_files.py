"""Finds the processes that use a file, a device or a port.

Reads /proc, so it finds only processes that this user may inspect.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_LISTENS = "0A"  # state TCP_LISTEN in the fourth column of /proc/net/tcp


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
    shown = command if len(command) <= 60 else command[:57] + "..."
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
            # "sl local_address rem_address st ... inode", an address as "0100007F:1F40".
            columns = line.split()
            number = re.search(r":([0-9A-F]{4})$", columns[1])
            if columns[3] == _LISTENS and number and int(number[1], 16) == port:
                yield columns[9]
