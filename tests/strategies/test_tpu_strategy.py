"""TPUStrategy: device assignments, and values split over the devices of a replica."""

import json
import math
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import tpudist
from places import DATA
from processes import run_processes
from tpudist.cluster_resolver import SimpleClusterResolver, TPUClusterResolver
from tpudist.experimental import (
    DeviceAssignment,
    DeviceOrderMode,
    HardwareFeature,
    Topology,
    initialize_tpu_system,
)
from tpudist.strategy import logical_devices
from tpudist.xla import topology as topologies

RECORDED = json.loads((DATA / "device_assignments.json").read_text())


def assigned(shape=(1, 2, 1, 2), num_replicas=2, **options):
    """A strategy whose replicas are blocks of `shape` of the 8 emulated devices."""
    assignment = DeviceAssignment.build(
        Topology.of(jax.devices()), shape, num_replicas=num_replicas
    )
    return tpudist.TPUStrategy(experimental_device_assignment=assignment, **options)


# Topologies.


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        (8, (2, 2, 1, 2)),
        (4, (2, 1, 1, 2)),
        (2, (1, 1, 1, 2)),
        (1, (1, 1, 1, 1)),
        (6, (3, 1, 1, 2)),
        (3, (3, 1, 1, 1)),
    ],
)
def test_emulated_devices_are_laid_out_as_a_slice(number, shape):
    topology = Topology.of(jax.devices()[:number])
    assert tuple(topology.mesh_shape) == shape
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank) == (1, number, 4)
    assert len({tuple(at) for at in topology.device_coordinates[0].tolist()}) == number
    assert len(topology.missing_devices) == 0


def test_eight_emulated_devices_have_the_coordinates_of_a_v2_8():
    """Cores of a chip first, then x, then y; those of libtpu are compared below."""
    assert Topology.of(jax.devices()).device_coordinates.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]
        + [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]]
    ]


@pytest.mark.libtpu
def test_tpu_devices_know_their_coordinates():
    v2 = Topology.of(topologies.devices("v2:2x2"))
    assert v2.device_coordinates.tolist() == (
        Topology.of(jax.devices()).device_coordinates.tolist()
    )
    v5e = topologies.devices("v5e:2x4")
    assert Topology.of(v5e).mesh_shape.tolist() == [2, 4, 1, 1]
    assert Topology.of(v5e).num_tasks == 2
    half = Topology.of([d for d in v5e if d.coords[1] >= 2])
    assert half.mesh_shape.tolist() == [2, 2, 1, 1]
    assert half.device_coordinates.min() == 0


def test_devices_that_are_missing_from_a_box_are_named():
    devices = [
        types.SimpleNamespace(process_index=0, coords=(x, y, 0), core_on_chip=0)
        for x, y in [(2, 3), (3, 3), (2, 4)]
    ]
    topology = Topology.of(devices)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 1]
    assert topology.missing_devices.tolist() == [[1, 1, 0, 0]]
    assert DeviceAssignment.build(topology, num_replicas=3).core_assignment.tolist() == [
        [[0, 0, 0, 0]],
        [[1, 0, 0, 0]],
        [[0, 1, 0, 0]],
    ]
    with pytest.raises(ValueError, match="has only 3 of them"):
        DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=2)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([(0, 0), (0, 0), (1, 0)], "of these 3 devices the processes .*task 0: 2; task 1: 1"),
        (
            [(0, 0), (0, 1)],
            "to one slice, but these 2 devices belong to 2 slices. Use TPUStrategy.replica_",
        ),
    ],
)
def test_devices_that_make_no_grid_are_refused(devices, message):
    made = [types.SimpleNamespace(process_index=p, slice_index=s) for p, s in devices]
    with pytest.raises(ValueError, match=message):
        Topology.of(made)


