"""`tpudist.compat.v1`: the names of `tf.compat.v1.distribute`, under both paths."""

import importlib
import inspect
import json

import jax
import numpy as np
import pytest

import tpudist
from tpudist.compat import v1

# From `dir(tf.compat.v1.distribute)` and its `experimental` in TensorFlow 2.21.
NAMES = """
    CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode MirroredStrategy
    NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server
    Strategy StrategyExtended cluster_resolver experimental experimental_set_strategy
    get_loss_reduction get_replica_context get_strategy has_strategy in_cross_replica_context
""".split()
EXPERIMENTAL_NAMES = """
    CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
    CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy TPUStrategy
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists_under_both_paths(name):
    distribute = importlib.import_module("tpudist.compat.v1.distribute")
    assert getattr(v1, name) is getattr(distribute, name)
    assert name in v1.__all__
    assert name in distribute.__all__


@pytest.mark.parametrize("name", EXPERIMENTAL_NAMES)
def test_an_experimental_name_exists(name):
    experimental = importlib.import_module("tpudist.compat.v1.distribute.experimental")
    assert v1.experimental is experimental
    assert name in experimental.__all__
    assert hasattr(experimental, name)


def test_no_other_names_are_public():
    assert sorted(v1.__all__) == sorted([*NAMES, "distribute"])
    assert sorted(v1.distribute.__all__) == sorted(NAMES)
    assert sorted(v1.experimental.__all__) == sorted(EXPERIMENTAL_NAMES)


def test_an_unchanged_name_is_the_same_object():
    changed = {"MirroredStrategy", "OneDeviceStrategy", "Strategy", "experimental"}
    for name in set(NAMES) - changed:
        assert getattr(v1, name) is getattr(tpudist, name), name
    changed = {name for name in EXPERIMENTAL_NAMES if name.endswith("Strategy")}
    for name in set(EXPERIMENTAL_NAMES) - changed:
        assert getattr(v1.experimental, name) is getattr(tpudist.experimental, name), name


STRATEGIES = {
    "MirroredStrategy": (lambda: v1.MirroredStrategy(), tpudist.MirroredStrategy),
    "OneDeviceStrategy": (lambda: v1.OneDeviceStrategy("cpu:0"), tpudist.OneDeviceStrategy),
    "CentralStorageStrategy": (
        lambda: v1.experimental.CentralStorageStrategy(),
        tpudist.experimental.CentralStorageStrategy,
    ),
    "MultiWorkerMirroredStrategy": (
        lambda: v1.experimental.MultiWorkerMirroredStrategy(),
        tpudist.MultiWorkerMirroredStrategy,
    ),
    "TPUStrategy": (lambda: v1.experimental.TPUStrategy(), tpudist.TPUStrategy),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    make, _ = STRATEGIES[request.param]
    if request.param in ("MultiWorkerMirroredStrategy", "TPUStrategy"):
        with pytest.warns(DeprecationWarning, match=f"{request.param} is deprecated"):
            return make()
    return make()


def test_a_v1_strategy_is_an_instance_of_the_new_class_and_the_v1_base(strategy):
    _, new = STRATEGIES[type(strategy).__name__]
    assert isinstance(strategy, new)
    assert isinstance(strategy, v1.Strategy)
    assert isinstance(strategy, tpudist.Strategy)
    assert not isinstance(tpudist.OneDeviceStrategy(), v1.Strategy)


def test_reduce_does_not_require_an_axis(strategy):
    n = strategy.num_replicas_in_sync
    ids = strategy.run(lambda: tpudist.get_replica_context().replica_id_in_sync_group)
    assert int(strategy.reduce("SUM", ids)) == n * (n - 1) // 2
    assert float(strategy.reduce(v1.ReduceOp.MEAN, np.float32(3), axis=None)) == 3
    (batch,) = strategy.experimental_distribute_dataset([np.arange(8)])
    assert int(strategy.reduce("SUM", batch, 0)) == 28
    with pytest.raises(TypeError, match="axis"):
        tpudist.OneDeviceStrategy().reduce("SUM", ids)  # type: ignore


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
def test_a_training_loop_of_tensorflow_1_15_runs(strategy):
    """The code is written as in a program for TensorFlow 1.15."""
    dataset = strategy.experimental_make_numpy_dataset(np.arange(16.0)).batch(8)
    iterator = strategy.make_dataset_iterator(dataset)
    with strategy.scope():
        weight = tpudist.Variable(0.0, aggregation=tpudist.VariableAggregation.SUM)

    def step(x):
        weight.assign_add(x.sum())

    iterator.initialize()
    for _ in range(2):
        strategy.experimental_run(step, iterator)
    assert float(weight.numpy()) == 120


SIGNATURES = {
    "Strategy.reduce": ["self", "reduce_op", "value", "axis"],
    "MirroredStrategy": ["devices", "cross_device_ops"],
    "OneDeviceStrategy": ["device"],
    "experimental.CentralStorageStrategy": ["compute_devices", "parameter_device"],
    "experimental.MultiWorkerMirroredStrategy": ["communication", "cluster_resolver"],
    "experimental.ParameterServerStrategy": ["cluster_resolver"],
    "experimental.TPUStrategy": ["tpu_cluster_resolver", "steps_per_run", "device_assignment"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_match_tensorflow(name):
    found = v1
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == SIGNATURES[name]


def test_steps_per_run_has_no_effect_and_warns():
    with pytest.warns(
        UserWarning, match="steps_per_run=10. has no effect: pass the number of steps"
    ):
        with pytest.warns(DeprecationWarning, match="use tpudist.TPUStrategy"):
            strategy = v1.experimental.TPUStrategy(steps_per_run=10)
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert (strategy.steps_per_run, strategy.extended.steps_per_run) == (10, 10)
    assert tpudist.TPUStrategy().extended.steps_per_run == 1
    with pytest.raises(AttributeError, match="only TPUStrategy has it"):
        tpudist.MirroredStrategy().extended.steps_per_run  # noqa: B018


def test_parameter_servers_come_from_tf_config(monkeypatch):
    cluster = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    strategy = v1.experimental.ParameterServerStrategy()
    try:
        assert isinstance(strategy, tpudist.ParameterServerStrategy)
        assert isinstance(strategy, v1.Strategy)
        assert (strategy.num_workers, len(strategy.servers)) == (2, 1)
        with strategy.scope():
            v = tpudist.Variable(3.0)
        assert not isinstance(v, tpudist.DistributedValues)
        assert float(v.numpy()) == 3
    finally:
        strategy.shutdown()


def test_compat_v1_is_an_attribute_of_the_package():
    assert tpudist.compat.v1 is v1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert v1.distribute.get_loss_reduction() is tpudist.ReduceOp.SUM
