"""Host values become global arrays on the mesh, on exactly the requested devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tpudist.lowering import placement, replica_parts
from tpudist.xla.mesh import make_mesh


@pytest.fixture
def mesh():
    return make_mesh(jax.devices(), {"fsdp": 4})


def test_a_replicated_value_is_whole_on_every_device(mesh):
    array = placement.replicate(mesh, np.arange(6.0, dtype=np.float32))
    assert len(array.addressable_shards) == 8
    assert all(shard.data.shape == (6,) for shard in array.addressable_shards)


def test_a_sharded_value_is_split_over_the_named_axis_only(mesh):
    array = placement.shard(mesh, np.zeros((8, 3), np.float32), PartitionSpec("fsdp"))
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}
    assert len({shard.device for shard in array.addressable_shards}) == 8


@pytest.mark.parametrize("split_rows", [True, False])
def test_a_stacked_value_gives_each_replica_its_own_part(mesh, split_rows):
    """Split rows, on a mesh with fsdp, lets the devices of a replica share its batch."""
    host = np.arange(2 * 8).reshape(2, 8).astype(np.float32)
    array = placement.stack(mesh, host, split_rows=split_rows)
    np.testing.assert_array_equal(array, host)
    rows = 2 if split_rows else 8
    assert {shard.data.shape for shard in array.addressable_shards} == {(1, rows)}


def test_rows_that_do_not_divide_stay_together(mesh):
    array = placement.stack(mesh, np.zeros((2, 3), np.float32), split_rows=True)
    assert {shard.data.shape for shard in array.addressable_shards} == {(1, 3)}


def test_a_component_lives_on_its_replicas_devices_alone(mesh):
    host = np.arange(2 * 8).reshape(2, 8).astype(np.float32)
    for split_rows in (True, False):
        array = placement.stack(mesh, host, split_rows=split_rows)
        for replica in range(2):
            part = replica_parts.component(mesh, array, replica)
            np.testing.assert_array_equal(part, host[replica])
            assert part.sharding.device_set == set(mesh.mesh.devices[replica])


def test_a_value_can_live_in_host_memory_where_the_devices_have_it(mesh):
    for kind in placement.memory_kinds(mesh):
        array = placement.replicate(mesh, np.ones(3, np.float32), memory_kind=kind)
        assert array.sharding.memory_kind == kind
        np.testing.assert_array_equal(array, np.ones(3))


def test_a_missing_memory_raises_an_error_that_lists_the_existing_ones(mesh):
    with pytest.raises(ValueError, match="'tape' does not exist") as caught:
        placement.replicate(mesh, np.ones(3), memory_kind="tape")
    known = ", ".join(f"'{memory.kind}'" for memory in jax.devices()[0].addressable_memories())
    assert str(caught.value) == (
        f"Memory 'tape' does not exist on cpu devices here, which have {known}. Use one of these, "
        f"or omit memory_kind."
    )
