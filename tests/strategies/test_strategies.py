import importlib
import inspect
import logging
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import tpudist
from tpudist import strategies
from tpudist.strategy.placement_rules import split_largest_dim
from tpudist.strategy.strategy import Strategy
from tpudist.xla import mesh as meshes


def found_strategies():
    """Every strategy of `tpudist.strategies`: a new file cannot be forgotten."""
    modules = [
        importlib.import_module(f"{strategies.__name__}.{module.name}")
        for module in pkgutil.iter_modules(strategies.__path__)
    ]
    return {
        name: cls
        for module in modules
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Strategy) and cls.__module__ == module.__name__
    }


FOUND = found_strategies()
# One is not synchronous, and runs functions on workers alone; those have a strategy that is found
# here and is not public.
ASYNCHRONOUS, OF_WORKERS = "ParameterServerStrategy", "WorkerStrategy"
# More ways to make them than the constructor without arguments.
VARIANTS = {
    **{name: cls for name, cls in FOUND.items() if name not in (ASYNCHRONOUS, OF_WORKERS)},
    OF_WORKERS: lambda: FOUND[OF_WORKERS](jax.devices()[2]),
    "MirroredStrategy of two": lambda: tpudist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "MirroredStrategy of one": lambda: tpudist.MirroredStrategy([jax.devices()[3]]),
    "TPUStrategy fsdp=4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    "TPUStrategy fsdp=2,tensor=2": lambda: tpudist.TPUStrategy(
        replica_axes={"fsdp": 2, "tensor": 2}
    ),
    "TPUStrategy fsdp=8": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 8}),
    "TPUStrategy with an assignment": lambda: assigned_to_two_replicas(),
    "the default strategy": tpudist.get_strategy,
}


def assigned_to_two_replicas():
    topology = tpudist.experimental.Topology.of(jax.devices())
    assignment = tpudist.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 2, 1, 2], num_replicas=2
    )
    return tpudist.TPUStrategy(experimental_device_assignment=assignment)


# Other numbers of the same: the first of each way to make a strategy always runs.
EXHAUSTIVE = {"MirroredStrategy of two", "MirroredStrategy of one", "TPUStrategy fsdp=8"}
PARAMS = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in EXHAUSTIVE else name
    for name in VARIANTS
]


