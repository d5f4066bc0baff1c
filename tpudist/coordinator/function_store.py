"""FunctionStore: functions that are sent to workers in other processes, once for each worker."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
from collections.abc import Callable
from typing import Any

from tpudist.coordinator import function_snapshot
from tpudist.coordinator.function_snapshot import FunctionSnapshot
from tpudist.coordinator.worker import Kept
from tpudist.engine.engine import Serializer

MAX_FUNCTIONS = 64
"""How many functions workers keep; then that which was scheduled longest ago is sent again."""
MAX_SNAPSHOTS = 8
"""Of how many functions of one definition it is known what they capture."""


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
        self._snapshots: dict[Any, list[tuple[FunctionSnapshot, bytes]]] = {}  # by definition

    def store(self, fn: Callable[..., Any]) -> StoredFunction:
        """What stands for `fn` on workers, which may be told to forget it before it is used.

        Raises:
            TypeError: It captures what cannot be sent.
        """
        snapshot = function_snapshot.take(fn, self._serializer.modules_by_value)
        digest = snapshot and self._find(fn, snapshot)
        if digest is not None:
            self._stored.move_to_end(digest)
            return self._stored[digest]
        data = self._serializer.dumps(fn)
        digest = hashlib.sha256(data).digest()
        if digest in self._stored:
            self._stored.move_to_end(digest)
        else:
            make = self._serializer.loads
            self._stored[digest] = StoredFunction(Kept(self._keep(make, (data,))), make, data)
            if len(self._stored) > MAX_FUNCTIONS:
                self._forget_oldest()
        if snapshot is not None:
            known = self._snapshots.setdefault(_definition_of(fn), [])
            known.append((snapshot, digest))
            del known[:-MAX_SNAPSHOTS]
        return self._stored[digest]

    def _find(self, fn: Callable[..., Any], snapshot: FunctionSnapshot) -> bytes | None:
        """The digest of the function that captures the same; None if there was none."""
        for known, digest in self._snapshots.get(_definition_of(fn), ()):
            if known.equals(snapshot):
                return digest
        return None

    def _forget_oldest(self) -> None:
        digest, oldest = self._stored.popitem(last=False)
        self._forget(oldest.kept.key)
        for definition, known in list(self._snapshots.items()):
            left = [x for x in known if x[1] != digest]
            self._snapshots[definition] = left
            if not left:
                del self._snapshots[definition]


def _definition_of(fn: Callable[..., Any]) -> Any:
    return fn.__code__ if isinstance(fn, types.FunctionType) else type(fn)
