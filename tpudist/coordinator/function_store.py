"""FunctionStore: functions that are sent to workers in other processes, once for each worker."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from tpudist.coordinator.worker import Kept
from tpudist.engine.engine import Serializer

MAX_FUNCTIONS = 64
"""How many functions workers keep; then that which was scheduled longest ago is sent again."""


@dataclasses.dataclass(frozen=True)
class StoredFunction:
    """A function as workers have it.

    Attributes:
        kept: Stands for it.
        make: Gives it.
        data: Of which.
    """

    kept: Kept
    make: Callable[[bytes], Any]
    data: bytes


class FunctionStore:
    """Knows functions by their bytes, so that a worker has one object for all calls of one.

    With another object in each call a worker would compile each time. The bytes have all that a
    function captures, so that what has changed since is sent.
    """

    def __init__(
        self,
        serializer: Serializer,
        keep: Callable[[Callable[..., Any], tuple], int],
        forget: Callable[[int], None],
    ):
        """Empty.

        Args:
            serializer: Of the engine.
            keep: Has workers keep what a function makes of arguments; its key.
            forget: Has them forget what has a key.
        """
        self._serializer, self._keep, self._forget = serializer, keep, forget
        self._stored: collections.OrderedDict[bytes, StoredFunction] = collections.OrderedDict()

    def store(self, fn: Callable[..., Any]) -> StoredFunction:
        """What stands for `fn` on workers, which may be told to forget it before it is used.

        Raises:
            TypeError: It captures what cannot be sent.
        """
        data = self._serializer.dumps(fn)
        digest = hashlib.sha256(data).digest()
        if digest in self._stored:
            self._stored.move_to_end(digest)
        else:
            make = self._serializer.loads
            self._stored[digest] = StoredFunction(Kept(self._keep(make, (data,))), make, data)
            if len(self._stored) > MAX_FUNCTIONS:
                self._forget(self._stored.popitem(last=False)[1].kept.key)
        return self._stored[digest]