@pytest.fixture(scope="module")
def trained_by_optax():
    """The data of three steps, their losses, and the kernel that optax alone trains."""
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(16, 64)).astype(np.float32) for _ in range(3)]
    parameters = nnx.as_pure(nnx.state(nnx.Linear(64, 32, rngs=nnx.Rngs(0))))
    tx = optax.adam(0.01)
    state, losses = tx.init(parameters), []
    for x in data:
        loss = lambda p, x=x: jnp.mean((x @ p["kernel"] + p["bias"]) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(parameters)
        updates, state = tx.update(grads, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(value))
    return data, losses, parameters["kernel"]


@pytest.fixture(scope="module", params=PARAMS)
def strategy(request):
    return VARIANTS[request.param]()


def test_the_strategies_are_all_public():
    assert set(FOUND) - {OF_WORKERS} == {
        ASYNCHRONOUS,
        "CentralStorageStrategy",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "TPUStrategy",
    }
    for name in FOUND.keys() - {OF_WORKERS}:
        experimental = name == "CentralStorageStrategy"
        assert getattr(tpudist.experimental if experimental else tpudist, name) is FOUND[name]


# The contract.


class TestContract:
    """What holds for every strategy, however it is made."""

    def test_its_mesh_counts_replicas_first(self, strategy):
        mesh = strategy.mesh
        assert mesh.axis_names[0] == "replica"
        assert set(mesh.axis_types) == {AxisType.Auto}
        assert mesh.shape["replica"] == strategy.num_replicas_in_sync
        assert len(strategy.replica_mesh.local_replicas) == strategy.num_replicas_in_sync
        assert repr(strategy) == (
            f"{type(strategy).__name__}("
            f"{', '.join(f'{k}={v}' for k, v in mesh.shape.items())} on cpu)"
        )

    def test_it_places_variables_inside_a_replica_only(self, strategy):
        for shape in [(), (3,), (64, 64), (7, 4096)]:
            named = jax.tree.leaves(tuple(strategy.partition(shape, jnp.float32)))
            assert set(named) <= set(strategy.replica_mesh.inner_axes)

    def test_it_runs_reduces_and_gathers(self, strategy):
        n = strategy.num_replicas_in_sync

        def step(x):
            replica = tpudist.get_replica_context()
            mine = x + replica.replica_id_in_sync_group
            return mine, replica.all_reduce("sum", mine), replica.all_gather(mine, 0)

        mine, total, everything = strategy.run(step, (jnp.zeros(2),))
        assert strategy.gather(mine, axis=0).tolist() == np.repeat(range(n), 2).tolist()
        assert everything.tolist() == np.repeat(range(n), 2).tolist()
        assert total.tolist() == [n * (n - 1) / 2] * 2
        assert float(strategy.reduce("mean", mine, axis=0)) == (n - 1) / 2
        assert len(strategy.experimental_local_results(mine)) == n

    def test_it_splits_a_dataset_and_counts_every_example_once(self, strategy):
        n = strategy.num_replicas_in_sync
        size = 2 * n
        dataset = strategy.experimental_make_numpy_dataset(np.arange(float(3 * n + 1))).batch(size)
        total, count = 0.0, 0

        def step(x):
            replica = tpudist.get_replica_context()
            real = jnp.where(replica.example_mask(x), x, 0).sum()
            return replica.all_reduce("sum", real), replica.num_examples(x)

        for x in strategy.experimental_distribute_dataset(dataset):
            more, rows = strategy.run(step, (x,))
            total, count = total + float(more), count + int(rows)
        assert (total, count) == (sum(range(3 * n + 1)), 3 * n + 1)

    def test_it_keeps_variables(self, strategy):
        with strategy.scope():
            assert tpudist.get_strategy() is strategy
            mean = tpudist.Variable(1.0, aggregation=tpudist.VariableAggregation.MEAN)
            counter = tpudist.Variable(
                0,
                synchronization=tpudist.VariableSynchronization.ON_READ,
                aggregation=tpudist.VariableAggregation.SUM,
            )

        def step():
            mean.assign_add(jnp.float32(1))
            counter.assign_add(1)

        for _ in range(2):
            strategy.run(step)
        assert (float(mean), int(counter)) == (3, 2 * strategy.num_replicas_in_sync)

    @pytest.mark.slow
    def test_it_trains_a_model_to_the_weights_that_one_device_gives(
        self, strategy, trained_by_optax
    ):
        data, expected, kernel = trained_by_optax
        model = strategy.create(lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
        optimizer = strategy.create(lambda: tpudist.Optimizer(optax.adam(0.01), model))

        def step(model, optimizer, x):
            loss = lambda m: tpudist.compute_average_loss((m(x) ** 2).mean(-1))  # noqa: E731
            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return tpudist.get_replica_context().all_reduce("sum", value)

        losses = [
            float(strategy.run(step, (model, optimizer, x)))
            for x in strategy.experimental_distribute_dataset(data)
        ]

        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        # Adam divides by the root of tiny second moments: an ulp of a gradient is magnified.
        np.testing.assert_allclose(model.kernel[...], kernel, rtol=1e-4, atol=2e-5)

    def test_it_works_under_a_scope_and_leaves_it(self, strategy):
        before = tpudist.get_strategy()
        with strategy.scope() as entered:
            assert entered is strategy
            assert strategy.run(lambda: 1) == 1
        assert tpudist.get_strategy() is before

    def test_its_extended_knows_its_devices(self, strategy):
        if strategy is tpudist.get_strategy():
            with pytest.raises(
                RuntimeError, match="worker_devices is not available on the default strat"
            ):
                _ = strategy.extended.worker_devices
            return
        workers = strategy.mesh.devices.reshape(strategy.num_replicas_in_sync, -1)
        if getattr(strategy, "device_assignment", None) is not None:
            workers = workers[:, :1]  # as in TensorFlow: one of each replica
        assert strategy.extended.worker_devices == tuple(workers.flat)
        central = isinstance(strategy, tpudist.experimental.CentralStorageStrategy)
        holders = jax.devices()[:1] if central else strategy.mesh.devices.flat
        assert strategy.extended.parameter_devices == tuple(holders)


# Devices.


def test_a_device_may_be_named_in_the_ways_of_jax_and_tensorflow():
    fifth = jax.devices()[5]
    for name in (fifth, "cpu:5", "CPU:5", "/device:CPU:5", "/job:localhost/device:CPU:5"):
        assert list(tpudist.OneDeviceStrategy(name).mesh.devices.flat) == [fifth]
    assert list(tpudist.OneDeviceStrategy("cpu").mesh.devices.flat) == [jax.devices()[0]]


@pytest.mark.parametrize("name", ["cpu:8", "gpu:0", "tpu", "cpu:x", "cpu:-1", "nonsense:0", ""])
def test_a_device_that_does_not_exist_is_refused(name):
    """TensorFlow places it elsewhere in silence."""
    for make in (
        tpudist.OneDeviceStrategy,
        lambda d: tpudist.MirroredStrategy([d]),
        lambda d: tpudist.TPUStrategy(devices=[d]),
    ):
        with pytest.raises(ValueError, match=r"Device '.*' does not exist. This run has cpu:0-7"):
            make(name)


@pytest.mark.parametrize("device", [0, None, object()])
def test_objects_that_are_not_devices_are_rejected(device):
    with pytest.raises(ValueError, match="A device was named by .* of type"):
        tpudist.MirroredStrategy([device])


@pytest.mark.parametrize("devices", [[], (), np.array([])])
def test_no_device_at_all_is_refused(devices):
    """TensorFlow takes all of them."""
    for make in (
        tpudist.MirroredStrategy,
        lambda d: tpudist.TPUStrategy(devices=d),
        tpudist.experimental.CentralStorageStrategy,
    ):
        with pytest.raises(ValueError, match=r"names no device. Omit it"):
            make(devices)


def test_devices_may_come_as_a_numpy_array():
    assert tpudist.MirroredStrategy(np.array(jax.devices()[:2])).num_replicas_in_sync == 2


def test_a_device_named_twice_is_refused():
    with pytest.raises(
        ValueError, match="is named more than once. Use a different device for each"
    ):
        tpudist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:0"])


def test_a_mesh_of_no_devices_is_refused():
    with pytest.raises(ValueError, match="The mesh has no devices"):
        meshes.make_mesh([])


def test_one_name_alone_is_one_device():
    assert tpudist.MirroredStrategy("cpu:2").num_replicas_in_sync == 1


# Replicas of several devices.


@pytest.mark.parametrize(
    ("axes", "num_replicas"),
    [({}, 8), ({"fsdp": 1}, 8), ({"fsdp": 2, "tensor": 2}, 2), ({"a": 4, "b": 2}, 1)],
)
def test_the_devices_are_split_in_replicas(axes, num_replicas):
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    assert strategy.num_replicas_in_sync == num_replicas
    assert dict(strategy.mesh.shape) == {"replica": num_replicas} | axes


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"fsdp": 3}, "Replicas of fsdp=3 span 3 devices each, but there are 8"),
        ({"fsdp": 4, "tensor": 4}, "Replicas of fsdp=4, tensor=4 span 16 devices each"),
        ({"fsdp": 0}, "Axis 'fsdp' has size 0"),
        ({"fsdp": -2}, "Axis 'fsdp' has size -2"),
        ({"fsdp": 2.0}, "Axis 'fsdp' has size 2.0"),
        ({"replica": 2}, "is named 'replica'. Use an identifier other than 'replica'"),
        ({"fs dp": 2}, "is named 'fs dp'"),
        ({3: 2}, "is named 3"),
    ],
)
def test_replicas_that_cannot_be_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        tpudist.TPUStrategy(replica_axes=axes)