@pytest.mark.parametrize(
    ("mesh_shape", "coordinates", "message"),
    [
        (None, None, "`mesh_shape` must be a sequence of 4 positive entries"),
        ([2, 2, 1], [[[0, 0, 0]]], "`mesh_shape` must be a sequence of 4 positive entries"),
        ([2, 2, 0, 1], [[[0, 0, 0, 0]]], "`mesh_shape` must be a sequence of 4 positive entries"),
        ([2, 2, 1, 1], [[0, 0, 0, 0]], "must be a rank 3 array .* got shape"),
        ([2, 2, 1, 1], [[[0, 0, 0]]], "must be a rank 3 array"),
        ([2, 2, 1, 1], [[[0, 2, 0, 0]]], r"Device 0 of task 0 is at \(0, 2, 0, 0\), which is out"),
        ([2, 1, 1, 1], [[[1, 0, 0, 0]], [[1, 0, 0, 0]]], "Device 0 of task 1 .* is given twice"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(mesh_shape, coordinates, message):
    with pytest.raises(ValueError, match=message):
        Topology(mesh_shape=mesh_shape, device_coordinates=coordinates)


def test_a_topology_finds_the_device_at_coordinates():
    topology = Topology(
        None, [2, 1, 1, 2], [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 1]] * 1 + [[1, 0, 0, 0]]]
    )
    at = (1, 0, 0, 1)
    assert topology.task_ordinal_at_coordinates(at) == 1
    assert topology.tpu_device_ordinal_at_coordinates(at) == 0
    assert topology.tpu_device_name_at_coordinates(at) == "/task:1/device:TPU:0"
    assert topology.cpu_device_name_at_coordinates(at, "w") == "/job:w/task:1/device:CPU:0"
    with pytest.raises(ValueError, match=r"No device is at \(2, 0, 0, 0\) in a topology of shape"):
        topology.task_ordinal_at_coordinates((2, 0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x7f\x01",
        b"\x0b\x00",
        b"\x10\x01\x18\x01",
        b"\xff",
        b"\x0d\x00\x00\x00\x00",
        b"\x10" + b"\xff" * 10 + b"\x01",
    ],
)
def test_bytes_that_do_not_parse_as_a_topology_are_rejected(data):
    with pytest.raises(ValueError, match=f"These {len(data)} bytes are not a serialized topology"):
        Topology(serialized=data)


# Assignments.


@pytest.mark.parametrize("number", range(len(RECORDED["cases"])))
def test_replicas_are_packed_as_in_tensorflow(number):
    """Rings, grids, strides and slices with holes: every coordinate is TensorFlow's."""
    case = RECORDED["cases"][number]
    topology = Topology(serialized=bytes.fromhex(case["serialized_topology"]))
    assert topology.mesh_shape.tolist() == case["mesh_shape"]
    assert topology.num_tasks == case["num_tasks"]
    assert len(topology.missing_devices) == case["missing_of_each_task"] * case["num_tasks"]
    assert topology.serialized().hex() == case["serialized_topology"]
    assignment = DeviceAssignment.build(
        topology,
        case["computation_shape"],
        case["computation_stride"],
        case["num_replicas"],
        DeviceOrderMode[case["device_order_mode"]],
    )
    assert assignment.core_assignment.tolist() == case["core_assignment"]


def test_an_assignment_tells_where_each_core_is():
    topology = Topology.of(jax.devices())
    assignment = DeviceAssignment.build(topology.serialized(), [1, 1, 1, 2], num_replicas=4)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    assert assignment.core_assignment.shape == (4, 2, 4)
    assert assignment.topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert assignment.coordinates(1, 1) == (1, 0, 0, 1)
    assert assignment.tpu_ordinal(1, 1) == 3
    assert assignment.tpu_device(1, 1) == "/task:0/device:TPU:3"
    assert assignment.tpu_device(1, 1, job="worker") == "/job:worker/task:0/device:TPU:3"
    assert assignment.host_device(1, job="worker") == "/job:worker/task:0/device:CPU:0"
    assert assignment.lookup_replicas(0, 1) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="not find any replica in task: 1 contains logical_core"):
        assignment.lookup_replicas(1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"computation_shape": [1, 2, 2]}, r"computation_shape must have shape \[4\], got"),
        ({"computation_stride": [[1, 1, 1, 1]]}, r"computation_stride must have shape \[4\], got"),
        ({"computation_shape": [1, 0, 1, 1]}, "computation_shape must be positive"),
        ({"computation_stride": [1, -1, 1, 1]}, "computation_stride must be positive"),
        ({"computation_shape": [1, 1, 2, 1]}, r"footprint \[1 1 2 1\] does not fit in TPU topol"),
        (
            {"computation_shape": [2, 1, 1, 1], "computation_stride": [2, 1, 1, 1]},
            r"footprint \[4 1 1 1\] does not fit",
        ),
        ({"num_replicas": 9}, "requested 9 replicas but only 8 replicas with shape"),
        (
            {"computation_shape": [2, 2, 1, 1], "num_replicas": 3},
            "requested 3 replicas but only 2",
        ),
        (
            {"num_replicas": 3, "device_order_mode": DeviceOrderMode.RING},
            "DeviceOrderMode.RING is not compatible",
        ),
    ],
)
def test_replicas_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(Topology.of(jax.devices()), **options)


