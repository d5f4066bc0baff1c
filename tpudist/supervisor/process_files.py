"""Which processes hold a file, a device or a port, as far as /proc shows it to this user."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def holders(is_meant: Callable[[str], bool]) -> list[str]:
    """The other processes that have such a file open, each as `process 12 (python train.py)`."""
    found = {pid for pid, file in _open_files() if is_meant(file)} - {os.getpid()}
    return [describe(pid) for pid in sorted(found)]


def listeners(port: int) -> list[str]:
    """The processes that listen at a port of this host."""
    sockets = {f"socket:[{inode}]" for inode in _sockets(port)}
    found = {pid for pid, file in _open_files() if file in sockets}
    return [describe(pid) for pid in sorted(found)]


def describe(pid: int) -> str:
    """A process in words: its number, and how it was started."""
    try:
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        parts = []
    command = " ".join(x.decode(errors="replace") for x in parts if x)
    command = " ".join(command.split())
    shown = command if len(command) <= 60 else command[:57] + "..."
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def _open_files() -> Iterator[tuple[int, str]]:
    """Of each process that this user may look at, what it has open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            numbers = os.listdir(folder)
        except OSError:  # it has ended, or is another user's
            continue
        for number in numbers:
            with contextlib.suppress(OSError):  # closed in the meantime
                yield int(folder.parent.name), os.readlink(folder / number)


def _sockets(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            number = re.search(r":([0-9A-F]{4})$", columns[1])
            if columns[3] == _LISTENS and number and int(number[1], 16) == port:
                yield columns[9]
