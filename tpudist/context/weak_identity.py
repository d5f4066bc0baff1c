"""Sets and dicts of objects that are found as the objects they are, whatever `==` says of them."""

import weakref
from collections.abc import Iterable
from typing import Any


class WeakIdentitySet:
    """A set that does not keep its elements alive.

    For Variables, which compare elementwise: `weakref.WeakSet` asks `==` even of the same object.
    """

    def __init__(self):
        """Empty."""
        self._by_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, element: Any) -> bool:
        return id(element) in self._by_id

    def add(self, element: Any) -> None:
        """Puts `element` in."""
        self._by_id[id(element)] = element

    def difference_update(self, elements: Iterable[Any]) -> None:
        """Takes `elements` out, if they are in."""
        for element in elements:
            self._by_id.pop(id(element), None)


class WeakIdentityDict:
    """A dict that does not keep its keys alive, nor what belongs to a key that is gone."""

    def __init__(self):
        """Empty."""
        self._items: dict[int, tuple[weakref.ref, Any]] = {}

    def get(self, key: Any) -> Any:
        """Returns the value of `key`; None if it has none."""
        found = self._items.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def setdefault(self, key: Any, default: Any) -> Any:
        """What belongs to `key`: `default` from now on, if nothing does.

        Raises:
            TypeError: There are no weak references to objects like `key`.
        """
        number, items = id(key), self._items
        found = items.get(number)
        if found is not None and found[0]() is key:
            return found[1]
        items[number] = weakref.ref(key, lambda _: items.pop(number, None)), default
        return default
