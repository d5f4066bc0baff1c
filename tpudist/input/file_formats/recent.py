"""Values that were used last, up to a number of bytes."""

import collections
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The most recently used values, up to `max_bytes` and at least one. Threads may share it.

    The last one stays even if it is larger, because it is usually the next one, too. Two threads
    may make the same value at once; the second one replaces the first.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Reentrant: the garbage collector may run code of others in a thread that has it.
        self._lock = threading.RLock()
        self._values: collections.OrderedDict[Hashable, tuple[_T, int]] = collections.OrderedDict()

    def get(self, key: Hashable) -> _T | None:
        """Returns a value, which is then the last one used; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: _T, num_bytes: int) -> None:
        """Adds a value of `num_bytes` bytes; drops the values that were used least recently."""
        with self._lock:
            _, old_bytes = self._values.pop(key, (None, 0))
            self._values[key] = (value, num_bytes)
            self.num_bytes += num_bytes - old_bytes
            while self.num_bytes > self.max_bytes and len(self._values) > 1:
                _, (_, dropped_bytes) = self._values.popitem(last=False)
                self.num_bytes -= dropped_bytes