@pytest.mark.parametrize(
    "make", [DeviceAssignment.build, lambda t: DeviceAssignment(t, [[[0] * 4]])]
)
def test_an_assignment_needs_a_topology(make):
    with pytest.raises(ValueError, match="`topology` is not a Topology object; got list"):
        make(jax.devices())


@pytest.mark.parametrize(
    ("core_assignment", "message"),
    [
        ([[0, 0, 0, 0]], r"must be a rank 3 array .* got shape \(1, 4\)"),
        ([[[0, 0, 0]]], r"must have size equal to topology rank \(4\)"),
        ([[[0, 0, 1, 0]]], r"No device is at \(0, 0, 1, 0\)"),
        ([[[0, -1, 0, 0]]], r"No device is at \(0, -1, 0, 0\)"),
    ],
)
def test_missing_cores_are_rejected(core_assignment, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment(Topology.of(jax.devices()), core_assignment)


# Strategies with an assignment.


def test_replicas_and_their_devices_come_in_the_assignments_order():
    topology = Topology.of(jax.devices())
    assignment = DeviceAssignment(
        topology, [[[1, 1, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 1], [0, 1, 0, 1]]]
    )
    strategy = tpudist.TPUStrategy(None, assignment)
    assert strategy.num_replicas_in_sync == 2
    assert [[d.id for d in row] for row in strategy.mesh.devices] == [[6, 0], [3, 5]]
    assert strategy.run(lambda: 1) == 1
    ids = strategy.run(lambda: tpudist.get_replica_context().replica_id_in_sync_group)
    assert [int(x) for x in ids.values] == [0, 1]
    assert [{d.id for d in x.devices()} for x in ids.values] == [{0, 6}, {3, 5}]


@pytest.mark.parametrize(
    ("number", "shape", "num_replicas", "axes"),
    [
        (8, [1, 1, 1, 1], 8, {}),
        (8, [1, 1, 1, 2], 4, {"logical_0": 2}),
        (8, [2, 2, 1, 2], 1, {"logical_0": 2, "logical_1": 2, "logical_2": 2}),
        (6, [3, 1, 1, 2], 1, {"logical_0": 2, "logical_1": 3}),
        (8, [1, 1, 1, 2], 3, {"logical_0": 2}),
    ],
)
def test_the_devices_of_a_replica_have_axes_of_prime_sizes(number, shape, num_replicas, axes):
    devices = jax.devices()[:number]
    assignment = DeviceAssignment.build(Topology.of(devices), shape, num_replicas=num_replicas)
    strategy = tpudist.TPUStrategy(None, assignment, devices=devices)
    assert dict(strategy.mesh.shape) == {"replica": num_replicas} | axes
    assert strategy.num_replicas_in_sync == num_replicas


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda a: tpudist.TPUStrategy(None, a, replica_axes={"fsdp": 2}, devices=["tpu:9"]),
            "replica_axes={'fsdp': 2}, experimental_device_assignment",
        ),
        (
            lambda a: tpudist.TPUStrategy(None, a, devices=jax.devices()[:4]),
            r"1 task\(s\) of 8 device\(s\), but this run has 1 process\(es\) with 4 device\(s\)",
        ),
        (
            lambda a: tpudist.TPUStrategy(None, [[0]]),
            "must be a tpudist.experimental.DeviceAssignm",
        ),
        (
            lambda a: tpudist.TPUStrategy(
                None, DeviceAssignment(a.topology, [[[0] * 4], [[0] * 4]])
            ),
            "is named more than once",
        ),
    ],
)
def test_an_assignment_that_does_not_fit_the_devices_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(DeviceAssignment.build(Topology.of(jax.devices()), num_replicas=8))


@pytest.mark.parametrize("spmd", [False, True])
def test_xla_partitions_whether_it_is_asked_to_or_not(spmd):
    strategy = assigned(experimental_spmd_xla_partitioning=spmd)
    text = compiled(strategy, lambda x, w: split(strategy, x, [4, 1]) @ w)
    assert dot_shapes(text) == [(4, 4)]


