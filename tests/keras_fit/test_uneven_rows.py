"""Batches on the devices: split, padded, and cut back to their real rows."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpudist
from tpudist.keras import current_distribution, uneven_rows
from tpudist.values.per_replica import PerReplica


@pytest.fixture(scope="module")
def distribution():
    return current_distribution.distribution_of(tpudist.MirroredStrategy())


@pytest.mark.parametrize("num_rows", [1, 7, 13])
def test_padded_rows_are_removed_in_a_program(distribution, num_rows):
    value = np.arange(2.0 * num_rows).reshape(num_rows, 2)
    found = uneven_rows.place(value, distribution)
    assert (found.shape, found.ndim, found.dtype) == (value.shape, 2, np.float32)
    assert found.padded.shape[0] % 8 == 0
    total = jax.jit(lambda batch: uneven_rows.cut_batch(batch)[0].sum(0))((found,))
    np.testing.assert_array_equal(total, value.sum(0))
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("rows", [(2,) * 8, (2, 2, 1, 0, 0, 0, 0, 0), (2, 1, 0, 2, 2, 1, 0, 1)])
def test_rows_of_replicas_are_joined_in_order(distribution, rows):
    """Covers full parts, full parts at the start, and partial parts in any place."""
    array = jax.device_put(np.arange(48.0).reshape(8, 2, 3), distribution.rows_sharding(8)[0])
    found = uneven_rows.of_replicas(PerReplica(array, rows), distribution)
    wanted = np.concatenate([np.asarray(array)[i, :n] for i, n in enumerate(rows)])
    assert (found.shape, found.ndim) == (wanted.shape, 2)
    np.testing.assert_array_equal(jax.jit(uneven_rows.cut_batch)(found), wanted)


def test_per_replica_values_that_are_not_rows_are_rejected(distribution):
    array = jax.device_put(np.arange(8.0), distribution.rows_sharding(8)[0])
    with pytest.raises(TypeError, match=r"parts \[\] on each replica that are not rows"):
        uneven_rows.of_replicas(PerReplica(array), distribution)


def test_a_batch_that_divides_evenly_is_not_padded(distribution):
    found = uneven_rows.place(np.ones((16, 2), "int64"), distribution)
    assert found.sharding == NamedSharding(distribution.mesh, PartitionSpec("replica"))
    assert found.dtype == np.int32


def test_a_batch_is_placed_leaf_by_leaf(distribution):
    """Splits arrays that are already on a device; leaves numbers and None unchanged."""
    batch = {"a": jax.numpy.ones((7, 2)), "b": None, "c": np.float32(3), "d": np.ones(16)}
    found = uneven_rows.place_batch(batch, distribution)
    assert isinstance(found["a"], uneven_rows.UnevenRows)
    assert (found["b"], found["c"].shape, found["d"].shape) == (None, (), (16,))
    assert uneven_rows.place_batch(found, distribution)["a"] is found["a"]


def test_padding_never_affects_a_result():
    """The test fills the padding with NaN."""
    strategy = tpudist.MirroredStrategy()
    distribution = current_distribution.distribution_of(strategy)
    found = uneven_rows.place(np.ones((60, 3), "float32"), distribution)
    real = jax.numpy.arange(64)[:, None] < 60
    spoilt = jax.jit(lambda x: jax.numpy.where(real, x, np.nan), out_shardings=found.sharding)
    found = uneven_rows.UnevenRows(spoilt(found.padded), (60,), False, found.sharding)

    def loss(kernel, batch):
        y = batch.cut() @ kernel
        return ((y - y.mean(0)) ** 2 + jax.numpy.log(y)).mean()

    kernel = jax.numpy.ones((3, 2))
    gradient = jax.jit(jax.grad(loss))(kernel, found)
    np.testing.assert_allclose(gradient, np.full((3, 2), 1 / 6), rtol=1e-5)
