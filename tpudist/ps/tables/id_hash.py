"""Converts ids to 64 bits, and assigns each id to a shard of its table.

An unsigned id and the signed id with the same bits are the same id. The shard depends only on the
id and the number of shards, so that every process finds it, and a table can be divided again.
"""

import numpy as np
from jax.typing import ArrayLike

_MAX_SHARDS = 1 << 31  # shard numbers are int32


def as_ids(ids: ArrayLike) -> np.ndarray:
    """Returns ids as int64 `[n]`.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If they do not have one dim.
    """
    array = np.asarray(ids)
    if not array.size and isinstance(ids, list | tuple):
        array = array.astype(np.int64)  # NumPy makes floats of an empty list
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


def shard_of(ids: ArrayLike, num_shards: int) -> np.ndarray:
    """Returns the shard of each id, int32 `[n]`. A shard has a range of the hashes.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If they do not have one dim, or `num_shards` is not from 1 to 2^31.
    """
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise ValueError(
            f"A table cannot be split over {num_shards} shards: the number must be from 1 to "
            f"2^31. Use the number of parameter servers."
        )
    upper = _mix(as_ids(ids)) >> np.uint64(32)
    return (upper * np.uint64(num_shards) >> np.uint64(32)).astype(np.int32)


def _mix(ids: np.ndarray) -> np.ndarray:
    """Hashes ids with the 64-bit finalizer of MurmurHash3: each bit affects half of the bits."""
    bits = ids.view(np.uint64).copy()
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits ^= bits >> np.uint64(33)
        bits *= np.uint64(factor)
    return bits ^ (bits >> np.uint64(33))
