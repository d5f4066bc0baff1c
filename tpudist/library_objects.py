"""Objects of libraries that tpudist imports only when a program does, such as Keras models.

Packages that save objects ask here what such an object holds. The answer comes from a package above
them, which `tpudist/__init__.py` names.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

Opener = Callable[[Any, Iterable[Any]], Any]

_openers: dict[str, Callable[[], Opener]] = {}


def register(library: str, get_opener: Callable[[], Opener]) -> None:
    """Registers how the objects of a library are opened.

    Args:
        library: Name of its package.
        get_opener: Called when the program has imported the library. Returns a function of an
            object and the objects next to it, which returns what stands for it in a checkpoint, or
            None.
    """
    _openers[library] = get_opener


def open_object(x: Any, neighbors: Iterable[Any]) -> Any:
    """Returns what stands for an object of a library, or None if it is not one."""
    for library, get_opener in _openers.items():
        if library in sys.modules and _is_of(x, library):
            return get_opener()(x, neighbors)
    return None


def is_known(x: Any) -> bool:
    """Returns whether `x` is an object of one of these libraries."""
    return any(library in sys.modules and _is_of(x, library) for library in _openers)


def _is_of(x: Any, library: str) -> bool:
    return any(kind.__module__.partition(".")[0] == library for kind in type(x).__mro__)
