"""Partial batches whose padding shows where it is used."""

from collections.abc import Sequence

import numpy as np

import tpudist
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica


def stack_spoilt(strategy: tpudist.Strategy, parts: Sequence[np.ndarray], full: int) -> PerReplica:
    """The rows of each replica, padded to `full` with NaN, or with an index out of all bounds."""
    padding = np.nan if parts[0].dtype.kind == "f" else 10**6
    if parts[0].dtype == bool:
        padding = True
    stacked = np.full((len(parts), full, *parts[0].shape[1:]), padding, parts[0].dtype)
    for i, part in enumerate(parts):
        stacked[i, : len(part)] = part
    return PerReplica(placement.stack(strategy.replica_mesh, stacked), tuple(map(len, parts)))
