"""Tells libraries from the user's program by their files.

Python and installed packages are libraries. But a program may be installed as a package too. Its
captured arrays and its errors must then count as in a script. Such a package is recognized by its
requirement of tpudist.
"""

import functools
import importlib.metadata
import os
import re
import sysconfig
import traceback
from pathlib import PurePath

# pip and the packages of Debian install into folders of these names: in the environment, in the
# user's home directory and in the system.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_PYTHON = (
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")),
    str(PurePath(traceback.__file__).parent) + os.sep,  # where this Python has found it
    "<frozen",  # modules of the standard library that are compiled into Python
)
# Matches "tpudist", "tpudist>=1" and "tpudist[train]; ...", but not "tpudist-extra".
_REQUIREMENT = re.compile(r"^Requires-Dist: *tpudist *($|[^\w. -])", re.IGNORECASE | re.MULTILINE)


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Whether a file belongs to Python, or to an installed package that is not the program.

    tpudist counts as a library only if it is installed.
    """
    if _INSTALLED.isdisjoint(PurePath(file).parts):
        return file.startswith(_PYTHON)
    return not has_file(file)


@functools.lru_cache(maxsize=4096)
def has_file(file: str) -> bool:
    """Whether an installed file belongs to a package that requires tpudist."""
    parts = PurePath(file).parts
    below = [parts[i + 1] for i, part in enumerate(parts[:-1]) if part in _INSTALLED]
    return bool(below) and below[-1].removesuffix(".py") in _find_names()


@functools.cache
def _find_names() -> frozenset[str]:
    """Returns the top-level packages and modules of all distributions that require tpudist."""
    names: set[str] = set()
    for distribution in importlib.metadata.distributions():
        # Read as text: parsing the metadata of all distributions takes six times as long.
        if _REQUIREMENT.search(distribution.read_text("METADATA") or ""):
            names |= {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
    return frozenset(names - {"tpudist"})  # tpudist may require itself with an extra