# Splitting values. `x` is [16, 8] on each replica, `w` is [8, 4].


def split(strategy, x, counts):
    return strategy.experimental_split_to_logical_devices(x, counts)


def arguments(strategy):
    rng = np.random.default_rng(0)
    n = strategy.num_replicas_in_sync
    parts = rng.normal(size=(n, 16, 8)).astype(np.float32)
    x = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    return x, jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)


def compiled(strategy, fn):
    return strategy.lower(fn, arguments(strategy)).compile().as_text()


def dot_shapes(text):
    """Shapes of the results of matrix products, on each device."""
    found = re.findall(r"f32\[([\d,]*)\]\S* dot\(", text)
    return [tuple(map(int, dims.split(","))) for dims in found]


STRATEGIES = {
    "assigned": assigned,
    "assigned in one replica": lambda: assigned((2, 2, 1, 2), 1),
    "fsdp=2, tensor=2": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2}),
    "tensor=4": lambda: tpudist.TPUStrategy(replica_axes={"tensor": 4}),
}


@pytest.mark.parametrize("name", ["assigned", "fsdp=2, tensor=2", "tensor=4"])
def test_each_device_computes_its_rows_of_a_split_value(name):
    strategy = STRATEGIES[name]()
    assert dot_shapes(compiled(strategy, lambda x, w: x @ w)) == [(16, 4)]
    assert dot_shapes(compiled(strategy, lambda x, w: split(strategy, x, [4, 1]) @ w)) == [(4, 4)]


def test_a_dim_that_is_summed_over_can_be_split_and_costs_an_all_reduce():
    strategy = assigned()
    text = compiled(strategy, lambda x, w: split(strategy, x, [2, 2]) @ w)
    assert dot_shapes(text) == [(8, 4)]
    assert re.search(r"f32\[8,4\]\S* all-reduce\(", text)


def test_the_parts_of_a_value_are_on_devices_in_order():
    """Row by row over the assignment's cores, as TensorFlow numbers both."""
    strategy = assigned()
    whole = jnp.arange(16.0).reshape(4, 4)
    cut = split(strategy, whole, [2, 2])
    for replica in strategy.mesh.devices.reshape(2, 4):
        parts = {s.device: s.data.tolist() for s in cut.addressable_shards}
        assert [parts[d] for d in replica] == [
            whole[i : i + 2, j : j + 2].tolist() for i in (0, 2) for j in (0, 2)
        ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("assigned", [4, 1]),
        ("assigned", [2, 2]),
        ("assigned", [1, 4]),
        ("assigned in one replica", [8, 1]),
        ("assigned in one replica", [2, 4]),
        ("fsdp=2, tensor=2", [2, 2]),
        ("tensor=4", [1, 4]),
    ],
)
def test_splitting_changes_neither_values_nor_gradients(name, counts):
    strategy = STRATEGIES[name]()
    x, w = arguments(strategy)

    def step(x, w, is_split):
        def loss(w):
            rows = split(strategy, x, counts) if is_split else x
            hidden = jnp.tanh(rows @ w)
            if is_split:
                hidden = strategy.experimental_replicate_to_logical_devices(hidden)
            return jnp.square(hidden).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return tpudist.get_replica_context().all_reduce("mean", (value, gradient))

    got, expected = (strategy.run(step, (x, w, is_split)) for is_split in (True, False))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-7)


