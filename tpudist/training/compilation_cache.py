"""The persistent compilation cache: scripts compile a program once per machine, not per run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tpudist.xla.compiler import private_files, processor
from tpudist.xla.settings import Setting

_log = logging.getLogger("tpudist")
# What JAX keeps there.
_NAMES = ("*-cache", "*-atime", ".lockfile", "xla_gpu_*")


def cache_folder() -> Path:
    """Where compiled programs are kept for this user and this kind of processor.

    Programs for the CPU hold its own instructions, and a home folder may be shared between
    machines: each kind of processor has a folder of its own.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tpudist" / "xla" / processor.name()


def enable_compilation_cache(folder: Path | None = None) -> Path | None:
    """Keeps compiled programs in `folder` (`cache_folder()`); None if that is unsafe or impossible.

    What is in the folder is run as native code: it is made private to the user, and not used if it
    is not.
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
