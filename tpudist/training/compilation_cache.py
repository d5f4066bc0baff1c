"""The persistent compilation cache: scripts compile a program once per machine, not per run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tpudist.xla.compiler import private_files, processor
from tpudist.xla.settings import Setting

_log = logging.getLogger("tpudist")
# Files that JAX writes there; a directory with any other file belongs to somebody else. JAX's LRU
# cache has files "-cache" and "-atime", and XLA's caches for GPUs are "xla_gpu_*".
_NAMES = ("*-cache", "*-atime", ".lockfile", "xla_gpu_*")


def cache_folder() -> Path:
    """Returns the directory of compiled programs for this user and this kind of processor.

    Programs for a CPU contain instructions that other CPUs may lack, and machines may share a home
    directory, so each kind of processor has its own directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tpudist" / "xla" / processor.name()


def enable_compilation_cache(folder: Path | None = None) -> Path | None:
    """Stores compiled programs in `folder` (default: `cache_folder()`), and returns it.

    JAX runs the files of the directory as native code. So the directory is made private to the
    user. If that fails, the function logs a warning and returns None.
    """
    try:
        folder = private_files.folder(folder or cache_folder(), ours=_NAMES)
    except OSError as error:
        _log.warning(
            "Cannot use the cache of compiled programs, so the next run compiles again: %s", error
        )
        return None
    Setting.COMPILATION_CACHE_DIR.set(str(folder))
    return folder
