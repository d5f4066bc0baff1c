"""Tells the code and objects of your program from those of libraries.

The search for captured values follows only your program. Code belongs to a library if its file is
part of tpudist, of Python or of an installed package. An exception is an installed package that
requires tpudist: it counts as your program.

A compiled step is used again only if the values that its function captured are the same. If your
program may have set the attributes of such an object, the attributes that the code reads are
compared. Any other object is compared by identity. The package of the object's class decides:
attributes of objects of `OPAQUE_PACKAGES` are never compared. An object of another library, such as
a configuration, may have attributes that you set.
"""

import functools
import inspect
import os
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from tpudist.state import nnx_contents
from tpudist.xla import program_packages

# Packages whose objects count as a whole: only these packages change their attributes.
OPAQUE_PACKAGES = frozenset(("tpudist", "jax", "jaxlib", "flax", "optax", "numpy"))

_TPUDIST = str(Path(__file__).parents[1]) + os.sep


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


def inner_function_of(value: object) -> object:
    """Returns the function of a wrapper such as `jax.jit(fn)`; None for other objects."""
    inner = inspect.getattr_static(value, "__wrapped__", None)
    # The wrappers of Equinox, such as `filter_jit(fn)`, have a property. A property of your program
    # is not read, because that would run your code.
    if isinstance(inner, property) and not is_program_class(type(value)):
        return getattr(value, "__wrapped__", None)
    return inner


def is_known_by_identity(value: object) -> bool:
    """Whether a value counts as changed if a call captures a different object in its place.

    The objects are compared by weak references, so that a program does not keep them alive. False
    for NNX objects: capturing one raises an error.
    """
    # Not iterators: each call consumes one, and usually captures a new one.
    excluded = (type, types.ModuleType, Iterator, *nnx_contents.OBJECT_TYPES)
    if isinstance(value, excluded) or root_package(type(value)) == "tpudist":
        return False
    return type(value).__weakrefoffset__ != 0  # whether it supports weak references


def has_program_attributes(value: object) -> bool:
    """Whether your program may have set attributes of the value.

    Called for `x` if the code reads `x.attribute`.
    """
    if isinstance(value, types.ModuleType):
        return not is_library_module(value)
    if isinstance(value, (jax.Array, np.ndarray, *nnx_contents.OBJECT_TYPES)):
        return False
    return root_package(value if isinstance(value, type) else type(value)) not in OPAQUE_PACKAGES


def is_transparent(value: object) -> bool:
    """Whether the search visits the attributes of an object that code uses as a whole.

    Called for `x` if the code calls it, passes it or indexes it.
    """
    cls = type(value)
    # The search lists attributes by `__dict__`, which objects with only slots lack.
    if isinstance(value, (types.ModuleType, *nnx_contents.OBJECT_TYPES)) or cls.__dictoffset__ == 0:
        return False
    # A namespace of a library (such as argparse) has only the attributes that you have set. Its
    # class is known by name, because several libraries have one.
    return is_program_class(cls) or cls.__name__ in ("SimpleNamespace", "Namespace")


def _is_library_file(file: str) -> bool:
    return file.startswith(_TPUDIST) or program_packages.is_library_file(file)
