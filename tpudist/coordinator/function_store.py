"""FunctionStore: functions that are sent to workers in other processes, once per worker."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
from collections.abc import Callable, Hashable
from typing import Any

from tpudist.coordinator import function_snapshot
from tpudist.coordinator.function_snapshot import FunctionSnapshot
from tpudist.coordinator.worker import ResourceRef
from tpudist.engine.engine import Serializer

MAX_FUNCTIONS = 64
"""Number of functions that workers keep. Beyond it, they delete the function that was scheduled
longest ago, which is sent again if it is scheduled again."""
MAX_SNAPSHOTS = 8
"""Number of snapshots per definition, for loops that define a function again with other values."""


@dataclasses.dataclass(frozen=True)
class StoredFunction:
    """A function that workers keep.

    Attributes:
        ref: Stands for the function in calls.
        load: Called with `data`; returns the function.
        data: The serialized function.
    """

    ref: ResourceRef
    load: Callable[[bytes], Any]
    data: bytes


class FunctionStore:
    """Identifies functions by their serialized bytes: equal functions are one object on a worker.

    A new object in each call would make the worker compile each time. The bytes include everything
    that a function captures, so a changed capture sends the function again.

    Args:
        serializer: Serializer of the engine.
        add_resource: Called with a function and its arguments; lets each worker create a resource
            and returns its key.
        remove_resource: Called with a key; lets workers delete the resource.
    """

    def __init__(
        self,
        serializer: Serializer,
        add_resource: Callable[[Callable[..., Any], tuple], int],
        remove_resource: Callable[[int], None],
    ):
        self._serializer = serializer
        self._add_resource, self._remove_resource = add_resource, remove_resource
        self._stored: collections.OrderedDict[bytes, StoredFunction] = collections.OrderedDict()
        self._snapshots: dict[Hashable, list[tuple[FunctionSnapshot, bytes]]] = {}

    def store(self, fn: Callable[..., Any]) -> StoredFunction:
        """Returns the stored copy of `fn`, which may be evicted before it is used.

        Raises:
            TypeError: If `fn` captures an object that cannot be sent.
        """
        # To serialize takes longer than a small step. A snapshot, if one can be taken, shows that
        # the function captures the same as before, so the known bytes are still its bytes.
        snapshot = function_snapshot.take(fn, self._serializer.modules_by_value)
        digest = None if snapshot is None else self._find(fn, snapshot)
        # A known digest is stored: `_forget_oldest` removes the snapshots with the bytes.
        if digest is not None:
            self._stored.move_to_end(digest)
            return self._stored[digest]
        data = self._serializer.dumps(fn)
        digest = hashlib.sha256(data).digest()
        if digest in self._stored:
            self._stored.move_to_end(digest)
        else:
            load = self._serializer.loads
            ref = ResourceRef(self._add_resource(load, (data,)))
            self._stored[digest] = StoredFunction(ref, load, data)
            if len(self._stored) > MAX_FUNCTIONS:
                self._forget_oldest()
        if snapshot is not None:
            known = self._snapshots.setdefault(_definition_of(fn), [])
            known.append((snapshot, digest))
            del known[:-MAX_SNAPSHOTS]
        return self._stored[digest]

    def _find(self, fn: Callable[..., Any], snapshot: FunctionSnapshot) -> bytes | None:
        """Returns the digest of a function that captures the same; None if there was none."""
        for known, digest in self._snapshots.get(_definition_of(fn), ()):
            if known.equals(snapshot):
                return digest
        return None

    def _forget_oldest(self) -> None:
        digest, oldest = self._stored.popitem(last=False)
        self._remove_resource(oldest.ref.key)
        for definition, known in list(self._snapshots.items()):
            known[:] = [x for x in known if x[1] != digest]
            if not known:
                del self._snapshots[definition]


def _definition_of(fn: Callable[..., Any]) -> Hashable:
    return fn.__code__ if isinstance(fn, types.FunctionType) else type(fn)
