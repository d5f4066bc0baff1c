"""Names for types in signatures: trees of arrays, and shapes."""

from typing import Any, TypeAlias

# Nested tuples, lists, dicts and registered classes, with arrays or other leaves. No type checker
# can express that, so the alias documents what a parameter is.
PyTree: TypeAlias = Any

Shape: TypeAlias = tuple[int, ...]
