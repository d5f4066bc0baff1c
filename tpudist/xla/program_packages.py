"""Finds installed packages that are part of the user's program, and not libraries that it uses.

A program may be installed as a package. Its captured arrays and its errors must then count as in a
script. Such a package is recognized by its requirement of tpudist.
"""

import functools
import importlib.metadata
import re
from pathlib import PurePath

_INSTALLED = ("site-packages", "dist-packages")
# Matches "tpudist", "tpudist>=1" and "tpudist[train]; ...", but not "tpudist-extra".
_REQUIREMENT = re.compile(r"^Requires-Dist: *tpudist *($|[^\w. -])", re.IGNORECASE | re.MULTILINE)


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
