"""Checks folders: whether a run can write there, and how much space is free."""

import os
import tempfile
from pathlib import Path

from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.xla.estimate.sizes import format_bytes
from tpudist.xla.settings import Setting

WARNING_BYTES = 2**30
FAIL_BYTES = 100 * 2**20
_WARNING_FILES, _FAIL_FILES = 10_000, 100
_TRY_BYTES = 2**16


def check_folder(asked: str, folder: Path) -> list[Answer]:
    """Checks whether a file can be written, synced and renamed in a folder, and the free space."""
    remedy = "Use another folder, or make it writable."
    try:
        _write_file(folder)
    except OSError as error:
        found = f"cannot write to {folder}: {error.strerror or error}"
        return [Answer(asked, found, Verdict.FAIL, remedy)]
    stats = os.statvfs(folder)
    free_bytes, free_files = stats.f_bavail * stats.f_frsize, stats.f_favail
    has_file_limit = stats.f_files > 0  # btrfs and others have no fixed number of inodes
    found = f"{folder}: {format_bytes(free_bytes)} free"
    if has_file_limit:
        found += f", room for {free_files} more files"
    verdict = Verdict.OK
    if free_bytes < WARNING_BYTES or (has_file_limit and free_files < _WARNING_FILES):
        verdict = Verdict.WARNING
    if free_bytes < FAIL_BYTES or (has_file_limit and free_files < _FAIL_FILES):
        verdict = Verdict.FAIL
    return [
        Answer(asked, found, verdict, "Free disk space there." if verdict != Verdict.OK else "")
    ]


def check_cache() -> list[Answer]:
    """Checks the folder in which JAX keeps compiled programs, if one is set."""
    asked = "compilation cache"
    name = Setting.COMPILATION_CACHE_DIR.read()
    if not name:
        return [Answer(asked, "none: JAX_COMPILATION_CACHE_DIR is not set")]
    if "://" in name:
        return [Answer(asked, f"{name}: on another machine, not checked")]
    folder = Path(name).absolute()
    if folder.exists():
        return check_folder(asked, folder)
    parent = next(x for x in folder.parents if x.exists())  # JAX creates the rest
    return check_folder(f"{asked} (does not exist yet)", parent)


def check_temporary_folder() -> list[Answer]:
    """Checks the folder for temporary files: TMPDIR, or the one that Python chooses."""
    asked = "temporary folder"
    try:
        folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    except FileNotFoundError as error:
        return [Answer(asked, str(error), Verdict.FAIL, "Set TMPDIR to a writable folder.")]
    return check_folder(asked, folder)


def _write_file(folder: Path) -> None:
    name = folder / f".tpudist-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    after = name.with_suffix(".renamed")
    try:
        with open(name, "xb") as file:
            file.write(b"\1" * _TRY_BYTES)
            file.flush()
            # Network file systems may report a full disk or an exceeded quota only here.
            os.fsync(file.fileno())
        name.rename(after)
    finally:
        for each in (name, after):
            try:
                each.unlink()
            except OSError:  # it was not created, or `folder` is not a folder
                pass
