"""Registry for the contents of objects of optional libraries, such as Keras models.

tpudist imports such a library only if the program does. Packages that save objects call
`open_object`. The functions that know a library are in packages of higher layers, which
`tpudist/__init__.py` registers.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

# Called with an object and the objects next to it; returns its contents, or None.
Opener = Callable[[object, Iterable[object]], Any]

_openers: dict[str, Callable[[], Opener]] = {}


def register(library: str, get_opener: Callable[[], Opener]) -> None:
    """Registers the opener for the objects of a library.

    Args:
        library: Name of the library's package.
        get_opener: Called if the program has imported the library; returns the opener.
    """
    _openers[library] = get_opener


def open_object(x: object, neighbors: Iterable[object]) -> Any:
    """Returns the contents of an object that a checkpoint saves, or None for any other object."""
    for library, get_opener in _openers.items():
        if library in sys.modules and _is_of(x, library):
            return get_opener()(x, neighbors)
    return None


def is_known(x: object) -> bool:
    """Returns whether `x` is an object of a registered library."""
    return any(library in sys.modules and _is_of(x, library) for library in _openers)


def _is_of(x: object, library: str) -> bool:
    return any(cls.__module__.partition(".")[0] == library for cls in type(x).__mro__)
