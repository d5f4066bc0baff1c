"""Numbers of shards of variables, compared with TensorFlow's results."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tpudist.experimental import partitioners

FIXED, MIN, MAX = "FixedShardsPartitioner", "MinSizePartitioner", "MaxSizePartitioner"
# Class, its arguments, shape, dtype, axis, and what TensorFlow 2.21.0 gave.
RECORDED = [
    (FIXED, {"num_shards": 2}, (10, 3), "float32", 0, [2, 1]),
    (FIXED, {"num_shards": 2}, (10, 3), "float32", 1, [1, 2]),
    (FIXED, {"num_shards": 7}, (3, 5), "int8", 0, [3, 1]),
    (FIXED, {"num_shards": 7}, (3, 5, 9), "int8", -1, [1, 1, 7]),
    (FIXED, {"num_shards": 1}, (4,), "float64", 0, [1]),
    (MIN, {}, (1024, 1024), "float32", 0, [1, 1]),
    (MIN, {"max_shards": 16}, (1024, 1024), "float32", 0, [16, 1]),
    (MIN, {"max_shards": 100}, (1024, 1024), "float32", 0, [16, 1]),
    (MIN, {"max_shards": 100}, (1024, 1024), "bfloat16", 1, [1, 8]),
    (MIN, {"min_shard_bytes": 4, "max_shards": 2}, (6, 1), "float32", 0, [2, 1]),
    (MIN, {"min_shard_bytes": 4, "max_shards": 10}, (6, 1), "float32", 0, [6, 1]),
    (MIN, {"min_shard_bytes": 5, "max_shards": 10}, (6, 1), "float32", 0, [5, 1]),
    (MIN, {"min_shard_bytes": 1000, "max_shards": 10}, (6, 1), "float32", 0, [1, 1]),
    (MIN, {"min_shard_bytes": 32, "max_shards": 10}, (6, 2), "string", 0, [6, 1]),
    (
        MIN,
        {"min_shard_bytes": 32, "max_shards": 9, "bytes_per_string": 1},
        (6, 2),
        "string",
        0,
        [1] * 2,
    ),
    (MIN, {"min_shard_bytes": 100, "max_shards": 30}, (7, 64, 3), "complex64", 1, [1, 30, 1]),
    (MAX, {"max_shard_bytes": 4}, (6, 1), "float32", 0, [6, 1]),
    (MAX, {"max_shard_bytes": 4, "max_shards": 2}, (6, 1), "float32", 0, [2, 1]),
    (MAX, {"max_shard_bytes": 1024}, (6, 1), "float32", 0, [1, 1]),
    (MAX, {"max_shard_bytes": 1}, (10, 10), "float32", 0, [10, 1]),
    (MAX, {"max_shard_bytes": 100}, (10, 10), "float32", 0, [5, 1]),
    (MAX, {"max_shard_bytes": 100}, (10, 10), "bool", 1, [1, 1]),
    (MAX, {"max_shard_bytes": 120}, (10, 10), "float32", 0, [4, 1]),
    (MAX, {"max_shard_bytes": 64 << 20}, (50000, 1024), "float32", 0, [4, 1]),
    (
        MAX,
        {"max_shard_bytes": (64 << 20) - 1, "max_shards": 3},
        (50000, 1024),
        "float32",
        0,
        [3, 1],
    ),
    (MAX, {"max_shard_bytes": 100, "bytes_per_string": 3}, (10, 10), "string", 0, [4, 1]),
    (MAX, {"max_shard_bytes": 100}, (10, 10), "string", 0, [10, 1]),
    (MAX, {"max_shard_bytes": 1000, "max_shards": 0}, (7, 5, 3), "int64", -2, [1, 1, 1]),
]


@pytest.mark.parametrize(("kind", "arguments", "shape", "dtype", "axis", "counts"), RECORDED)
def test_a_variable_is_cut_as_in_tensorflow(kind, arguments, shape, dtype, axis, counts):
    partitioner = getattr(partitioners, kind)(**arguments)
    assert isinstance(partitioner, partitioners.Partitioner)
    assert partitioner(shape, dtype, axis) == counts
    if dtype != "string":
        assert partitioner(list(shape), jnp.dtype(dtype), axis=axis) == counts


class _TfString:
    """`tf.string`, which equals its name and is not a dtype of NumPy."""

    def __eq__(self, other):
        return other == "string"

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "dtype", ["string", _TfString(), str, np.dtype("U3"), np.dtype("S7"), object]
)
def test_a_string_needs_as_many_bytes_as_one_says(dtype):
    partitioner = partitioners.MaxSizePartitioner(max_shard_bytes=10, bytes_per_string=5)
    assert partitioner((6,), dtype) == [3]


@given(
    rows=st.integers(1, 5000),
    columns=st.integers(1, 50),
    limit=st.integers(1, 100_000),
    dtype=st.sampled_from(["int8", "float32", "float64"]),
)
def test_shards_are_within_the_limit_and_as_few_as_possible(rows, columns, limit, dtype):
    row_bytes = columns * np.dtype(dtype).itemsize
    [pieces, across] = partitioners.MaxSizePartitioner(limit)((rows, columns), dtype)
    assert across == 1
    assert math.ceil(rows / pieces) * row_bytes <= max(limit, row_bytes)
    if pieces > 1:
        fewer = math.ceil(rows / (pieces - 1)) * row_bytes
        assert fewer > limit


def test_a_variable_without_elements_stays_whole():
    assert partitioners.MaxSizePartitioner(8)((0, 4), "float32") == [1, 1]
    assert partitioners.MinSizePartitioner(8, max_shards=3)((4, 0), "float32") == [1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: partitioners.FixedShardsPartitioner(0), "`num_shards` must be positive"),
        (lambda: partitioners.MinSizePartitioner(0), "`min_shard_bytes` must be positive"),
        (lambda: partitioners.MinSizePartitioner(max_shards=0), "`max_shards` must be positive"),
        (
            lambda: partitioners.MinSizePartitioner(bytes_per_string=-1),
            "`bytes_per_string` must be positive. Received: -1",
        ),
        (lambda: partitioners.MaxSizePartitioner(0), "`max_shard_bytes` must be positive"),
        (lambda: partitioners.MaxSizePartitioner(1, -1), "`max_shards` must be positive"),
        (
            lambda: partitioners.MaxSizePartitioner(1, bytes_per_string=0),
            "`bytes_per_string` must be positive",
        ),
    ],
)
def test_sizes_that_are_not_positive_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "partitioner",
    [
        partitioners.FixedShardsPartitioner(2),
        partitioners.MinSizePartitioner(),
        partitioners.MaxSizePartitioner(4),
    ],
)
@pytest.mark.parametrize(("shape", "axis"), [((4, 4), 2), ((4, 4), -3), ((), 0)])
def test_a_missing_axis_is_rejected(partitioner, shape, axis):
    with pytest.raises(ValueError, match=f"Cannot partition variable along axis {axis} when shape"):
        partitioner(shape, "float32", axis)


def test_a_partitioner_of_ones_own_says_how_variables_are_cut():
    class Halves(partitioners.Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2 if i == axis else 1 for i in range(len(shape))]

    assert Halves()((4, 6), "float32") == [2, 1]
    with pytest.raises(
        NotImplementedError, match="Partitioner does not define how to cut a variable"
    ):
        partitioners.Partitioner()((4,), "float32")