def test_training_with_an_assignment_gives_the_numbers_of_one_device():
    def train(strategy):
        rng = np.random.default_rng(1)
        data = rng.normal(size=(4, 16, 8)).astype(np.float32)
        with strategy.scope():
            w = tpudist.Variable(np.ones((8, 4), np.float32))

        def step(x):
            if isinstance(strategy, tpudist.TPUStrategy):
                x = split(strategy, x, [2, 2])

            def loss(w):
                return tpudist.compute_average_loss(jnp.square(x @ w).sum(-1))

            value, gradient = jax.value_and_grad(loss)(w.read_value())
            value, gradient = tpudist.get_replica_context().all_reduce("sum", (value, gradient))
            w.assign_sub(0.1 * gradient)
            return value

        batches = strategy.experimental_distribute_dataset(list(data))
        return [float(strategy.run(step, (x,))) for x in batches], np.asarray(w.read_value())

    losses, w = train(assigned())
    expected_losses, expected_w = train(tpudist.OneDeviceStrategy())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(w, expected_w, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def in_two_processes():
    """Returns the findings of two processes with four devices each."""
    finished = run_processes("""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import tpudist
        from processes import report
        from tpudist.experimental import DeviceAssignment, Topology

        tpudist.emulate()
        resolver = tpudist.cluster_resolver.TPUClusterResolver(tpu="")
        strategy = tpudist.TPUStrategy(resolver, replica_axes={"fsdp": 2})  # connects
        alone = tpudist.TPUStrategy(devices=jax.local_devices())
        counts = [jax.process_count(), strategy.num_replicas_in_sync, alone.num_replicas_in_sync]

        topology = Topology.of(jax.devices())
        found = [topology.num_tasks, topology.mesh_shape.tolist()]
        for shape in ([2, 1, 1, 2], [1, 2, 1, 2]):
            assignment = DeviceAssignment.build(topology, shape, num_replicas=2)
            strategy = tpudist.TPUStrategy(None, assignment)
            with strategy.scope():
                w = tpudist.Variable(np.ones(4, np.float32))

            def step(x):
                x = strategy.experimental_split_to_logical_devices(x, [2, 2])

                def loss(w):
                    return tpudist.compute_average_loss(jnp.sin(x @ w))

                gradient = jax.grad(loss)(w.read_value())
                gradient = tpudist.get_replica_context().all_reduce("sum", gradient)
                w.assign_sub(gradient)
                return strategy.experimental_replicate_to_logical_devices(x).sum()

            batch = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
            for rows in strategy.experimental_distribute_dataset([batch, batch]):
                sums = strategy.run(step, args=(rows,))
            total = float(strategy.reduce("sum", sums, axis=None))
            extended = strategy.extended
            hosts = [extended.num_hosts, extended.num_replicas_per_host]
            found.append([len(strategy.replica_mesh.local_replicas), hosts, total,
                          np.asarray(w.read_value()).tolist()])
        report({"counts": counts, "replicas": found})
    """)
    return [process.result for process in finished]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_joins_the_workers_that_tf_config_names(in_two_processes):
    """Also after a resolver as programs for TPU have one; not where this host alone is meant."""
    assert [found["counts"] for found in in_two_processes] == [[2, 4, 4]] * 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_devices_that_have_started_alone_are_an_error():
    with pytest.raises(AssertionError, match="Create the strategy before the first array"):
        run_processes("""
            import jax.numpy as jnp
            import tpudist

            tpudist.emulate()
            jnp.ones(1)
            tpudist.TPUStrategy()
        """)


@pytest.mark.parametrize(
    ("task", "also"), [("evaluator", {}), ("worker", {"ps": ["h:1"]}), ("ps", {"ps": ["h:1"]})]
)
def test_it_joins_no_cluster_in_which_it_does_not_train_alike(monkeypatch, task, also):
    cluster = {"cluster": {"worker": ["a:1", "b:2"], "evaluator": ["e:1"], **also}}
    task = {"task": {"type": task, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster | task))
    assert tpudist.TPUStrategy().num_replicas_in_sync == 8


@pytest.mark.slow
@pytest.mark.multiprocess
def test_replicas_may_lie_in_a_process_or_across_two(in_two_processes):
    """Two processes with four devices each compute the numbers of one process with eight."""
    batch = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    w = np.ones(4)
    for _ in range(2):
        w = w - (np.cos(batch @ w)[:, None] * batch).mean(0)
    for found in in_two_processes:
        tasks, mesh_shape, within, across = found["replicas"]
        assert (tasks, mesh_shape) == (2, [2, 2, 1, 2])
        assert (within[:2], across[:2]) == ([1, [2, 1]], [2, [2, 2]])
        for *_, total, weights in (within, across):
            np.testing.assert_allclose(total, batch.sum(), rtol=1e-5)
            np.testing.assert_allclose(weights, w, rtol=1e-5)


def test_replicating_gathers_a_split_value():
    strategy = assigned()

    def fn(x, w):
        y = jnp.tanh(split(strategy, x, [4, 1]) @ w)
        return strategy.experimental_replicate_to_logical_devices(y) @ w.T

    text = compiled(strategy, fn)
    assert sorted(dot_shapes(text)) == [(4, 4), (16, 8)]
    assert re.search(r"f32\[16,4\]\S* all-gather\(", text)


def test_a_value_outside_of_replica_functions_is_put_on_the_mesh():
    strategy = assigned()
    x, w = arguments(strategy)
    cut = split(strategy, np.ones((16, 8), np.float32), [2, 2])
    assert cut.sharding.spec == P("logical_0", "logical_1")
    assert cut.sharding.mesh == strategy.mesh
    whole = strategy.experimental_replicate_to_logical_devices(cut)
    assert whole.sharding.is_fully_replicated
    parts = split(strategy, x, [4, 1])
    assert isinstance(parts, tpudist.PerReplica)
    assert parts.array.sharding.spec == P("replica", ("logical_0", "logical_1"), None)
    rows = (3,) * strategy.num_replicas_in_sync
    pairs = tpudist.PerReplica(x.array, rows, other_rows=((1, rows),))
    assert split(strategy, pairs, [4, 1]).extents == pairs.extents
    got, expected = (strategy.run(lambda x: (x @ w).sum(), (rows,)) for rows in (parts, x))
    np.testing.assert_allclose(got.array, expected.array, rtol=1e-5)
    with strategy.scope():
        in_jit = jax.jit(lambda x: split(strategy, x, [4, 1]) * 2)(jnp.ones((8, 8)))
    assert in_jit.sharding.spec[0] == ("logical_0", "logical_1")


@pytest.mark.slow
def test_a_captured_value_and_one_of_merge_call_are_split_as_arguments_are():
    strategy = assigned()
    x, w = arguments(strategy)

    def merged(strategy, x):
        cut = split(strategy, x, [4, 1])
        assert isinstance(cut, tpudist.PerReplica)
        return strategy.reduce("sum", cut, axis=None)

    def captured(w):
        return split(strategy, x, [4, 1]) @ w

    total = strategy.run(lambda x: tpudist.get_replica_context().merge_call(merged, (x,)), (x,))
    np.testing.assert_allclose(total, strategy.reduce("sum", x, axis=None), rtol=1e-6)
    got, expected = strategy.run(captured, (w,)), strategy.run(lambda x: x @ w, (x,))
    np.testing.assert_allclose(got.array, expected.array, rtol=1e-5)
    assert dot_shapes(strategy.lower(captured, (w,)).compile().as_text()) == [(4, 4)]


def test_with_one_device_per_replica_there_is_nothing_to_split():
    strategy = tpudist.TPUStrategy()
    x, w = arguments(strategy)

    def fn(x, w):
        y = split(strategy, x, [1, 1]) @ w
        return strategy.experimental_replicate_to_logical_devices(y).sum()

    got, expected = strategy.run(fn, (x, w)), strategy.run(lambda x, w: (x @ w).sum(), (x, w))
    assert got.array.tolist() == expected.array.tolist()


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([4], r"must equal the rank of the value \(2, of shape \(16, 8\)\). Received"),
        ([2, 2, 1], "must equal the rank of the value"),
        ([1, 3], r"Dim 1 of a value of shape \(16, 8\) must be divisible by .* \(3\). Received: 8"),
        ([2, 1], r"number of logical devices of a replica \(=4\). Received .* product is 2"),
        ([2, 4], "and their product is 8"),
        ([2, 0], r"\[2, 0\] holds 0. Each count must be an integer of at least 1"),
        ([2, 2.0], "holds 2.0. Each count must be an integer"),
        ([4, True], "holds True. Each count must be an integer"),
    ],
)
def test_a_split_that_cannot_be_is_refused(where, counts, message):
    strategy = assigned()
    x, _ = arguments(strategy)
    calls = {
        "inside": lambda: strategy.run(lambda x: split(strategy, x, counts), (x,)),
        "outside": lambda: split(strategy, np.ones((16, 8)), counts),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()


def test_an_axis_with_a_name_is_split_over_one_dim_whole():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 4})
    x, _ = arguments(strategy)
    value = jnp.ones((16, 8))
    assert split(strategy, value, [4, 2]).sharding.spec == P("tensor", "fsdp")
    assert split(strategy, value, [8, 1]).sharding.spec == P(("fsdp", "tensor"), None)
    message = r"\[2, 2, 2\] does not split over the axes of a replica, fsdp=2, tensor=4: .* can be "
    with pytest.raises(ValueError, match=message + "cut into 1, 2, 4, 8 parts"):
        split(strategy, jnp.ones((4, 4, 4)), [2, 2, 2])


