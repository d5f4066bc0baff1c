"""Reads and writes files that no other user can have written.

Their contents are trusted, and executables among them run. So each folder and file must belong to
the user, and nobody else may have write permission.
"""

import contextlib
import fnmatch
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path


def folder(path: str | os.PathLike, *, ours: Sequence[str]) -> Path:
    """Returns a folder that only the user can access; creates it if it does not exist.

    Args:
        path: Path of the folder.
        ours: Patterns of the names of our files, such as "*.json.gz".

    Raises:
        PermissionError: If the folder belongs to another user, others may write to it, or others
            may read it and it has files that are not ours.
        OSError: If the folder cannot be created.
    """
    path = Path(path).expanduser()
    is_new = _make(path)
    status = path.stat()
    check(path, status)
    if (mode := stat.S_IMODE(status.st_mode)) == 0o700:
        return path
    # Restrict access only if nothing else is in the folder. Otherwise its permissions are not ours
    # to change.
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
    """Creates a folder; returns whether it did not exist."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def _is_ours(name: str, ours: Sequence[str]) -> bool:
    # A name with a dot before and a suffix is a temporary file of a `write` that was killed.
    return any(fnmatch.fnmatchcase(name, p) for own in ours for p in (own, f".{own}.*"))


def check(path: Path, status: os.stat_result) -> None:
    """Checks that no other user can have written a file or folder.

    Raises:
        PermissionError: If `path` belongs to another user, or others may write to it.
    """
    if os.name != "posix":
        return
    if status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, but this is user {os.getuid()}: the other "
            "user may have changed it. Use your own folder."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(
            f"{path} has mode {mode:o}: other users may write to it, so they may have changed it. "
            f"If you trust its contents, close it: chmod {'700' if path.is_dir() else '600'} {path}"
        )


def read(path: Path) -> bytes:
    """Reads a file that no other user can have written.

    Raises:
        PermissionError: If the file or its folder belongs to another user, or others may write
            to it.
        OSError: If the file cannot be read; `FileNotFoundError` if it does not exist.
    """
    # Check the folder first, because its owner can exchange the file at any time. Then check the
    # open file and not its name, which may refer to another file by now.
    check(path.parent, path.parent.stat())
    # Windows has no O_NOFOLLOW.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not an ordinary file.")
        check(path, status)
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Replaces a file atomically, with access only for the user.

    Raises:
        OSError: If the file cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # interrupted after `replace`
            os.unlink(temporary)
        raise
