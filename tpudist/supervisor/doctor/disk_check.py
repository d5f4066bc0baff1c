"""Check of folders: whether a run can write there, and how much."""

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


def look_at_folder(asked: str, folder: Path) -> list[Answer]:
    """Whether a file can be written to a folder, synced and renamed, and what is free there."""
    remedy = "Use another folder, or make it writable."
    try:
        _write_file(folder)
    except OSError as error:
        found = f"cannot write to {folder}: {error.strerror or error}"
        return [Answer(asked, found, Verdict.FAIL, remedy)]
    stats = os.statvfs(folder)
    free_bytes, free_files = stats.f_bavail * stats.f_frsize, stats.f_favail
    counts_files = stats.f_files > 0  # btrfs and others make them as needed
    found = f"{folder}: {format_bytes(free_bytes)} free"
    if counts_files:
        found += f", room for {free_files} more files"
    verdict = Verdict.OK
    if free_bytes < WARNING_BYTES or (counts_files and free_files < _WARNING_FILES):
        verdict = Verdict.WARNING
    if free_bytes < FAIL_BYTES or (counts_files and free_files < _FAIL_FILES):
        verdict = Verdict.FAIL
    return [
        Answer(asked, found, verdict, "Free disk space there." if verdict != Verdict.OK else "")
    ]


def look_at_cache() -> list[Answer]:
    """The folder in which JAX keeps compiled programs, if there is one."""
    asked = "compilation cache"
    name = Setting.COMPILATION_CACHE_DIR.read()
    if not name:
        return [Answer(asked, "none: JAX_COMPILATION_CACHE_DIR is not set")]
    if "://" in name:
        return [Answer(asked, f"{name}: on another machine, not checked")]
    folder = Path(name).absolute()
    if folder.exists():
        return look_at_folder(asked, folder)
    there = next(x for x in folder.parents if x.exists())  # JAX makes the rest
    return look_at_folder(f"{asked} (does not exist yet)", there)


def look_at_temporary_folder() -> list[Answer]:
    """The folder for temporary files, of which Python looks for one that can be written to."""
    asked = "temporary folder"
    try:
        folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    except FileNotFoundError as error:
        return [Answer(asked, str(error), Verdict.FAIL, "Set TMPDIR to a writable folder.")]
    return look_at_folder(asked, folder)


def _write_file(folder: Path) -> None:
    name = folder / f".tpudist-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    after = name.with_suffix(".renamed")
    try:
        with open(name, "xb") as file:
            file.write(b"\1" * _TRY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        name.rename(after)
    finally:
        for each in (name, after):
            try:
                each.unlink()
            except OSError:  # it was not made, or its folder is not one
                pass