@pytest.mark.parametrize(
    ("axes", "counts", "spec"),
    [
        ({}, [1, 1], P(None, None)),
        ({"a": 1}, [1], P(None)),
        ({"a": 2, "b": 2}, [2, 2], P("a", "b")),
        ({"a": 2, "b": 2}, [1, 4], P(None, ("a", "b"))),
        ({"a": 2, "one": 1, "b": 3}, [3, 2], P("b", "a")),
        ({"a": 2, "b": 2, "c": 3}, [6, 2], P(("a", "c"), "b")),
        ({"a": 2, "b": 4, "c": 2}, [4, 4], P(("a", "c"), "b")),
        ({"a": 2, "b": 2, "c": 4}, [4, 4], P(("a", "b"), "c")),
    ],
)
def test_dims_get_axes_in_order_where_they_can(axes, counts, spec):
    assert logical_devices.spec_of_split(axes, [12 * c for c in counts], counts) == spec


@given(data=st.data(), num_devices=st.integers(1, 96))
def test_every_split_is_one_over_axes_of_prime_sizes(data, num_devices):
    axes = logical_devices.prime_axes(num_devices)
    assert math.prod(axes.values()) == num_devices
    counts, rest = [], num_devices
    for _ in range(2):
        counts.append(data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= counts[-1]
    counts.append(rest)
    spec = logical_devices.spec_of_split(axes, counts, counts)
    used = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
    assert [math.prod(axes[name] for name in names) for names in used] == counts
    assert sorted(name for names in used for name in names) == sorted(axes)


@pytest.mark.libtpu
def test_the_tpu_compiler_splits_alike():
    devices = topologies.devices("v5e:2x4")
    assignment = DeviceAssignment.build(Topology.of(devices), [2, 2, 1, 1], num_replicas=2)
    strategy = tpudist.TPUStrategy(None, assignment, devices=devices)
    x = tpudist.PerReplica(
        jax.ShapeDtypeStruct((2, 512, 256), np.float32, sharding=strategy.replica_mesh.stacked)
    )
    w = jax.ShapeDtypeStruct((256, 128), np.float32, sharding=strategy.replica_mesh.replicated)
    lowered = strategy.lower(lambda x, w: split(strategy, x, [4, 1]) @ w, (x, w))
    assert re.search(r"f32\[128,128\]\S* convolution\(", lowered.compile().as_text())


# Assigning values to one device.


def test_assigning_to_one_device_keeps_the_value_and_says_that_it_has_no_effect():
    strategy = assigned()
    x, _ = arguments(strategy)

    def fn(x):
        return strategy.experimental_assign_to_logical_device(x, 3).sum()

    with pytest.warns(UserWarning, match=r"logical_device_id=3\) has no effect: XLA splits the wo"):
        got = strategy.run(fn, (x,))
    assert got.array.tolist() == strategy.run(lambda x: x.sum(), (x,)).array.tolist()


def test_the_only_device_of_a_replica_may_be_assigned_to():
    strategy = tpudist.TPUStrategy()
    value = jnp.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strategy.experimental_assign_to_logical_device(value, 0) is value


@pytest.mark.parametrize("number", [-1, 4, 1.0, None])
def test_a_missing_logical_device_is_rejected(number):
    strategy = assigned()
    message = rf"Received logical device id {number} but there are only total of 4 logical devices"
    with pytest.raises(ValueError, match=message):
        strategy.experimental_assign_to_logical_device(jnp.ones(3), number)
    with pytest.raises(ValueError, match=message):
        with strategy.extended.experimental_logical_device(number):
            pass


def test_assigning_in_spmd_mode_is_refused_as_in_tensorflow():
    strategy = assigned(experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="Cannot assign a tensor to a logical device in SPMD mode"):
        strategy.experimental_assign_to_logical_device(jnp.ones(3), 0)


# What `extended` knows.


@pytest.mark.parametrize(
    ("make", "num_replicas_per_host"),
    [
        (tpudist.TPUStrategy, 8),
        (lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}), 2),
        (lambda: assigned((1, 1, 1, 2), 3), 3),
    ],
)
def test_extended_counts_hosts_and_their_replicas(make, num_replicas_per_host):
    extended = make().extended
    assert extended.num_hosts == 1
    assert extended.num_replicas_per_host == num_replicas_per_host
    assert extended.tpu_hardware_feature is None