def test_objects_that_are_not_tpu_resolvers_are_rejected():
    with pytest.raises(ValueError, match="tpu_cluster_resolver must be a tpudist.cluster_resolver"):
        tpudist.TPUStrategy("local")


@pytest.mark.parametrize(
    ("axes", "options", "said"),
    [
        ({"fdsp": 2}, {}, "'fdsp', but no rule splits anything over it. Did you mean 'fsdp'?"),
        ({"tensr": 2}, {}, "'tensr', but no rule splits anything over it. Did you mean 'tensor'?"),
        ({"fdsp": 2}, {"logical_axis_rules": [("mlp", ("fdsp",))]}, None),
        ({"fdsp": 2}, {"logical_axis_rules": [("mlp", "fdsp"), ("embed", None)]}, None),
        ({"rows": 2, "fsdp": 2}, {}, None),
    ],
)
def test_an_axis_with_a_typing_error_is_a_warning(caplog, axes, options, said):
    with caplog.at_level(logging.WARNING, "tpudist"):
        tpudist.TPUStrategy(replica_axes=axes, **options)
    found = [r.getMessage() for r in caplog.records if "no rule splits" in r.getMessage()]
    assert [said in message for message in found] == ([True] if said else [])


def test_running_without_a_tpu_is_said_in_one_line(caplog):
    with caplog.at_level(logging.WARNING, "tpudist"):
        tpudist.TPUStrategy(replica_axes={"fsdp": 4})
    assert [r.getMessage() for r in caplog.records if r.name == "tpudist"] == [
        "TPUStrategy runs on 8 cpu devices, because no TPU was found."
    ]


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((64, 32), {"fsdp": 4}, ("fsdp",)),
        ((32, 64), {"fsdp": 4}, (None, "fsdp")),
        ((63, 64), {"fsdp": 4}, (None, "fsdp")),
        ((64, 64), {"fsdp": 4}, ("fsdp",)),
        ((63, 65), {"fsdp": 4}, ()),
        ((8, 4), {"fsdp": 4}, ()),
        ((64, 32), {"fsdp": 1}, ()),
        ((64, 32), {"fsdp": 2, "tensor": 2}, (("fsdp", "tensor"),)),
        ((), {"fsdp": 4}, ()),
    ],
)
def test_the_largest_dim_that_divides_is_split(shape, axes, spec):
    assert split_largest_dim(shape, axes, 1024) == jax.sharding.PartitionSpec(*spec)


