"""Names for types in signatures: trees of arrays, and shapes; and the named tuples in trees."""

from typing import Any, TypeAlias

# Nested tuples, lists, dicts and registered classes, with arrays or other leaves. No type checker
# can express that, so the alias documents what a parameter is.
PyTree: TypeAlias = Any

Shape: TypeAlias = tuple[int, ...]


def is_named_tuple(node: object) -> bool:
    """Returns whether a node of a tree is a named tuple, whose class takes one argument per item.

    All other tuples and lists take one iterable.
    """
    return isinstance(node, tuple) and hasattr(node, "_fields")
