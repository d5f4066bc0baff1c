"""Memory of batches is reused, but never while its contents can still be read."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist.input.dataset import DistributedDataset
from tpudist.input.transfer import host_batch, reused_memory
from tpudist.xla.mesh import make_mesh

LARGE = (8, 1 << 18)  # 2 MiB of bytes


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture(autouse=True)
def no_free_blocks(monkeypatch):
    monkeypatch.setattr(reused_memory, "_free", reused_memory._FreeBlocks())


def test_a_large_array_is_aligned_so_that_jax_uses_it_in_place():
    array = reused_memory.empty(LARGE, np.dtype(np.uint8))
    assert address(array) % reused_memory.ALIGNMENT_BYTES == 0
    assert array.flags.carray
    assert array.shape == LARGE


def test_memory_is_reused_after_its_last_array_is_deleted():
    array = reused_memory.empty(LARGE, np.dtype(np.float16))
    where = address(array)
    part = array[3:5].reshape(-1)[7:]
    del array
    other = reused_memory.empty(LARGE, np.dtype(np.float16))
    assert address(other) != where
    del part
    assert address(reused_memory.empty((1 << 19, 8), np.dtype(np.uint8))) == where


def test_unused_memory_is_bounded():
    sizes = [*range(2 << 20, 3 << 20, 1 << 15), 50 << 20, 400 << 20]
    for size in sizes:
        arrays = [reused_memory.empty((size,), np.dtype(np.uint8)) for _ in range(10)]
        del arrays
    found = {size: len(free) for size, free in reused_memory._free._blocks.items()}
    assert found == dict.fromkeys(sizes[-8:-2], 8) | {50 << 20: 5, 400 << 20: 2}


def test_an_array_on_the_devices_keeps_the_memory_that_it_uses():
    host = reused_memory.empty(LARGE, np.dtype(np.uint8))
    host[:] = 7
    where = address(host)
    on_device = jax.device_put(host, jax.devices()[0])
    del host
    gc.collect()
    if on_device.unsafe_buffer_pointer() == where:
        others = [reused_memory.empty(LARGE, np.dtype(np.uint8)) for _ in range(3)]
        assert where not in [address(other) for other in others]
        for other in others:
            other[:] = 9
    np.testing.assert_array_equal(on_device, np.full(LARGE, 7, np.uint8))


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.dtype(">i4")])
def test_gathered_rows_equal_the_rows_of_numpy(dtype):
    array = np.arange(6 * 40 * 50_000).reshape(6 * 40, 50_000).astype(dtype)
    rows = np.random.default_rng(0).integers(len(array), size=(4, 8))
    for source in (array, array[::2]):
        where = rows % len(source)
        np.testing.assert_array_equal(host_batch.gather(source, where), source[where])


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("inner_axes", [{}, {"fsdp": 4}, {"fsdp": 8}])
def test_large_batches_are_unchanged_while_later_ones_are_prepared(shuffled, inner_axes):
    """Steps that have not run yet, and your own references, still read them."""
    rows, width = 64, 40_000
    data = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    dataset = tpudist.NumpyDataset(data)
    dataset = dataset.shuffle(0) if shuffled else dataset
    wanted = list(dataset.batch(16).repeat(4))
    assert wanted[0].nbytes >= 2 << 20
    mesh = make_mesh(jax.devices(), inner_axes)
    read = jax.jit(lambda x: jnp.cumsum(x.reshape(16, -1), axis=1)[:, -1])
    sums, kept = [], []
    for number, element in enumerate(DistributedDataset(dataset.batch(16).repeat(4), mesh)):
        array = element.array if isinstance(element, tpudist.PerReplica) else element
        sums.append(read(array))
        if number % 5 == 0:
            kept.append((number, array))
    for found, batch in zip(sums, wanted, strict=True):
        np.testing.assert_array_equal(found, batch.sum(axis=1, dtype=np.int32))
    for number, array in kept:
        np.testing.assert_array_equal(np.asarray(array).reshape(16, -1), wanted[number])


def test_a_step_may_donate_a_batch():
    data = np.arange(64 * 40_000, dtype=np.int32).reshape(64, 40_000)
    mesh = make_mesh(jax.devices())
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    dataset = tpudist.NumpyDataset(data).batch(16).repeat(3)
    given = [add(element.array) for element in DistributedDataset(dataset, mesh)]
    wanted = [batch + 1 for batch in dataset]
    for found, batch in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(found).reshape(16, -1), batch)
    np.testing.assert_array_equal(data.reshape(-1), np.arange(data.size))
