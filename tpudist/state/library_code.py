"""Tells the code and objects of your program from those of libraries.

The search for captured values follows only your program. Its code is known by the file: code below
the standard library, site-packages or tpudist belongs to libraries, except an installed package
that requires tpudist. An object is known by the package of its class: the search reads no
attributes of objects of `PACKAGES`. Those of other libraries, such as a configuration, may be
yours to set.
"""

import functools
import inspect
import os
import sysconfig
import types
from pathlib import Path

from tpudist.xla import program_packages

# Packages whose objects are never looked into: their attributes are theirs to change.
PACKAGES = frozenset(("tpudist", "jax", "jaxlib", "flax", "optax", "numpy"))

_FOLDERS = (
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen",  # modules of the standard library that are compiled into Python
)


def root_package(cls: type) -> str:
    """Returns the name of the top-level package of a class."""
    return cls.__module__.partition(".")[0]


def is_library_code(code: types.CodeType) -> bool:
    """Whether a function's code belongs to a library."""
    return _is_library_file(code.co_filename)


def is_library_module(module: types.ModuleType) -> bool:
    """Whether a module belongs to a library, or has no file."""
    # Reading `__file__` of a lazy module would load it.
    file = object.__getattribute__(module, "__dict__").get("__file__")
    return file is None or _is_library_file(file)


@functools.cache
def is_program_class(cls: type) -> bool:
    """Whether a class belongs to your program."""
    try:
        file = inspect.getfile(cls)
    except (TypeError, OSError):
        return cls.__module__ == "__main__"
    return not _is_library_file(file)


def _is_library_file(file: str) -> bool:
    return file.startswith(_FOLDERS) and not program_packages.has_file(file)
