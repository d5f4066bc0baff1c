"""ServerArray: one array that servers hold together with others, as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import jax
import numpy as np


class ArraySource(Protocol):
    """What has several arrays, which it reads and takes together."""

    def read(self, key: Hashable) -> Any:
        """One of its arrays."""
        ...

    def write_all(self, values: dict[Hashable, Any]) -> None:
        """Takes arrays, once for all that a checkpoint has restored."""
        ...


class ArraysInCheckpoint:
    """The arrays of one source, while a checkpoint is saved or restored."""

    def __init__(self, source: ArraySource):
        """None restored yet."""
        self.source = source
        self.restored: dict[Hashable, Any] = {}

    def array(
        self, key: Hashable, shape: tuple[int, ...], dtype: Any, sharding: Any = None
    ) -> ServerArray:
        """One of them; without a sharding it is NumPy's."""
        return ServerArray(self, key, shape, dtype, sharding)


class ServerArray:
    """One array, which is saved by itself, and restored with the others of its source."""

    def __init__(
        self, arrays: ArraysInCheckpoint, key: Hashable, shape: Any, dtype: Any, sharding: Any
    ):
        """Made by `ArraysInCheckpoint.array`."""
        self._arrays, self._key = arrays, key
        self._spec = tuple(shape), np.dtype(dtype), sharding

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding | None]:
        """Shape (with -1 for any number of rows), dtype, and where it is to be restored."""
        return self._spec

    def checkpoint_value(self) -> Any:
        """The value for a checkpoint."""
        return self._arrays.source.read(self._key)

    def restore(self, value: Any) -> None:
        """Takes a value from a checkpoint, in force from `finish_restore` on."""
        self._arrays.restored[self._key] = np.asarray(value)

    def finish_restore(self) -> None:
        """Has servers take all that was restored; the first array does so for all."""
        restored, self._arrays.restored = self._arrays.restored, {}
        if restored:
            self._arrays.source.write_all(restored)
