"""ShardTraffic: the bytes of arrays that one server has received and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from tpudist.ps.changes import Assignment, Change, Gradients, RowChange

_Array = TypeVar("_Array", np.ndarray, jax.Array)


class ShardTraffic:
    """Counts the bytes of arrays in memory since the server started.

    Message headers, and repeated messages of a lower layer, do not count: arrays are the part that
    grows with the model.

    Attributes:
        bytes_in: Bytes of received initial values, updates, ids and indices.
        bytes_out: Bytes of sent values.
    """

    def __init__(self):
        self.bytes_in = self.bytes_out = 0

    def take(self, *arrays: ArrayLike | None) -> None:
        """Counts received arrays; None counts as nothing."""
        self.bytes_in += sum(map(_nbytes, arrays))

    def take_changes(self, changes: Sequence[Change]) -> None:
        """Counts received updates."""
        for change in changes:
            self.take(*_arrays_of(change))

    def give(self, array: _Array) -> _Array:
        """Counts and returns an array that is sent."""
        self.bytes_out += array.nbytes
        return array


def _arrays_of(change: Change) -> tuple[ArrayLike | None, ...]:
    if isinstance(change, Assignment):
        return (change.value,)
    if isinstance(change, Gradients):
        return *change.values, *change.indices
    if isinstance(change, RowChange):
        return change.indices, change.values
    return change.ids, change.values


def _nbytes(array: ArrayLike | None) -> int:
    if array is None:
        return 0
    return array.nbytes if isinstance(array, np.ndarray | jax.Array) else np.asarray(array).nbytes
