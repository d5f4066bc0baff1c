"""Folders and files that nobody else may have written.

What is read from them is trusted as the user's own work, and executables are run: so a folder must
belong to the user and be closed to others, and a file in it likewise.
"""

import os
import stat
import tempfile
from pathlib import Path


def folder(path: str | os.PathLike) -> Path:
    """A folder of the user's alone, made if it is not there.

    Raises:
        PermissionError: It belongs to somebody else, or others may write to it.
        OSError: It cannot be made.
    """
    path = Path(path).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check(path, path.stat())
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)
    return path


def check(path: Path, found: os.stat_result) -> None:
    """Refuses what somebody else may have written.

    Raises:
        PermissionError: It belongs to somebody else, or others may write to it.
    """
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.getuid()}: it may hold "
            f"anything. Use a folder of your own."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} has mode {mode:o}: others may write to it, so it may hold anything. If you "
            f"trust what is in it, close it: chmod {'700' if path.is_dir() else '600'} {path}"
        )


def read(path: Path) -> bytes:
    """What a file of the user's alone holds.

    Raises:
        PermissionError: It is somebody else's, or others may write to it or to its folder.
        OSError: It cannot be read; FileNotFoundError if it is not there.
    """
    check(path.parent, path.parent.stat())
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is no ordinary file.")
        check(path, found)
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Replaces a file at once, for the user alone.

    Raises:
        OSError: It cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