@pytest.mark.libtpu
def test_a_replica_may_span_hosts():
    """Two hosts of four chips, in other groups of four: each host has a part of both replicas."""
    devices = topologies.devices("v5e:2x4")
    topology = Topology.of(devices)
    across = DeviceAssignment(topology, [[[x, y, 0, 0] for y in range(4)] for x in range(2)])
    extended = tpudist.TPUStrategy(None, across, devices=devices).extended
    assert (extended.num_hosts, extended.num_replicas_per_host) == (2, 2)
    assert across.lookup_replicas(0, 1) == [0, 1]


def test_only_a_tpu_strategy_knows_logical_devices():
    extended = tpudist.MirroredStrategy().extended
    for name in ("num_hosts", "num_replicas_per_host", "tpu_hardware_feature"):
        assert not hasattr(extended, name)
        with pytest.raises(AttributeError, match=f"MirroredStrategy has no extended.{name}: only"):
            getattr(extended, name)
    with pytest.raises(AttributeError, match="only TPUStrategy has it"):
        extended.experimental_logical_device(0)


@pytest.mark.filterwarnings("ignore:experimental_logical_device:UserWarning")
def test_a_block_chooses_a_logical_device_of_each_replica():
    strategy, other = assigned((1, 1, 1, 2), 4), tpudist.TPUStrategy()
    extended = strategy.extended
    first, second = strategy.mesh.devices.T.tolist()
    assert extended.worker_devices == tuple(first)
    with extended.experimental_logical_device(1):
        assert extended.worker_devices == tuple(second)
        assert other.extended.worker_devices == tuple(jax.devices())
        with other.extended.experimental_logical_device(0):
            assert other.extended.worker_devices == tuple(jax.devices())
        with extended.experimental_logical_device(0):
            assert extended.worker_devices == tuple(first)
        assert extended.worker_devices == tuple(second)
    assert extended.worker_devices == tuple(first)


