"""Partitioners: functions from a variable's shape and dtype to a number of shards.

A partitioner returns a list with one count per dim; all counts except one are 1. Matches
`tf.distribute.experimental.partitioners`, with any sequence of sizes as the shape, and any dtype of
NumPy or JAX or `"string"` as the dtype.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


VariableDType: TypeAlias = DTypeLike | str  # "string" is for variables of strings, as TensorFlow's

_Number = TypeVar("_Number", bound=float)


class Partitioner:
    """Interface of partitioners; override `__call__`.

    Matches `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: VariableDType, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim.

        Args:
            shape: Shape of the variable.
            dtype: Dtype of the variable.
            axis: The dim to split.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define how to cut a variable. Override __call__(self, "
            "shape, dtype, axis=0) to return a list of counts, one for each dim."
        )


class FixedShardsPartitioner(Partitioner):
    """Partitioner with a fixed number of shards, or one per row if the dim has fewer rows.

    Matches `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.

    Args:
        num_shards: Number of shards.

    Raises:
        ValueError: If `num_shards` is not positive.
    """

    def __init__(self, num_shards: int):
        self._num_shards = _check_positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: VariableDType, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim; `ValueError` if there is no dim `axis`."""
        return _counts(shape, axis, min(self._num_shards, _size(shape, axis)))


class MinSizePartitioner(Partitioner):
    """Partitioner with as many shards as possible of at least `min_shard_bytes` bytes each.

    Matches `tf.distribute.experimental.partitioners.MinSizePartitioner`.

    Args:
        min_shard_bytes: Minimum number of bytes per shard, except for rounding.
        max_shards: Maximum number of shards.
        bytes_per_string: Assumed number of bytes of a string.

    Raises:
        ValueError: If an argument is not positive.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ):
        self._min_shard_bytes = _check_positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _check_positive("max_shards", max_shards)
        self._bytes_per_string = _check_positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: VariableDType, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim; `ValueError` if there is no dim `axis`."""
        num_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        # Rounded up, as in TensorFlow: so shards may be somewhat smaller than the minimum.
        count = math.ceil(num_bytes / self._min_shard_bytes)
        return _counts(shape, axis, max(1, min(_size(shape, axis), self._max_shards, count)))


class MaxSizePartitioner(Partitioner):
    """Partitioner with as few shards as possible of at most `max_shard_bytes` bytes each.

    Matches `tf.distribute.experimental.partitioners.MaxSizePartitioner`.

    Args:
        max_shard_bytes: Maximum number of bytes per shard. A shard has at least one row, even if
            a row has more bytes.
        max_shards: Maximum number of shards, even if shards then exceed `max_shard_bytes`; None
            for no limit.
        bytes_per_string: Assumed number of bytes of a string.

    Raises:
        ValueError: If an argument is not positive.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ):
        self._max_shard_bytes = _check_positive("max_shard_bytes", max_shard_bytes)
        # 0 counts as None, as in TensorFlow.
        self._max_shards = _check_positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _check_positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: VariableDType, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim; `ValueError` if there is no dim `axis`."""
        rows = _size(shape, axis)
        if math.prod(shape) == 0:
            return _counts(shape, axis, 1)
        row_bytes = math.prod(shape) // rows * _element_bytes(dtype, self._bytes_per_string)
        rows_per_shard = max(1, int(self._max_shard_bytes // row_bytes))
        shards = -(-rows // rows_per_shard)
        return _counts(shape, axis, min(shards, self._max_shards or shards))


def _check_positive(parameter: str, value: _Number) -> _Number:
    if not value >= 1:  # also for NaN
        raise ValueError(f"Argument `{parameter}` must be positive. Received: {value}")
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


def _element_bytes(dtype: VariableDType, bytes_per_string: int) -> int:
    if dtype == "string":  # also true for `tf.string`
        return bytes_per_string
    parsed = jnp.dtype(dtype)  # which knows bfloat16
    return bytes_per_string if parsed.kind in "OSU" else np.dtype(parsed).itemsize
