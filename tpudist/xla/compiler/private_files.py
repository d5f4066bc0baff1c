"""Folders and files that nobody else may have written.

What is read from them is trusted as the user's own work, and executables are run: so a folder must
belong to the user and be closed to others, and a file in it likewise.
"""

import fnmatch
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path


def folder(path: str | os.PathLike, *, ours: Sequence[str]) -> Path:
    """A folder of the user's alone, made if it is not there.

    One that is there is closed to others only if there is nothing else in it: what else somebody
    keeps in a folder, and for whom it is open, is not for us to change.

    Args:
        path: The folder.
        ours: Patterns of the names of what we keep there, such as "*.json.gz".

    Raises:
        PermissionError: It belongs to somebody else, others may write to it, or it is open to
            others and holds something else.
        OSError: It cannot be made.
    """
    path = Path(path).expanduser()
    is_new = _make(path)
    found = path.stat()
    check(path, found)
    if (mode := stat.S_IMODE(found.st_mode)) == 0o700:
        return path
    others = [] if is_new else [name for name in os.listdir(path) if not _is_ours(name, ours)]
    if others:
        raise PermissionError(
            f"{path} has mode {mode:o} and holds other files, such as {min(others)}. tpudist would "
            "close the folder to all other users (mode 700), including those files. Choose a new "
            f"folder, such as {path / 'tpudist'}."
        )
    path.chmod(0o700)
    return path


def _make(path: Path) -> bool:
    """Makes a folder; whether it was not there."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def _is_ours(name: str, ours: Sequence[str]) -> bool:
    """Whether a file is one of ours, or of `write`, which was ended while it wrote one."""
    return any(fnmatch.fnmatchcase(name, p) for own in ours for p in (own, f".{own}.*"))


def check(path: Path, found: os.stat_result) -> None:
    """Refuses what somebody else may have written.

    Raises:
        PermissionError: It belongs to somebody else, or others may write to it.
    """
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, but this is user {os.getuid()}: the other "
            "user may have changed it. Use your own folder."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} has mode {mode:o}: other users may write to it, so they may have changed it. "
            f"If you trust its contents, close it: chmod {'700' if path.is_dir() else '600'} {path}"
        )


def read(path: Path) -> bytes:
    """What a file of the user's alone holds.

    Raises:
        PermissionError: It is somebody else's, or others may write to it or to its folder.
        OSError: It cannot be read; FileNotFoundError if it is not there.
    """
    # The folder first: in one of another's the file may be exchanged at any time. Then the file
    # that is open, rather than its name, which may lead to another one by now.
    check(path.parent, path.parent.stat())
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not an ordinary file.")
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
