"""Sets and dicts that compare objects by identity and do not keep them alive.

Keys are `id(x)`. An id is used again when its object is gone, so each entry has a weak reference to
the object: an entry whose object is gone counts as missing, and is removed.
"""

import weakref
from collections.abc import Iterable
from typing import Generic, TypeVar

_V = TypeVar("_V")


class WeakIdentitySet:
    """A set that does not keep its elements alive.

    For Variables, which compare elementwise: `weakref.WeakSet` calls `==` even of the same object.

    Attributes:
        items: A weak reference to each element by its id. Its truth value tells without a call of a
            Python function whether the set is empty.
    """

    def __init__(self):
        self.items: dict[int, weakref.ref] = {}

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, element: object) -> bool:
        reference = self.items.get(id(element))
        return reference is not None and reference() is element

    def add(self, element: object) -> None:
        """Adds `element`."""
        number, items = id(element), self.items
        items[number] = weakref.ref(element, lambda _: items.pop(number, None))

    def difference_update(self, elements: Iterable[object]) -> None:
        """Removes `elements`, as far as they are in the set."""
        for element in elements:
            self.items.pop(id(element), None)


class WeakIdentityDict(Generic[_V]):
    """A dict that does not keep its keys alive; an entry disappears with its key."""

    def __init__(self):
        self._items: dict[int, tuple[weakref.ref, _V]] = {}

    def get(self, key: object) -> _V | None:
        """Returns the value of `key`; None if it has none."""
        item = self._items.get(id(key))
        return item[1] if item is not None and item[0]() is key else None

    def setdefault(self, key: object, default: _V) -> _V:
        """Returns the value of `key`, which becomes `default` if it has none.

        Raises:
            TypeError: If objects like `key` do not support weak references.
        """
        number, items = id(key), self._items
        item = items.get(number)
        if item is not None and item[0]() is key:
            return item[1]
        items[number] = weakref.ref(key, lambda _: items.pop(number, None)), default
        return default
