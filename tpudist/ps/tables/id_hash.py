"""Ids of 64 bits, and on which shard of a table each of them is.

An unsigned id and the signed one of the same bits are the same id. The shard depends on the id and
on the number of shards alone, so that everyone finds it, and a table can be split anew.
"""

from typing import Any

import numpy as np

_MOST_SHARDS = 1 << 31


def as_ids(ids: Any) -> np.ndarray:
    """The ids as int64 `[n]`.

    Raises:
        TypeError: They are not integers.
        ValueError: They have not one dim.
    """
    array = np.asarray(ids)
    if not array.size and not hasattr(ids, "dtype"):
        array = array.astype(np.int64)  # NumPy takes an empty list for floats
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"The ids of table rows have dtype {array.dtype}, but must be integers of at most 64 "
            f"bits. Hash or cast them, such as with ids.astype(np.int64)."
        )
    if array.ndim != 1:
        raise ValueError(
            f"The ids of table rows have shape {list(array.shape)}, but must have one dim. "
            f"Flatten them with ids.reshape(-1), and reshape the result."
        )
    if array.dtype.itemsize == 8:
        return np.ascontiguousarray(array).view(np.int64)
    return array.astype(np.int64)


def shard_of(ids: Any, num_shards: int) -> np.ndarray:
    """The shard of each id, int32 `[n]`: each shard has the hashes of one range.

    Raises:
        TypeError: The ids are not integers.
        ValueError: The ids have not one dim, or the number of shards is not from 1 to 2^31.
    """
    if not 1 <= num_shards <= _MOST_SHARDS:
        raise ValueError(
            f"A table cannot be split over {num_shards} shards: the number must be from 1 to "
            f"2^31. Use the number of parameter servers."
        )
    upper = _mix(as_ids(ids)) >> np.uint64(32)
    return (upper * np.uint64(num_shards) >> np.uint64(32)).astype(np.int32)


def _mix(ids: np.ndarray) -> np.ndarray:
    """Each bit of an id changes half of the bits: the finalizer of MurmurHash3, on 64 bits."""
    bits = ids.view(np.uint64).copy()
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits ^= bits >> np.uint64(33)
        bits *= np.uint64(factor)
    return bits ^ (bits >> np.uint64(33))
