"""The persistent compilation cache: scripts compile a program once per machine, not per run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax

from tpudist.xla import processor


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
    folder = folder or cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