# Logical axis rules.


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (None, [("embed", "fsdp")], r"\('embed', 'fsdp'\) names mesh axis fsdp, but .* one device"),
        ({"fsdp": 4}, [("mlp", "tensor")], r"names mesh axis tensor, but replicas have the axes"),
        ({"fsdp": 4}, [("mlp", ("fsdp", "x"))], r"names mesh axis x, but"),
        ({"fsdp": 4}, [("batch", "replica")], r"names mesh axis replica, but"),
    ],
)
def test_a_rule_for_a_missing_axis_is_rejected(axes, rules, message):
    with pytest.raises(ValueError, match=message):
        tpudist.TPUStrategy(replica_axes=axes, logical_axis_rules=rules)


@pytest.mark.parametrize(
    ("axes", "rules", "part"),
    [
        (None, None, (8, 16)),
        ({"fsdp": 4}, None, (2, 16)),
        ({"tensor": 2}, None, (8, 8)),
        ({"fsdp": 2, "tensor": 2}, None, (4, 8)),
        ({"fsdp": 2, "tensor": 2}, [("embed", None)], (8, 8)),
        ({"fsdp": 2, "tensor": 2}, [("embed", "tensor"), ("mlp", "fsdp")], (4, 8)),
        ({"fsdp": 4}, [("embed", None), ("mlp", "fsdp")], (8, 4)),
        ({"x": 2, "y": 2}, [("embed", ("x", "y"))], (2, 16)),
    ],
)
def test_rules_say_what_logical_names_mean(axes, rules, part):
    """One's own go before the default ones; a name without an axis means nothing."""
    strategy = tpudist.TPUStrategy(replica_axes=axes, logical_axis_rules=rules)

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((8, 16)), out_sharding=("embed", "mlp"))

    model = strategy.create(Model)
    assert model.kernel[...].addressable_data(0).shape == part
    with strategy.scope():
        assert Model().kernel[...].addressable_data(0).shape == part


# The base class.


def test_a_strategy_of_ones_own_is_a_mesh_and_a_rule():
    class Halves(Strategy):
        def __init__(self):
            super().__init__(meshes.make_mesh(jax.devices(), {"half": 2}))

        def partition(self, shape, dtype):
            return split_largest_dim(shape, {"half": 2}, 0)

    strategy = Halves()
    assert strategy.num_replicas_in_sync == 4
    assert strategy.cluster_resolver is None
    with strategy.scope():
        v = tpudist.Variable(np.ones((4, 6), np.float32))
    assert v._value.addressable_data(0).shape == (4, 3)
    assert strategy.run(lambda: v.read_value().sum()).tolist() == 24


def test_strategies_on_the_same_devices_do_not_disturb_each_other():
    """TensorFlow's MirroredStrategies do."""
    first, second = tpudist.MirroredStrategy(), tpudist.MirroredStrategy()
    step = lambda: tpudist.get_replica_context().all_reduce("sum", 1.0)  # noqa: E731
    for _ in range(3):
        assert float(first.run(step)) == float(second.run(step)) == 8


def _apply_named_gradients(strategy):
    with strategy.scope():
        weight = tpudist.Variable(jnp.zeros(2))
    optimizer = tpudist.Optimizer(optax.sgd(0.1))
    optimizer.apply_gradients([(jnp.ones(2), weight)], name="step")


def _ignored_requests(strategy):
    rows = np.zeros((8, 2), np.float32)
    return {
        "InputOptions(experimental_place_dataset_on_device=True)": (
            lambda: strategy.experimental_distribute_dataset(
                [rows], tpudist.InputOptions(experimental_place_dataset_on_device=True)
            )
        ),
        "experimental_make_numpy_dataset(session='s')": (
            lambda: strategy.extended.experimental_make_numpy_dataset(rows, session="s")
        ),
        "apply_gradients(name='step')": lambda: _apply_named_gradients(strategy),
        "RunOptions(experimental_enable_dynamic_batch_size=False)": (
            lambda: tpudist.RunOptions(experimental_enable_dynamic_batch_size=False)
        ),
    }


@pytest.mark.parametrize("what", _ignored_requests(None))
def test_a_request_that_is_ignored_is_a_warning(what):
    """Code that comes from tf.distribute runs, and is told what has no effect here."""
    request = _ignored_requests(tpudist.MirroredStrategy())[what]
    with pytest.warns(UserWarning, match=re.escape(what)) as caught:
        request()
    assert any("has no effect: " in str(warning.message) for warning in caught)
