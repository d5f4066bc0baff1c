"""ShardTraffic: how many bytes of arrays one server was sent and has given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpudist.ps.changes import Assignment, Change, Gradients, RowChange


class ShardTraffic:
    """Counts the bytes of arrays, as they are in memory, since the server began.

    What a message has around its arrays is not among it, nor a repetition below: of what an engine
    sends between machines this is the part that grows with the model.

    Attributes:
        bytes_in: Of what it was sent: first values, changes, and the ids and indices asked for.
        bytes_out: Of what it has given.
    """

    def __init__(self):
        """Nothing yet."""
        self.bytes_in = self.bytes_out = 0

    def take(self, *arrays: Any) -> None:
        """Counts what has come; None for nothing."""
        self.bytes_in += sum(map(_nbytes, arrays))

    def take_changes(self, changes: Sequence[Change]) -> None:
        """Counts changes that have come."""
        for change in changes:
            self.take(*_arrays_of(change))

    def give(self, array: np.ndarray) -> np.ndarray:
        """Counts an array that goes out; the array."""
        self.bytes_out += array.nbytes
        return array


def _arrays_of(change: Change) -> tuple[Any, ...]:
    if isinstance(change, Assignment):
        return (change.value,)
    if isinstance(change, Gradients):
        return *change.values, *change.indices
    if isinstance(change, RowChange):
        return change.indices, change.values
    return change.ids, change.values


def _nbytes(array: Any) -> int:
    if array is None:
        return 0
    nbytes = getattr(array, "nbytes", None)
    return np.asarray(array).nbytes if nbytes is None else int(nbytes)
