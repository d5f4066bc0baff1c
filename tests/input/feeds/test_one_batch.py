"""One batch in memory, placed on the replicas like an element of a distributed dataset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist import PerReplica

X = np.arange(48, dtype=np.float32).reshape(16, 3)
KINDS = {"numpy": np.asarray, "jax": jnp.asarray}


DEEP = X
for _ in range(5000):
    DEEP = [DEEP]


def strategy_of(replica_axes, num_devices=4):
    return tpudist.TPUStrategy(replica_axes=replica_axes, devices=jax.devices()[:num_devices])


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)


@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("replica_axes", [{}, {"fsdp": 2}, {"tensor": 4}, {"fsdp": 4}], ids=str)
def test_a_batch_is_placed_as_an_element_of_a_dataset(replica_axes, convert):
    strategy = strategy_of(replica_axes)
    batch = {"x": convert(X), "y": (convert(np.arange(16)), None)}
    (wanted,) = strategy.experimental_distribute_dataset([batch])
    assert_same(strategy.distribute_batch(batch), wanted)
    with strategy.scope():
        assert_same(strategy.distribute_batch(batch), wanted)


@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rows", [1, 5, 13])
def test_a_partial_batch_is_padded_and_counted(rows, convert):
    strategy = strategy_of({})
    *_, wanted = strategy.experimental_distribute_dataset([X, X[:rows]])
    found = strategy.distribute_batch(convert(X[:rows]), global_batch_size=16)
    assert_same(found, wanted)
    total = strategy.reduce("sum", strategy.run(lambda x: x.sum(), (found,)), axis=None)
    assert float(total) == X[:rows].sum()
    uneven = strategy.distribute_batch(convert(X[:rows]))
    assert sum(uneven.rows) == rows
    np.testing.assert_array_equal(strategy.gather(uneven, axis=0), X[:rows])


@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("replica_axes", "num_parts"), [({}, 4), ({}, 8), ({"fsdp": 2}, 4), ({"fsdp": 4}, 4)], ids=str
)
def test_arrays_of_a_pmap_program_keep_their_parts(replica_axes, num_parts, convert):
    strategy = strategy_of(replica_axes)
    parts = convert(X.reshape(num_parts, -1, 3))
    found = strategy.distribute_batch({"x": parts}, has_device_dim=True)
    assert_same(found, strategy.distribute_batch({"x": convert(X)}))


def test_arrays_returned_by_pmap_are_not_copied():
    devices = jax.devices()[:4]
    strategy = tpudist.MirroredStrategy(devices)
    sharded = jax.device_put(X.reshape(4, 4, 3), strategy.replica_mesh.stacked)
    found = strategy.distribute_batch(sharded, has_device_dim=True)
    assert isinstance(found, PerReplica)
    assert [s.data.unsafe_buffer_pointer() for s in found.array.addressable_shards] == [
        s.data.unsafe_buffer_pointer() for s in sharded.addressable_shards
    ]


def test_the_default_strategy_places_a_batch_too():
    np.testing.assert_array_equal(tpudist.get_strategy().distribute_batch(X), X)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({}, {}, "holds no arrays"),
        ({"x": X, "y": X[:2]}, {}, "different numbers of rows"),
        ({"x": jnp.ones(8), "y": jnp.ones(4)}, {}, r"\['x'\] \[8\], \['y'\] \[4\]"),
        (np.float32(1), {}, "is a scalar"),
        (X, {"global_batch_size": 8}, "global_batch_size=8.* the batch has 16 rows"),
        (X, {"global_batch_size": True}, "Pass the number of rows of a full batch"),
        (X, {"has_device_dim": True, "global_batch_size": 16}, "Omit global_batch_size"),
        (DEEP, {}, "nested more than 1000 levels"),
        (DEEP, {"has_device_dim": True}, "nested more than 1000 levels"),
        (X[:0], {}, "has no rows"),
        (jnp.ones((4, 0)), {"has_device_dim": True}, "has no rows"),
        (np.ones((4, 0, 3)), {"has_device_dim": True}, "has no rows"),
        (X[:6], {"has_device_dim": True}, r"arrays have 6 parts, .* 4 replicas.* \[4, rows, ...\]"),
        (np.ones(4), {"has_device_dim": True}, "count devices and rows.*values_from_function"),
    ],
)
def test_the_error_for_an_unsuitable_batch_names_it(batch, options, message):
    with pytest.raises(ValueError, match=message):
        strategy_of({}).distribute_batch(batch, **options)


def test_strings_and_calls_in_replica_functions_raise():
    strategy = strategy_of({})
    with pytest.raises(TypeError, match="dtype <U1, but devices hold only numbers"):
        strategy.distribute_batch(np.array(["a", "b"]))
    with pytest.raises(ValueError, match="distribute_batch should be called from outside"):
        strategy.run(lambda: strategy.distribute_batch(X))


@pytest.mark.parametrize("options", [{}, {"has_device_dim": True}], ids=str)
def test_a_batch_that_the_replicas_have_or_that_is_traced_is_rejected(options):
    """Otherwise the parts would become rows, and a traced batch an error of JAX about meshes."""
    strategy = strategy_of({})
    placed = strategy.distribute_batch(X)
    with pytest.raises(TypeError, match=r"batch\['x'\] is a PerReplica.*Pass it to strategy.run"):
        strategy.distribute_batch({"x": placed}, **options)
    with pytest.raises(TypeError, match="Batch 0 of the dataset is a PerReplica"):
        list(strategy.experimental_distribute_dataset([placed]))

    def place(x):
        return strategy.distribute_batch(x, **options)

    for traced in (jax.jit(place), tpudist.function(place)):
        with pytest.raises(
            ValueError,
            match="The batch belongs to a program that jax.jit or tpudist.function is tracing",
        ):
            traced(X.reshape(4, 4, 3))