def test_a_variable_that_is_made_for_a_logical_device_is_on_all():
    strategy = assigned((1, 1, 1, 2), 4)
    with strategy.scope(), pytest.warns(UserWarning, match="has no effect"):
        with strategy.extended.experimental_logical_device(1):
            v = tpudist.Variable(1.0)
    assert v.read_value().sharding.device_set == set(jax.devices())


# Resolvers.


def test_a_strategy_has_the_resolver_that_it_was_given():
    given = TPUClusterResolver()
    assert tpudist.TPUStrategy(given).cluster_resolver is given
    assert isinstance(tpudist.TPUStrategy().cluster_resolver, TPUClusterResolver)
    with pytest.raises(ValueError, match="tpu_cluster_resolver must be a tpudist.cluster_resolver"):
        tpudist.TPUStrategy(SimpleClusterResolver({}))


def test_the_program_of_tensorflows_documentation_runs():
    resolver = TPUClusterResolver(tpu="")
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    strategy = tpudist.TPUStrategy(resolver, experimental_device_assignment=assignment)
    dataset = strategy.experimental_distribute_dataset([np.ones((8, 4), np.float32)])

    def step(x):
        x = split(strategy, x, [2, 1])
        y = jnp.sin(x)
        return strategy.experimental_replicate_to_logical_devices(y).sum()

    total = strategy.reduce("sum", strategy.run(step, (next(iter(dataset)),)), axis=None)
    np.testing.assert_allclose(total, 32 * np.sin(1), rtol=1e-5)


def test_what_chips_have_is_known_from_a_serialized_topology():
    """The last field of TensorFlow's protocol buffer: V2, two devices on a chip."""
    resolver = TPUClusterResolver()
    serialized = Topology.of(jax.devices()).serialized() + bytes.fromhex("2a0408021002")
    resolver.set_tpu_topology(serialized)
    kind = HardwareFeature.EmbeddingFeature.V2
    assert tpudist.TPUStrategy(resolver).extended.tpu_hardware_feature == HardwareFeature(kind, 2)
    resolver.set_tpu_topology(Topology.of(jax.devices()).serialized())
    assert resolver.tpu_hardware_feature is None
