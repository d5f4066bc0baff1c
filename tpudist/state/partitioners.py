"""Into how many pieces a variable is cut, from its shape and dtype.

A partitioner gives a list of counts, one for each dim, of which all but one are 1. As
`tf.distribute.experimental.partitioners`; a shape is any sequence of sizes here, a dtype whatever
NumPy or JAX take for one, and `"string"`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner:
    """The interface: one's own partitioner overrides `__call__`.

    As `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """How many pieces along each dim.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
            axis: The dim that is cut.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define how to cut a variable. Override __call__(self, "
            "shape, dtype, axis=0) to return a list of counts, one for each dim."
        )


class FixedShardsPartitioner(Partitioner):
    """So many pieces, or as many as the dim has rows if these are fewer.

    As `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    def __init__(self, num_shards: int):
        """At most `num_shards` pieces.

        Raises:
            ValueError: That is not positive.
        """
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """How many pieces along each dim; `ValueError` if there is no dim `axis`."""
        return _counts(shape, axis, min(self._num_shards, _size(shape, axis)))


class MinSizePartitioner(Partitioner):
    """As many pieces as there can be of at least so many bytes.

    As `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ):
        """Pieces of at least `min_shard_bytes`.

        Args:
            min_shard_bytes: The least number of bytes of a piece, but for rounding.
            max_shards: The largest number of pieces.
            bytes_per_string: What a string is taken to need.

        Raises:
            ValueError: One of them is not positive.
        """
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """How many pieces along each dim; `ValueError` if there is no dim `axis`."""
        num_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        wanted = math.ceil(num_bytes / self._min_shard_bytes)
        return _counts(shape, axis, max(1, min(_size(shape, axis), self._max_shards, wanted)))


class MaxSizePartitioner(Partitioner):
    """As few pieces as there can be of at most so many bytes.

    As `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ):
        """Pieces of at most `max_shard_bytes`, or of one row if a row has more.

        Args:
            max_shard_bytes: The largest number of bytes of a piece.
            max_shards: The largest number of pieces, which goes before `max_shard_bytes`; None for
                no limit.
            bytes_per_string: What a string is taken to need.

        Raises:
            ValueError: One of them is not positive.
        """
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """How many pieces along each dim; `ValueError` if there is no dim `axis`."""
        rows = _size(shape, axis)
        if math.prod(shape) == 0:
            return _counts(shape, axis, 1)
        row_bytes = math.prod(shape) // rows * _element_bytes(dtype, self._bytes_per_string)
        rows_per_shard = max(1, int(self._max_shard_bytes // row_bytes))
        shards = -(-rows // rows_per_shard)
        return _counts(shape, axis, min(shards, self._max_shards or shards))


def _positive(what: str, value: Any) -> Any:
    if not value >= 1:
        raise ValueError(f"Argument `{what}` must be positive. Received: {value}")
    return value


def _size(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Cannot partition variable along axis {axis} when shape is only {tuple(shape)}. Axes "
            "are counted from 0."
        )
    return shape[axis]


def _counts(shape: Sequence[int], axis: int, count: int) -> list[int]:
    counts = [1] * len(shape)
    counts[axis] = count
    return counts


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    if dtype == "string":
        return bytes_per_string
    dtype = jnp.dtype(dtype)
    return bytes_per_string if dtype.kind in "OSU" else np.dtype(dtype).itemsize
