"""ServerArray: one array on servers, as a checkpoint saves and restores it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tpudist.array_types import Shape


class ArraySource(Protocol):
    """An object with several arrays, which it reads and replaces together."""

    def read(self, key: Hashable) -> np.ndarray:
        """Returns one of the arrays."""
        ...

    def write_all(self, values: dict[Hashable, np.ndarray]) -> None:
        """Replaces arrays, once for all that a checkpoint has restored."""
        ...


class ArraysInCheckpoint:
    """The arrays of one source, while a checkpoint is saved or restored."""

    def __init__(self, source: ArraySource):
        self.source = source
        self.restored: dict[Hashable, np.ndarray] = {}

    def array(
        self,
        key: Hashable,
        shape: Shape,
        dtype: DTypeLike,
        sharding: jax.sharding.Sharding | None = None,
    ) -> ServerArray:
        """Returns one of the arrays; without a sharding it is a NumPy array."""
        return ServerArray(self, key, shape, dtype, sharding)


class ServerArray:
    """One array; created by `ArraysInCheckpoint.array`.

    A checkpoint saves each array separately. A server must receive restored arrays together, so the
    arrays of one source collect them.
    """

    def __init__(
        self,
        arrays: ArraysInCheckpoint,
        key: Hashable,
        shape: Shape,
        dtype: DTypeLike,
        sharding: jax.sharding.Sharding | None,
    ):
        self._arrays, self._key = arrays, key
        self._spec = tuple(shape), np.dtype(dtype), sharding

    def checkpoint_spec(self) -> tuple[Shape, np.dtype, jax.sharding.Sharding | None]:
        """Returns shape (-1 for any number of rows), dtype, and sharding for a restored value."""
        return self._spec

    def checkpoint_value(self) -> np.ndarray:
        """Returns the value for a checkpoint."""
        return self._arrays.source.read(self._key)

    def restore(self, value: ArrayLike) -> None:
        """Stores a value from a checkpoint until `finish_restore`."""
        self._arrays.restored[self._key] = np.asarray(value)

    def finish_restore(self) -> None:
        """Sends all restored arrays of the source to the servers.

        A checkpoint calls this for each array, and the first call sends all of them.
        """
        restored, self._arrays.restored = self._arrays.restored, {}
        if restored:
            self._arrays.source.write_all(restored)
